"""Networks that tests put torch's own hooks on."""

from __future__ import annotations

import torch
from torch import nn


class Pair(nn.Module):
    """Two layers in a row, called by name."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, times: float = 1.0) -> torch.Tensor:
        return x * times if bias is None else x * times + bias


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fails = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("from forward")
        return x + 1


def _x() -> torch.Tensor:
    return torch.ones(2, 3, requires_grad=True)
