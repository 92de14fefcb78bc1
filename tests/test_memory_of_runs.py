"""Long runs in memory grow by their rows only, and no session keeps a model: in every way of recording, and however a step ends."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th


class Net(nn.Module):
    """Two blocks, checkpointed or not, and functional calls."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) if self.reentrant is None else checkpoint(self.a, x, use_reentrant=self.reentrant)
        return torch.relu(self.b(x)) * 2


class _Stop(BaseException):
    pass


def _train(net: nn.Module, number: int) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    net(x).sum().backward()


def _raises(net: nn.Module, number: int) -> None:
    if number % 3 == 0:
        with contextlib.suppress(RuntimeError):
            net(torch.ones(2, 5))
    _train(net, number)


def _is_interrupted(net: nn.Module, number: int) -> None:
    def stop(*arguments: object) -> None:
        raise _Stop

    if number % 3 == 0:
        handle = net.b.register_forward_hook(stop)  # type: ignore[union-attr]
        with contextlib.suppress(_Stop):
            net(torch.ones(2, 4, requires_grad=True))
        handle.remove()  # type: ignore[union-attr]
    _train(net, number)


def _fails_backward(net: nn.Module, number: int) -> None:
    def fail(gradient: Tensor) -> None:
        raise RuntimeError("backward fails")

    x = torch.ones(2, 4, requires_grad=True) * 1
    x.register_hook(fail)
    with contextlib.suppress(RuntimeError):
        net(x).sum().backward()


def _evaluates(net: nn.Module, number: int) -> None:
    _train(net, number)
    with torch.no_grad():
        net(torch.ones(2, 4))


def _replaces(net: nn.Module, number: int) -> None:
    net.b.weight = nn.Parameter(net.b.weight.detach().clone())  # type: ignore[union-attr]
    _train(net, number)


def _in_a_thread(net: nn.Module, number: int) -> None:
    thread = threading.Thread(target=_train, args=(net, number))
    thread.start()
    thread.join()


@dataclass(frozen=True)
class Way:
    """How a run is recorded, and what it does."""

    options: dict[str, Any] = field(default_factory=dict)
    turn: Callable[[Any, int], None] = _train
    make: Callable[[], nn.Module] = Net


ALL = ["input", "output", "grad_input", "grad_output", "param", "param_grad", "update"]
WAYS: dict[str, Way] = {
    "plain": Way(),
    "grad_input": Way({"kinds": ["output", "grad_input", "grad_output"]}),
    "ops": Way({"ops": True}),
    "ops and all kinds": Way({"ops": "all", "kinds": ALL}),
    "checkpointed with reentry": Way({"kinds": ALL, "ops": True}, make=lambda: Net(True)),
    "checkpointed without reentry": Way({"kinds": ALL, "ops": True}, make=lambda: Net(False)),
    "recomputation recorded": Way({"recompute": True, "kinds": ALL}, make=lambda: Net(False)),
    "exceptions": Way({"kinds": ALL, "ops": True}, _raises),
    "interrupts": Way({"kinds": ALL, "ops": True}, _is_interrupted),
    "failing backward": Way({"kinds": ALL, "ops": True}, _fails_backward),
    "sampling": Way({"kinds": ALL, "every": 3}, _evaluates),
    "sampling by pattern": Way({"kinds": ALL, "every": {"**": 7, "b": 2}}, _evaluates),
    "parameters": Way({"kinds": ["param", "param_grad", "update"]}),
    "parameters that are replaced": Way({"kinds": ["param", "param_grad", "update"]}, _replaces),
    "threads": Way({"kinds": ["output", "grad_output"]}, _in_a_thread),
}


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """The first optimizer of a process has torch import its compiler, whose import keeps frames; that is not ours."""
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _steps(net: nn.Module, way: Way, numbers: range) -> None:
    for number in numbers:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        way.turn(net, number)
        optimizer.step()


def _objects() -> Counter[str]:
    return Counter(f"{type(one).__module__}.{type(one).__name__}" for one in gc.get_objects())


@pytest.mark.parametrize("name", WAYS)
def test_a_thousand_steps_grow_by_their_rows_only(name: str) -> None:
    way = WAYS[name]
    net = way.make()
    with th.record(net, tensors=False, on_error="raise", **way.options) as rec:
        _steps(net, way, range(100))
        gc.collect()
        before = _objects()
        _steps(net, way, range(100, 1100))
        gc.collect()
        grown = _objects() - before
        # rows are in Arrow's buffers, some objects for each two thousand of them; the tests' own guard notes each hook
        rows = rec._capture.rows.calls_recorded + rec._capture.rows.values_recorded
        watched = 4 * sum(count for kind, count in grown.items() if kind.startswith("tests."))
        assert {kind: count for kind, count in grown.items() if count > 150 and "tenterhook." in kind} == {}
        assert sum(grown.values()) - watched <= 2000 + rows // 100


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("name", WAYS)
def test_the_model_dies_at_del_without_the_collector(name: str, closed: bool) -> None:
    way = WAYS[name]
    with _no_collection():
        net = way.make()
        dead = weakref.ref(net)
        with th.record(net, tensors=False, on_error="raise", **way.options) as rec:
            _steps(net, way, range(4))
            if not closed:
                del net
                assert dead() is None
        if closed:
            del net
            assert dead() is None
        assert len(rec.order()) > 0


@pytest.mark.parametrize("name", WAYS)
def test_a_model_that_failed_dies_at_del_too(name: str) -> None:
    way = WAYS[name]

    def run() -> tuple[Any, Any]:
        net = way.make()
        dead = weakref.ref(net)
        try:
            with th.record(net, **way.options) as rec:
                _steps(net, way, range(2))
                raise ValueError("ends the session")
        except ValueError:
            pass
        return dead, rec

    with _no_collection():
        dead, rec = run()
        assert dead() is None
        assert rec.ended_by == "ValueError: ends the session"
