"""Edits of the gradients of sharded parameters: torchrun --standalone --nproc-per-node N sharded_edits_program.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tenterhook as th

VALUES: dict[str, Any] = {
    "function": lambda gradient: gradient * 2 + 1,
    "zero": th.edits.zero(),
    "one row": th.edits.zero(dim=0, index=1),
    "scale": th.edits.scale(0.5),
    "add": th.edits.add(0.25),
    "replace": th.edits.replace(3.0),
    "array": th.edits.add(np.arange(4.0)),
    "clamp": th.edits.clamp(max=0.1),
    "noise": th.edits.noise(0.1),
    "clip_value": th.edits.clip_value(0.2),
    "clip_norm": th.edits.clip_norm(0.1),
    "normalise": th.edits.normalise(2.0),
    "interpolate": th.edits.interpolate(np.ones(4), 0.5),
    "together": th.edits.clip_norm(0.1, together=True),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def train(net: nn.Module, value: Any, passes: int) -> dict[str, torch.Tensor]:
    """Edit all gradients; return what observers that were there before saw in each pass, and what the parameters got."""
    seen: dict[str, torch.Tensor] = {}

    def see(what: str, name: str, gradient: Any) -> None:
        seen[f"{what} {name} {sum(key.startswith(f'{what} {name}') for key in seen)}"] = whole(gradient).clone()

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with th.hooks(net) as hooks, th.edit(net) as edit:
        hooks.param_grad("**", partial(see, "own"))
        hooks.param_grad("**", partial(see, "sum"), accumulated=True)
        edit.param_grad("**", value)
        for _ in range(passes):
            net(x).square().sum().backward()
        torch.optim.SGD(net.parameters(), 0.0).step()
    return seen | {name: whole(parameter.grad) for name, parameter in net.named_parameters()}


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, value in VALUES.items():
        for passes in (1, 3):
            net = build()
            fully_shard(net[0], mesh=mesh)  # type: ignore[index]
            fully_shard(net, mesh=mesh)
            mine, expected = train(net, value, passes), train(build(), value, passes)
            assert mine.keys() == expected.keys(), (name, passes)
            for key, tensor in expected.items():
                torch.testing.assert_close(mine[key], tensor, msg=lambda text, at=(name, passes, key): f"{at}: {text}")
    print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
