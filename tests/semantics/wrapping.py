"""The ways in which a model gets wrapped by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="eager")


def data_parallel(net: nn.Module) -> Any:
    return nn.DataParallel(net)


def distributed(net: nn.Module) -> Any:
    return nn.parallel.DistributedDataParallel(net)


def averaged(net: nn.Module) -> Any:
    return torch.optim.swa_utils.AveragedModel(net)


WRAPPERS: list[Callable[[nn.Module], Any]] = [
    lambda net: net,
    compiled,
    data_parallel,
    distributed,
    lambda net: compiled(distributed(net)),
    lambda net: distributed(compiled(net)),
    averaged,
]
IDS = ["plain", "compiled", "DataParallel", "DDP", "compiled(DDP)", "DDP(compiled)", "AveragedModel"]
