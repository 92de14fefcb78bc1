"""The tasks with tenterhook."""

from __future__ import annotations

from typing import Any

import torch

import tenterhook as th
from benchmarks.edit_tasks.net import Net, build, loss


def prepare() -> Net:
    return build()


def read_one(net: Net, x: torch.Tensor) -> Any:
    return th.record(net, "h.1", tensors=True).run(net, x)[1]["h.1"].output


def read_all(net: Net, x: torch.Tensor) -> Any:
    _, rec = th.record(net, "h.*", tensors=True).run(net, x)
    return [rec[f"h.{i}"].output for i in range(3)]


def read_gradient(net: Net, x: torch.Tensor) -> Any:
    return th.record(net, "h.1", tensors=True).run(lambda: loss(net(x), x).backward())[1]["h.1"].grad_output


def without_a_head(net: Net, x: torch.Tensor) -> Any:
    return th.edit(net).input("h.1.attn.out", th.edits.zero(dim=-1, index=slice(0, 8))).run(net, x)


def patch_a_position(net: Net, x: torch.Tensor, clean_x: torch.Tensor) -> Any:
    _, clean = th.record(net, "h.1", tensors=True).run(net, clean_x)
    return th.edit(net).output("h.1", th.edits.patch(clean, dim=1, index=3)).run(net, x)


def mean_ablate(net: Net, x: torch.Tensor, many: torch.Tensor) -> Any:
    _, seen = th.record(net, "h.1.attn", tensors=True).run(net, many)
    return th.edit(net).output("h.1.attn", th.edits.mean_of(seen), slot="[0]").run(net, x)


def scale_a_part(net: Net, x: torch.Tensor) -> Any:
    return th.edit(net).output("h.1.attn", th.edits.scale(0.5), slot="[0]").run(net, x)


def steer_one_step(net: Net, x: torch.Tensor, vector: torch.Tensor) -> Any:
    return th.edit(net).output("h.1", th.edits.add(vector), step=2).run(net.generate, x, 4)


def scale_gradients(net: Net, x: torch.Tensor) -> Any:
    th.edit(net).grad_output("h.1", th.edits.scale(0.5)).run(lambda: net(x).sum().backward())
    return net.embed.weight.grad


def skip_a_block(net: Net, x: torch.Tensor) -> Any:
    return th.edit(net).skip("h.1").run(net, x)


def stop_early(net: Net, x: torch.Tensor) -> Any:
    return th.edit(net).stop("h.1").run(net, x)


def edit_and_read(net: Net, x: torch.Tensor) -> Any:
    with th.edit(net).output("h.0", th.edits.scale(0.5)):
        return th.record(net, "h.2", tensors=True).run(net, x)[1]["h.2"].output
