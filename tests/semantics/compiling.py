"""Ways to compile a small model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TOLD = "compiled code runs eager in the session: compiled code does not call hooks"


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def wrapped(net: nn.Module, backend: str) -> Any:
    return torch.compile(net, backend=backend)


def in_place(net: nn.Module, backend: str) -> Any:
    net.compile(backend=backend)
    return net


def dynamic(net: nn.Module, backend: str) -> Any:
    return torch.compile(net, backend=backend, dynamic=True)


WAYS = [wrapped, in_place, dynamic]
