"""The net that edits are tried on, under checkpointing or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["MODES", "Net", "Square", "counts", "one"]


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


class Net(nn.Module):
    """y = (w x)^2 with w = 1, under checkpointing or not."""

    def __init__(self, reentrant: bool | None = None):
        super().__init__()
        self.reentrant = reentrant
        self.block = nn.Sequential(nn.Linear(1, 1, bias=False), Square())
        nn.init.ones_(self.block[0].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)


def one() -> torch.Tensor:
    return torch.ones(1, 1, requires_grad=True)


def counts(model: nn.Module) -> list[int]:
    return [
        len(m._forward_hooks) + len(m._forward_pre_hooks) + ("_compiled_call_impl" in vars(m)) for m in model.modules()
    ]


MODES = pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
