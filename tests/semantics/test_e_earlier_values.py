"""SEMANTICS.md E, row 32: recording expressions that have a value, in the callbacks of th.hooks.

``store.setdefault(name, output)`` gives back what it is given in the first call and the same again in each later one, so the
model would go on with the output of its first step for ever, and train nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.errors import EditError


class Net(nn.Module):
    """Gives a tuple; its parts are given by position and by keyword."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = torch.tanh(self.body(input=x))
        return self.head(hidden), {"hidden": hidden}


def _run(net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    out, more = net(x)
    (out.square().sum() + more["hidden"].sum()).backward()
    return [out, more["hidden"], *(parameter.grad.clone() for parameter in net.parameters())]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _inputs() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, 4) for _ in range(3)]


class Keeper:
    """A store with a method, and an object that can be called."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def keep(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.kept.setdefault("it", output)

    __call__ = keep


def _setdefault(change: Callable[[Any], Any]) -> Callable[..., Any]:
    store: dict[str, Any] = {}
    return lambda module, args, output: store.setdefault("it", change(output))


SETDEFAULTS: dict[str, Callable[[], Callable[..., Any]]] = {
    "itself": lambda: _setdefault(lambda output: output),
    "detached": lambda: _setdefault(lambda output: output.detach()),
    "data": lambda: _setdefault(lambda output: output.data),
    "view": lambda: _setdefault(lambda output: output[...]),
    "copy": lambda: _setdefault(lambda output: output.detach().clone()),
    "method": lambda: Keeper().keep,
    "object": Keeper,
    "partial": lambda: partial(lambda store, module, args, output: store.setdefault("it", output), {}),
}


@pytest.mark.parametrize("how", SETDEFAULTS)
@pytest.mark.parametrize("path", ["body", "head"])
def test_the_value_of_an_earlier_call_is_refused(how: str, path: str) -> None:
    net = Net()
    xs = _inputs()
    with th.hooks(net) as hooks, torch.no_grad():
        hooks.forward(path, SETDEFAULTS[how]())
        first = net(xs[0])
        with pytest.raises(EditError, match=rf"forward of {path} .*earlier call.*\n.*setdefault"):
            net(xs[1])
    with torch.no_grad():
        assert torch.equal(first[0], net(xs[0])[0])


def test_a_structured_output_and_arguments_of_an_earlier_call_are_refused() -> None:
    net = Net()
    xs = _inputs()
    store: dict[str, Any] = {}
    with th.hooks(net) as hooks:
        hooks.forward("", lambda module, args, output: store.setdefault("out", output))
        _run(net, xs[0])
        with pytest.raises(EditError, match=r"forward of \(root\).*earlier call"):
            _run(net, xs[1])
    with th.hooks(net) as hooks:
        hooks.forward_pre("head", lambda module, args: store.setdefault("in", args))
        _run(net, xs[0])
        with pytest.raises(EditError, match=r"forward_pre of head.*earlier call"):
            _run(net, xs[1])
    with th.hooks(net) as hooks:
        hooks.forward_pre("body", lambda module, args, kwargs: store.setdefault("kw", (args, kwargs)), with_kwargs=True)
        _run(net, xs[0])
        with pytest.raises(EditError, match=r"forward_pre of body.*earlier call"):
            _run(net, xs[1])


@pytest.mark.parametrize("kind", ["backward_pre", "backward", "param_grad", "tensor"])
def test_gradients_of_an_earlier_pass_are_refused(kind: str) -> None:
    """The same for gradients: those of the first step would be trained on for ever."""
    net = Net()
    xs = _inputs()
    store: dict[str, Any] = {}
    with th.hooks(net) as hooks:
        if kind == "tensor":
            hooks.tensor(net.head.weight, partial(store.setdefault, "head"))
        elif kind == "param_grad":
            hooks.param_grad("head.weight", store.setdefault)
        else:
            getattr(hooks, kind)("head", lambda *arguments: store.setdefault("head", arguments[1]))
        _run(net, xs[0])
        with pytest.raises(EditError, match=rf"{kind} of .*earlier call"):
            _run(net, xs[1])


def test_a_session_for_each_step_is_refused_too() -> None:
    """The same lines of code in a new session go on with the store of the old one."""
    net = Net()
    store: dict[str, Any] = {}

    def step(x: Tensor) -> None:
        with th.hooks(net) as hooks:
            hooks.forward("body", lambda module, args, output: store.setdefault("body", output))
            _run(net, x)

    first, second, _ = _inputs()
    step(first)
    with pytest.raises(EditError, match="earlier call"):
        step(second)


def test_functions_are_checked_alike() -> None:
    net = Net()
    xs = _inputs()
    store: dict[str, Any] = {}
    with th.hooks(net) as hooks:
        hooks.after(torch, "tanh", lambda instance, args, kwargs, result: store.setdefault("tanh", result))
        _run(net, xs[0])
        with pytest.raises(EditError, match=r"after of torch\.tanh.*earlier call"):
            _run(net, xs[1])


LAST: dict[str, Any] = {}
RECORDING: dict[str, Callable[[list[Any]], Callable[..., Any]]] = {
    "append": lambda kept: lambda module, args, output: kept.append(output),
    "setdefault and append": lambda kept: lambda module, args, output: LAST.setdefault("all", []).append(output),
    "walrus": lambda kept: lambda module, args, output: (last := output, kept.append(last))[0],
    "append or": lambda kept: lambda module, args, output: kept.append(output) or output,
    "setitem": lambda kept: lambda module, args, output: LAST.__setitem__("last", output),
    "update": lambda kept: lambda module, args, output: LAST.update(last=output),
    "print": lambda kept: lambda module, args, output: print(output.shape),
    "view of it": lambda kept: lambda module, args, output: output.view_as(output),
    "setdefault of a fresh name": lambda kept: lambda module, args, output: LAST.setdefault(id(output), output),
}


@pytest.mark.parametrize("how", RECORDING)
def test_recording_expressions_that_are_harmless_are_let_through(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    xs = _inputs()
    clean = [_run(net, x) for x in xs]
    with th.hooks(net) as hooks:
        handle = hooks.forward("body", RECORDING[how]([]))
        assert all(_same(_run(net, x), expected) for x, expected in zip(xs, clean, strict=True))
    assert handle.fired == len(xs)
    LAST.clear()


def test_what_is_meant_is_let_through() -> None:
    """A clean activation in place of what comes, from the first call on, and again what was given in this very call."""
    net = Net().eval()
    xs = _inputs()
    with torch.no_grad():
        clean = net.body(xs[0])
        with th.hooks(net) as hooks:
            hooks.forward("body", lambda module, args, output: clean)
            patched = [net(x)[0] for x in xs]
        assert all(torch.equal(one, patched[0]) for one in patched)
        drop = nn.Sequential(nn.Dropout(0.5))
        with th.hooks(drop) as hooks:
            hooks.forward("0", lambda module, args, output: args[0])
            drop.eval()
            drop(xs[0])
            drop.train()
            assert torch.equal(drop(xs[0]), xs[0])


@pytest.mark.parametrize(
    ("kind", "fn", "written"),
    [
        ("forward", lambda module, output: None, r"lambda module, args, output: \.\.\."),
        ("forward", Keeper.keep, r"def keep\(module, args, output\): \.\.\."),
        ("backward", Keeper().keep, None),
        ("forward_pre", Keeper().keep, r"def keep\(self, module, args\): \.\.\."),
        ("forward_pre", Keeper(), r"fn\(module, args\)"),
        ("backward_pre", partial(Keeper.keep, None, None, None), r"fn\(module, grad_output\)"),
        ("param_grad", lambda gradient: gradient, r"lambda name, gradient: \.\.\."),
    ],
)
def test_a_wrong_signature_is_shown_as_it_should_be_written(kind: str, fn: Any, written: str | None) -> None:
    net = Net()
    with th.hooks(net) as hooks:
        select = "**.weight" if kind == "param_grad" else "body"
        if written is None:  # takes three arguments, as it should
            getattr(hooks, kind)(select, fn)
            return
        with pytest.raises(th.errors.HookError, match=rf"write it as {written}$"):
            getattr(hooks, kind)(select, fn)
