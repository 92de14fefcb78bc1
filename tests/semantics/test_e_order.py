"""Row 36: hooks that somebody puts on through torch itself while a session is on the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tests.semantics.asking import ignore

X = torch.ones(1, 2)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def net() -> nn.Sequential:
    return nn.Sequential(Twice(), Twice())


def tens(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 10


def tenfold_input(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] * 10,)


@pytest.mark.parametrize("ran_before", [False, True], ids=["before the first call", "after a call"])
@pytest.mark.parametrize(("prepend", "seen"), [(True, 20.0), (False, 2.0)], ids=["prepended", "appended"])
def test_a_recording_sees_what_a_prepended_hook_gave(prepend: bool, seen: float, ran_before: bool) -> None:
    """Row 36: in front means before the recording that came earlier; behind means after it."""
    model = net()
    with th.record(model, tensors=True) as rec:
        if ran_before:
            model(X)
        handle = model[0].register_forward_hook(tens, prepend=prepend)
        assert model(X).tolist() == [[40.0, 40.0]]
        handle.remove()
        model(X)
    outputs = [call.output[0, 0].item() for call in rec["0"].calls]
    assert outputs == [*([2.0] if ran_before else []), seen, 2.0]


@pytest.mark.parametrize(("prepend", "seen"), [(True, 10.0), (False, 1.0)], ids=["prepended", "appended"])
def test_likewise_before_a_call(prepend: bool, seen: float) -> None:
    """Row 36, same kind: hooks before a call."""
    model = net()
    with (
        th.record(model, kinds=["input", "output"], tensors=True) as rec,
        model[0].register_forward_pre_hook(tenfold_input, prepend=prepend),
    ):
        assert model(X).tolist() == [[40.0, 40.0]]
    assert rec["0"].input["x"][0, 0].item() == seen
    assert rec["0"].output[0, 0].item() == 20.0


def _hooks(model: nn.Module, fired: list[str]) -> AbstractContextManager[Any]:
    hooks = th.hooks(model)
    hooks.forward("0", lambda *arguments: fired.append("ours"))
    return hooks


def _both(model: nn.Module, fired: list[str]) -> AbstractContextManager[Any]:
    recorder = th.record(model)
    hooks = _hooks(model, fired)
    stack = contextlib.ExitStack()
    stack.enter_context(hooks)
    stack.enter_context(recorder)
    return stack


SESSIONS: dict[str, Callable[[nn.Module, list[str]], AbstractContextManager[Any]]] = {
    "hooks": _hooks,
    "recording and hooks": _both,
}


@pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS)
def test_several_hooks_of_others_keep_their_order_around_ours(
    session: Callable[[nn.Module, list[str]], AbstractContextManager[Any]],
) -> None:
    """Row 36, same kind: prepended ones first, the last of them foremost, then ours, then the rest."""
    model, fired = net(), []

    def named(name: str) -> Callable[..., None]:
        return lambda *arguments: fired.append(name)

    with contextlib.ExitStack() as stack:
        with session(model, fired):
            for name, prepend in (("p1", True), ("a1", False), ("p2", True), ("a2", False)):
                stack.enter_context(model[0].register_forward_hook(named(name), prepend=prepend))
            model(X)
            assert fired == ["p2", "p1", "ours", "a1", "a2"]
        fired.clear()
        model(X)
        assert fired == ["p2", "p1", "a1", "a2"]


def test_registration_is_torchs_own_outside_of_sessions() -> None:
    """Row 36: what tells of hooks of others is there for a session's length."""
    bare = nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook
    model = net()
    with th.record(model), th.hooks(model) as hooks:
        hooks.forward("0", ignore)
    assert (nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook) == bare
