"""The tasks with nnsight, in the forms of its own documentation."""

# ruff: noqa: RET504 - a trace cannot be left by a return
# pyright: reportMissingImports=false, reportOptionalContextManager=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

import nnsight
import torch

from benchmarks.edit_tasks.net import build, loss


def prepare() -> Any:
    return nnsight.NNsight(build())


def read_one(net: Any, x: torch.Tensor) -> Any:
    with net.trace(x):
        out = net.h[1].output.save()
    return out


def read_all(net: Any, x: torch.Tensor) -> Any:
    with net.trace(x):
        out = nnsight.save([block.output for block in net.h])
    return out


def read_gradient(net: Any, x: torch.Tensor) -> Any:
    with net.trace(x):
        hidden = net.h[1].output
        with loss(net.output, x).backward():
            gradient = hidden.grad.save()
    return gradient


def without_a_head(net: Any, x: torch.Tensor) -> Any:
    with net.trace(x):
        net.h[1].attn.out.input[..., :8] = 0
        out = net.output.save()
    return out


def patch_a_position(net: Any, x: torch.Tensor, clean_x: torch.Tensor) -> Any:
    with net.trace(clean_x):
        clean = net.h[1].output.save()
    with net.trace(x):
        net.h[1].output[:, 3] = clean[:, 3]
        out = net.output.save()
    return out


def mean_ablate(net: Any, x: torch.Tensor, many: torch.Tensor) -> Any:
    with net.trace(many):
        mean = net.h[1].attn.output[0].mean(0, keepdim=True).save()
    with net.trace(x):
        net.h[1].attn.output[0][:] = mean
        out = net.output.save()
    return out


def scale_a_part(net: Any, x: torch.Tensor) -> Any:
    with net.trace(x):
        net.h[1].attn.output[0][:] *= 0.5
        out = net.output.save()
    return out


def steer_one_step(net: Any, x: torch.Tensor, vector: torch.Tensor) -> Any:
    with net.trace(x, 4, fn=net._module.generate) as tracer:
        for _ in tracer.iter[2]:
            net.h[1].output = net.h[1].output + vector
        out = tracer.result.save()
    return out


def scale_gradients(net: Any, x: torch.Tensor) -> Any:
    with net.trace(x):
        hidden = net.h[1].output
        with net.output.sum().backward():
            hidden.grad = hidden.grad * 0.5
    return net._module.embed.weight.grad


def skip_a_block(net: Any, x: torch.Tensor) -> Any:
    with net.trace(x):
        net.h[1].skip(net.h[0].output)
        out = net.output.save()
    return out


def stop_early(net: Any, x: torch.Tensor) -> Any:
    with net.trace(x) as tracer:
        out = net.h[1].output.save()
        tracer.stop()
    return out


def edit_and_read(net: Any, x: torch.Tensor) -> Any:
    with net.trace(x):
        net.h[0].output = net.h[0].output * 0.5
        out = net.h[2].output.save()
    return out
