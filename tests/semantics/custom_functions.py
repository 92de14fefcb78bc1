"""Functions of the user's own, of every make: what they return is, for the graph, the output of a node that comes later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["FORWARDS", "HOOKS", "Net", "run"]

_identity, _flatten = nn.Identity(), nn.Flatten()


def _dirty(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.mark_dirty(x)
    return x.mul_(2)


def _dirty_after_a_look(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    ctx.mark_dirty(x)
    x.contiguous()
    x.add_(1)
    return x


def _with_gradients(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x.mul(2)


def _view_with_gradients(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x.mul(2).view(-1, 2, 2)


def _module_with_gradients(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return ctx.module(x.mul(2))


FORWARDS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "view_as": lambda ctx, x: x.view_as(x),
    "view": lambda ctx, x: x.view(-1, 2, 2),
    "transpose": lambda ctx, x: x.transpose(0, 1),
    "slice": lambda ctx, x: x[1:],
    "view of a view": lambda ctx, x: x.view(-1, 2, 2).transpose(0, 2),
    "view and fresh": lambda ctx, x: (x.view_as(x), x.mul(2)),
    "two views": lambda ctx, x: (x.view_as(x), x[:, :2]),
    "itself": lambda ctx, x: x.contiguous(),
    "fresh": lambda ctx, x: x.mul(2),
    "view of a fresh one": lambda ctx, x: x.mul(2).view(-1, 2, 2),
    "detached": lambda ctx, x: x.detach(),
    "made to require a gradient": lambda ctx, x: x.mul(2).requires_grad_(),
    "in place": _dirty,
    "in place after a look": _dirty_after_a_look,
    "with gradients": _with_gradients,
    "a view, with gradients": _view_with_gradients,
    "module": lambda ctx, x: ctx.module(x),
    "module, with gradients": _module_with_gradients,
}


def _before_and_after(y: torch.Tensor, log: list[Any]) -> None:
    y.register_hook(lambda g: g * 0.1)
    y.sum()
    y.register_hook(lambda g: log.append(g.clone()))


def _removed(y: torch.Tensor, log: list[Any]) -> None:
    handle = y.register_hook(lambda g: g * 7)
    y.register_hook(lambda g: g * 0.1)
    handle.remove()


def _retained(y: torch.Tensor, log: list[Any]) -> None:
    y.retain_grad()
    log.append(y)


def _multi(y: torch.Tensor, log: list[Any]) -> None:
    torch.autograd.graph.register_multi_grad_hook([y], lambda gs: log.extend(g.clone() for g in gs if g is not None))


def _on_the_node(y: torch.Tensor, log: list[Any]) -> None:
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda gs: tuple(None if g is None else g * 0.1 for g in gs))  # type: ignore[misc]


def _in_place_afterwards(y: torch.Tensor, log: list[Any]) -> None:
    y.register_hook(lambda g: log.append(g.clone()))
    try:
        y.mul_(3)
    except RuntimeError as error:  # torch allows no more of some views
        log.append(str(error))
    y.register_hook(lambda g: g * 0.1)


HOOKS: dict[str, Callable[[torch.Tensor, list[Any]], None]] = {
    "before and after a use": _before_and_after,
    "removed": _removed,
    "retain_grad": _retained,
    "multi-grad": _multi,
    "on the node": _on_the_node,
    "changed in place": _in_place_afterwards,
}


class Net(nn.Module):
    """A layer, a function of the user's own, and the user's hooks on what that gives."""

    def __init__(self, make: str, hook: str, *, module: nn.Module | None = None) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.inner = nn.Flatten(0) if module is None else module
        self.b = nn.Linear(1, 1)
        self.log: list[Any] = []
        self._hook = HOOKS[hook]
        inner = self.inner

        class Reversed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> Any:
                ctx.module, ctx.shape = inner, x.shape
                return FORWARDS[make](ctx, x)

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
                total = torch.zeros(ctx.shape)
                for gradient in gradients:
                    total = total - gradient.sum() * torch.arange(total.numel()).reshape(ctx.shape)
                return total

        self._function = Reversed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).tanh()
        given = self._function.apply(x)
        total = torch.zeros(())
        for one in given if isinstance(given, tuple) else (given,):
            self._hook(one, self.log)
            total = total + self.b(one.reshape(-1, 1)).sum()
        return total


def run(net: Net, call: Callable[[torch.Tensor], torch.Tensor] | None = None) -> list[Any]:
    """Run a step forward and backward; return all that can be seen of gradients and hooks."""
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    try:
        loss = (call or net)(x)
        loss.backward()
    except RuntimeError as error:
        return [str(error)]
    seen = [parameter.grad for parameter in net.parameters()]
    return seen + [one.grad if isinstance(one, torch.Tensor) and one.retains_grad else one for one in net.log]
