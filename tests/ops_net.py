"""A net with functional calls between its modules, and the list of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Inner", "Net", "ops"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.a(x))
        x = self.inner(nn.Tanh()(x))
        return torch.softmax(x @ x.T, -1)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.body(x), x]).flatten(1) + 1


def ops(recording: Any, phase: str = "forward") -> list[str]:
    return [f"{call.path}#{call.call}" for call in recording.order() if call.phase == phase and call.type == "op"]
