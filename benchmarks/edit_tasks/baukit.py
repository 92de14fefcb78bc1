"""The tasks with baukit."""

# pyright: reportMissingImports=false
from __future__ import annotations

import itertools
from typing import Any

import torch
from baukit.nethook import Trace, TraceDict

from benchmarks.edit_tasks.net import Net, build, loss


def prepare() -> Net:
    return build()


def read_one(net: Net, x: torch.Tensor) -> Any:
    with Trace(net, "h.1") as seen:
        net(x)
    return seen.output


def read_all(net: Net, x: torch.Tensor) -> Any:
    with TraceDict(net, ["h.0", "h.1", "h.2"]) as seen:
        net(x)
    return [one.output for one in seen.values()]


def read_gradient(net: Net, x: torch.Tensor) -> Any:
    with Trace(net, "h.1", retain_grad=True) as seen:
        loss(net(x), x).backward()
    return seen.output.grad


def without_a_head(net: Net, x: torch.Tensor) -> Any:
    # there is no edit of inputs; without its values a head gives nothing, too
    with Trace(net, "h.1.attn.v", edit_output=lambda v: torch.cat([v[..., :8] * 0, v[..., 8:]], -1)):
        return net(x)


def patch_a_position(net: Net, x: torch.Tensor, clean_x: torch.Tensor) -> Any:
    with Trace(net, "h.1") as clean:
        net(clean_x)
    at = torch.arange(6)[:, None] == 3
    with Trace(net, "h.1", edit_output=lambda y: torch.where(at, clean.output, y)):
        return net(x)


def mean_ablate(net: Net, x: torch.Tensor, many: torch.Tensor) -> Any:
    with Trace(net, "h.1.attn") as seen:
        net(many)
    with Trace(net, "h.1.attn", edit_output=lambda y: (seen.output[0].mean(0).expand_as(y[0]), y[1])):
        return net(x)


def scale_a_part(net: Net, x: torch.Tensor) -> Any:
    with Trace(net, "h.1.attn", edit_output=lambda y: (y[0] * 0.5, y[1])):
        return net(x)


def steer_one_step(net: Net, x: torch.Tensor, vector: torch.Tensor) -> Any:
    step = itertools.count()
    with Trace(net, "h.1", edit_output=lambda y: y + vector if next(step) == 2 else y):
        return net.generate(x, 4)


def scale_gradients(net: Net, x: torch.Tensor) -> Any:
    # it keeps gradients and edits none; its edit of the output can hook the tensor
    with Trace(net, "h.1", edit_output=lambda y: (y.register_hook(lambda gradient: gradient * 0.5), y)[1]):
        net(x).sum().backward()
    return net.embed.weight.grad


def skip_a_block(net: Net, x: torch.Tensor) -> Any:
    # the block runs, and what it was given is put in place of what it gave
    with Trace(net, "h.1", edit_output=lambda output, layer, inputs: inputs[0]):
        return net(x)


def stop_early(net: Net, x: torch.Tensor) -> Any:
    with Trace(net, "h.1", stop=True) as seen:
        net(x)
    return seen.output


def edit_and_read(net: Net, x: torch.Tensor) -> Any:
    with TraceDict(net, ["h.0", "h.2"], edit_output=lambda y, layer: y * 0.5 if layer == "h.0" else y) as seen:
        net(x)
    return seen["h.2"].output
