"""Small networks with what makes hooks fail: in-place layers, nested outputs, keywords, shared modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def hook_counts(model: nn.Module) -> list[int]:
    """Lengths of every hook table of every module, and of the hooks on parameters."""
    counts = [len(getattr(module, table)) for module in model.modules() for table in HOOK_TABLES]
    counts += [len(parameter._backward_hooks or {}) for parameter in model.parameters()]
    return counts + [
        len(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}) for parameter in model.parameters()
    ]


def mlp() -> nn.Sequential:
    """Linear, in-place ReLU, Linear: an output that a later layer overwrites."""
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


class Boom(Exception):
    """What goes wrong in these tests."""


class Failing(nn.Module):
    """Raises as long as it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error if error is not None else Boom("real error")
        self.armed = True

    def forward(self, x: Tensor, *, scale: Tensor | float = 1.0) -> Tensor:
        if self.armed:
            raise type(self.error)(*self.error.args)  # a stored one would keep its traceback, and so this module
        return x * scale


@dataclass
class Answer:
    """An output that is no pytree."""

    logits: Tensor
    hidden: list[Tensor]


class Nested(nn.Module):
    """Gives a dataclass, with a keyword input that needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, *, scale: Tensor) -> Answer:
        hidden = self.body(x) * scale
        return Answer(self.head(torch.relu(hidden)), [hidden])
