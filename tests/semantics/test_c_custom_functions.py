"""Section C: what an ``autograd.Function`` of the user's own returns keeps its hooks and gradients, whatever is recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tests.semantics.custom_functions import FORWARDS, HOOKS, Net, run

_KINDS = ["input", "output", "grad_input", "grad_output"]


def _gradients(net: nn.Module) -> AbstractContextManager[Any]:
    hooks = th.hooks(net)
    hooks.backward("**", lambda *arguments: None)
    return hooks


SESSIONS: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "all kinds": partial(th.record, kinds=_KINDS, on_error="raise"),
    "ops": partial(th.record, ops=True, on_error="raise"),
    "all ops": partial(th.record, ops="all", kinds=_KINDS, on_error="raise"),
    "hooks": _gradients,
}


def _same(ours: list[Any], bare: list[Any]) -> bool:
    return len(ours) == len(bare) and all(
        torch.equal(a, b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else type(a) is type(b) and a == b
        for a, b in zip(ours, bare, strict=True)
    )


def _made(make: str, hook: str, module: nn.Module | None = None) -> Net:
    torch.manual_seed(0)
    return Net(make, hook, module=module)


@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("make", FORWARDS)
def test_hooks_and_gradients_are_those_of_the_bare_run(make: str, hook: str, session: str) -> None:
    """The function makes its output a node's of its own after we have seen it: what is put on it later must hold."""
    bare = run(_made(make, hook))
    net = _made(make, hook)
    with SESSIONS[session](net):
        ours = run(net)
    assert _same(ours, bare), (ours, bare)


@pytest.mark.parametrize(
    "module", [nn.Identity(), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))], ids=str
)
@pytest.mark.parametrize("make", ["module", "module, with gradients"])
@pytest.mark.parametrize("session", SESSIONS)
def test_modules_inside_of_a_function(make: str, module: nn.Module, session: str) -> None:
    bare = run(_made(make, "before and after a use", module))
    module.zero_grad()
    net = _made(make, "before and after a use", module)
    with SESSIONS[session](net):
        ours = run(net)
    assert _same(ours, bare), (ours, bare)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("make", ["view_as", "two views", "in place", "with gradients"])
def test_under_checkpointing(make: str, session: str, reentrant: bool) -> None:
    def step(net: Net) -> list[Any]:
        def call(x: torch.Tensor) -> torch.Tensor:
            given: Any = checkpoint(net, x.requires_grad_(), use_reentrant=reentrant)
            return given

        return run(net, call)

    bare = step(_made(make, "before and after a use"))
    net = _made(make, "before and after a use")
    with SESSIONS[session](net):
        ours = step(net)
    assert _same(ours, bare), (ours, bare)


@pytest.mark.parametrize("session", SESSIONS)
def test_outputs_of_a_child_with_a_full_backward_hook(session: str) -> None:
    """torch's own hook gives the output as a view that a function of the same make returns."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.heard: list[torch.Tensor] = []
            self.a.register_full_backward_hook(lambda module, gi, go: self.heard.append(go[0].clone()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            x.register_hook(lambda g: g * 0.1)
            used = self.b(x)
            x.register_hook(lambda g: g * 3)
            return used

    def step(wrap: Callable[[nn.Module], AbstractContextManager[Any]] | None) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        net, x = Hooked(), torch.randn(2, 4, requires_grad=True)
        if wrap is None:
            net(x).square().sum().backward()
        else:
            with wrap(net):
                net(x).square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in net.parameters()), *net.heard]

    assert _same(step(SESSIONS[session]), step(None))


class _Solved(torch.autograd.Function):
    """As deep equilibrium layers do: what runs with gradients on in the forward is differentiated in the backward."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = module(ctx.x).mul(2)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.y.backward(gradients)
        return None, ctx.x.grad


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return _Solved.apply(self.inner, x)


def test_gradients_inside_of_a_function_that_differentiates_itself_are_recorded() -> None:
    net = _Layer()
    with th.record(net, ops=True, tensors=True, on_error="raise") as rec:
        net(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert torch.equal(torch.as_tensor(rec["inner"].grad_output), torch.full((2, 4), 2.0))
    assert torch.equal(torch.as_tensor(rec["(root)/mul"].grad_output), torch.ones(2, 4))


def test_an_edit_of_such_a_gradient_runs() -> None:
    net, x = _Layer(), torch.randn(2, 4, requires_grad=True)
    net(x).sum().backward()
    assert x.grad is not None
    bare, x.grad = x.grad, None
    with th.edit(net).grad_output("inner", lambda gradient: gradient * 4):
        net(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, bare * 4)
