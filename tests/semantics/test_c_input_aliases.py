"""Where grad_input is asked for a module gets aliases of its inputs: what it does to them happens to the inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.errors import UnsupportedError


@contextlib.contextmanager
def _recording(net: nn.Module) -> Iterator[None]:
    with th.record(net, kinds=["output", "grad_input"], on_error="raise"):
        yield


@contextlib.contextmanager
def _hooked(net: nn.Module) -> Iterator[None]:
    with th.hooks(net) as hooks:
        hooks.backward("", lambda module, grad_input, grad_output: None)
        yield


@contextlib.contextmanager
def _hooked_twice(net: nn.Module) -> Iterator[None]:
    with _hooked(net), _hooked(net), _recording(net):
        yield


@contextlib.contextmanager
def _edited(net: nn.Module) -> Iterator[None]:
    with th.edit(net) as edit:
        edit.grad_input("", lambda value: value)
        yield


SESSIONS = [_recording, _hooked, _hooked_twice, _edited]
Work = Callable[[Tensor], Tensor]


class Does(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        return self.work(x)


def _pins(x: Tensor) -> Tensor:
    x.seen = True  # type: ignore[attr-defined]
    x.count = getattr(x, "count", 0) + 1  # type: ignore[attr-defined]
    return x * 2


def _unpins(x: Tensor) -> Tensor:
    assert x.label == "mine"  # type: ignore[attr-defined]
    del x.label  # type: ignore[attr-defined]
    return x * 2


def _new_memory(x: Tensor) -> Tensor:
    x.data = x.data * 2
    return x.sum()


def _memory_of_another(x: Tensor) -> Tensor:
    x.data = torch.full_like(x, 7)
    return x.exp()


def _other_strides(x: Tensor) -> Tensor:
    x.data = x.data.t()
    return x * 2


def _in_place_and_new_memory(x: Tensor) -> Tensor:
    y = x * 1
    x.data = x.data + 1
    return y + x


def _by_data(x: Tensor) -> Tensor:
    x.data.mul_(3)
    return x * 1


WORKS: list[Work] = [
    _pins,
    _unpins,
    _new_memory,
    _memory_of_another,
    _other_strides,
    _in_place_and_new_memory,
    _by_data,
]


def _run(work: Work, session: Callable[[nn.Module], Any], leaf: bool) -> dict[str, Any]:
    net = Does(work)
    base = torch.arange(9.0).reshape(3, 3).requires_grad_()
    x = base if leaf else base * 1
    x.label = "mine"  # type: ignore[attr-defined]
    with session(net):
        out = net(x)
        if out.requires_grad and out.grad_fn is not None:
            out.sum().backward()
    return {
        "out": out.detach().clone(),
        "x": x.detach().clone(),
        "attributes": dict(vars(x)),
        "gradient": base.grad,
    }


@pytest.mark.parametrize("leaf", [False, True], ids=["result", "leaf"])
@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("work", WORKS)
def test_what_is_done_to_an_input_is_done_to_it(work: Work, session: Callable[[nn.Module], Any], leaf: bool) -> None:
    bare, seen = _run(work, contextlib.nullcontext, leaf), _run(work, session, leaf)
    assert seen["attributes"] == bare["attributes"]
    for name in ("out", "x", "gradient"):
        if bare[name] is None:
            assert seen[name] is None
        else:
            assert torch.equal(seen[name], bare[name]), name


def test_attributes_pinned_later_are_on_both() -> None:
    kept: list[Tensor] = []
    net = Does(lambda x: (kept.append(x), x * 2)[1])
    x = torch.ones(2, requires_grad=True) * 1
    with th.record(net, kinds=["grad_input"]):
        net(x)
    x.late = 1  # type: ignore[attr-defined]
    assert kept[0].late == 1  # type: ignore[attr-defined]


def test_what_a_module_did_before_it_raised_is_done_too() -> None:
    def work(x: Tensor) -> Tensor:
        x.data = x.data * 2
        raise ValueError("no")

    net, x = Does(work), torch.ones(2, requires_grad=True) * 1
    with pytest.raises(ValueError, match="no"), th.record(net, kinds=["grad_input"]):
        net(x)
    assert x.tolist() == [2, 2]


@pytest.mark.parametrize("session", [_recording, _hooked])
@pytest.mark.parametrize(
    "work",
    [lambda x: x.unsqueeze_(0) * 1, lambda x: x.t_() * 1, lambda x: x.squeeze_() * 1, lambda x: x.transpose_(0, 1) + 1],
)
def test_another_shape_in_place_is_refused(work: Work, session: Callable[[nn.Module], Any]) -> None:
    net = Does(work)
    with pytest.raises(UnsupportedError, match="changes the shape of its input in place"), session(net):
        net(torch.ones(1, 2, requires_grad=True) * 1)


@pytest.mark.parametrize("session", [_recording, _hooked])
def test_what_an_alias_cannot_says_why(session: Callable[[nn.Module], Any]) -> None:
    def work(x: Tensor) -> Tensor:
        x.detach_()
        return x * 2

    net = Does(work)
    with pytest.raises(RuntimeError, match="detach") as caught, session(net):
        net(torch.ones(2, requires_grad=True) * 1)
    notes = getattr(caught.value, "__notes__", None)
    assert notes is None or any("is an alias here" in note for note in notes)
