"""One rank of several: torchrun --standalone --nproc-per-node N rank_program.py WHAT TARGET."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import tenterhook as th


class Net(nn.Module):
    """Seven rows and five: neither can be divided evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(9, 7)
        self.head = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.fc(x)))


def train(net: nn.Module, steps: int, killed: int | None = None) -> None:
    """Train on a batch of each rank's own."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for step in range(steps):
        if step == 2 and killed == dist.get_rank():
            time.sleep(2.5)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        net(torch.randn(4, 9, generator=generator)).square().sum().backward()
        optimizer.step()


def whole(net: nn.Module) -> dict[str, np.ndarray]:
    """Gather parameters and gradients from all ranks."""
    found = {}
    for name, parameter in net.named_parameters():
        found[f"param {name}"] = parameter.full_tensor().detach().numpy().copy()
        if parameter.grad is not None:
            found[f"param_grad {name}"] = parameter.grad.full_tensor().numpy().copy()
    return found


def sharded(target: Path) -> None:
    """Record a model whose parameters are spread over the ranks, and keep the wholes beside it."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")) if world == 4 else None
    for name, where in (("fsdp", None), ("hsdp", mesh)):
        if name == "hsdp" and where is None:
            continue
        net = Net()
        for part in (net.fc, net.head, net):
            fully_shard(part, mesh=where)
        before = whole(net)
        with th.record(net, kinds=["param", "param_grad", "update"], tensors=True, to=target / f"{name}.thk"):
            train(net, 1)
        after = whole(net)
        for key in list(before):
            after[f"update {key[6:]}"] = after[key] - before[key]
        if dist.get_rank() == 0:
            np.savez(target / f"{name}.npz", **{**after, **before})


def columns(target: Path) -> None:
    """Record a parameter that is split by columns: no part of it is one range of the whole."""
    net = nn.Linear(6, 4, bias=False)
    before = net.weight.detach().clone()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [Shard(1)]))
    x = distribute_tensor(torch.ones(2, 6), mesh, [Shard(1)])
    with th.record(net, kinds=["param", "output"], to=target / "columns.thk"):
        net(x)
    if dist.get_rank() == 0:
        np.savez(target / "columns.npz", **{"param weight": before.numpy()})


def main() -> None:
    what, target = sys.argv[1], Path(sys.argv[2])
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    if what == "sharded":
        sharded(target)
        columns(target)
    elif what == "plain":  # for tenterhook record
        train(DistributedDataParallel(Net()), 3)
    else:
        net = DistributedDataParallel(Net())
        with th.record(net, to=target / "ddp.thk"):
            train(net, 4, killed=1 if what == "killed" else None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
