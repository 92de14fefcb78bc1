"""Row 76: where the gradient of an input is asked for, what a module does to the containers of its inputs is done to the caller's."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tests.semantics.nets import Boom
from tests.semantics.test_c_input_aliases import SESSIONS, _edited, _hooked, _recording

pytestmark = pytest.mark.filterwarnings("ignore:edits that never ran")  # where no gradient comes through the module


@dataclass
class Batch:
    x: Any
    y: Any = None


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


@dataclass
class Slotted:
    __slots__ = ("x", "y")
    x: Any
    y: Any


class Bag:
    def __init__(self, x: Any, y: Any = None) -> None:
        self.x = x
        self.y = y


class Loud(dict[str, Any]):
    """Does more than a dict when something is put into it."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setitem__("count", self.get("count", 0) + 1)


def _get(data: Any, name: str) -> Any:
    return data[name] if hasattr(data, "__getitem__") else getattr(data, name)


def _put(data: Any, name: str, value: Any) -> None:
    if hasattr(data, "__setitem__"):
        data[name] = value
    else:
        setattr(data, name, value)


MAKERS: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda x: {"x": x, "y": 3},
    "OrderedDict": lambda x: OrderedDict(x=x, y=None),
    "defaultdict": lambda x: defaultdict(list, x=x, y=1),
    "UserDict": lambda x: UserDict(x=x, y=1),
    "dataclass": Batch,
    "slots": lambda x: Slotted(x, None),
    "namespace": lambda x: SimpleNamespace(x=x, y=1),
    "object": Bag,
    "loud": lambda x: Loud(x=x, y=1),
}
WORKS: dict[str, Callable[[Any], Any]] = {
    "reads": lambda data: _get(data, "x") * 2,
    "replaces": lambda data: _put(data, "x", _get(data, "x") * 2),
    "adds": lambda data: _put(data, "y", _get(data, "x") * 3),
    "keeps twice": lambda data: _put(data, "y", _get(data, "x")),
    "nests": lambda data: _put(data, "y", [_get(data, "x"), {"z": _get(data, "x") * 2}]),
    "changes in place": lambda data: _get(data, "x").mul_(2),
}


class Works(nn.Module):
    """Works on what it is given, and gives that back or says nothing."""

    def __init__(self, work: Callable[[Any], Any], returns: bool, raises: bool = False) -> None:
        super().__init__()
        self.work = work
        self.returns = returns
        self.raises = raises

    def forward(self, data: Any) -> Any:
        result = self.work(data)
        if self.raises:
            raise Boom
        return data if self.returns else result if isinstance(result, Tensor) else torch.zeros(1)


def _names(data: Any) -> list[str]:
    if hasattr(data, "keys"):
        return list(data.keys())
    return list(vars(data)) if hasattr(data, "__dict__") else ["x", "y"]


def _seen(make: Callable[[Tensor], Any], net: nn.Module, session: Callable[[nn.Module], Any]) -> dict[str, Any]:
    base = torch.tensor([1.0, -2.0], requires_grad=True)
    x = base * 1
    data = make(x)
    with session(net):
        try:
            given = net(data)
        except Boom:
            given = None
        total = sum(
            part.sum()
            for name in _names(data)
            for part in (_get(data, name), given)
            if isinstance(part, Tensor) and part.requires_grad
        )
        if isinstance(total, Tensor):
            total.backward()
    y = _get(data, "y")
    return {
        "the same": given is data,
        "names": _names(data),
        "x is x": _get(data, "x") is x,
        "y is x": y is x or (isinstance(y, list) and y[0] is x),
        "values": [repr(_get(data, name)).split(", grad_fn")[0] for name in _names(data)],
        "given": given.tolist() if isinstance(given, Tensor) else None,
        "gradient": None if base.grad is None else base.grad.tolist(),
    }


@contextlib.contextmanager
def _in_any_order(net: nn.Module) -> Iterator[None]:
    with _recording(net), _hooked(net), _recording(net), _edited(net), _hooked(net):
        yield


@pytest.mark.parametrize("session", [_hooked, _in_any_order])
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("how", ["returns", "is silent", "raises"])
def test_a_container_is_as_the_module_has_left_it(kind: str, work: str, how: str, session: Any) -> None:
    """76: its parts, their order and identity, whether the module gives it back, says nothing or raises."""
    net = Works(WORKS[work], how == "returns", how == "raises")
    bare = _seen(MAKERS[kind], net, lambda net: contextlib.nullcontext())
    seen = _seen(MAKERS[kind], net, session)
    if work == "nests":
        seen["y is x"] = bare["y is x"]  # what the module has put into a container of its own is the alias
    if kind == "loud":  # is copied: nobody but its class knows what putting something into it means
        bare, seen = ({name: one[name] for name in ("given", "gradient")} for one in (bare, seen))
        if work != "reads" or how == "returns":
            return
    assert seen == bare


class Edits(nn.Module):
    def forward(self, parts: Any) -> Any:
        x = parts[0]
        parts.append(x * 2)
        parts.insert(0, torch.ones(2)) if isinstance(parts, list) else parts.appendleft(torch.ones(2))
        parts.pop()
        parts.append(x * 5)
        return parts


@pytest.mark.parametrize("session", [*SESSIONS, _in_any_order])
@pytest.mark.parametrize("kind", [list, deque])
def test_a_list_is_as_the_module_has_left_it(kind: Any, session: Any) -> None:
    """76: what is moved is found again."""
    net = Edits()
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    parts = kind([x, 3])
    with session(net):
        given = net(parts)
    assert given is parts and parts[1] is x and parts[2] == 3
    assert [part.tolist() for part in (parts[0], parts[3])] == [[1.0, 1.0], [5.0, -10.0]]


def test_the_gradient_through_the_module_is_seen_all_the_same() -> None:
    """76: of what the module computes from what stands in a container."""
    net = Works(lambda data: data["x"] * 3, returns=False)
    got: list[Any] = []
    x = torch.tensor([1.0], requires_grad=True)
    data = {"deep": [{"x": x}]}
    inner = Works(lambda data: data["deep"][0]["x"] * 3, returns=False)
    with th.hooks(net) as hooks, th.hooks(inner) as others:
        hooks.backward("", lambda module, grad_input, grad_output: got.append(grad_input))
        others.backward("", lambda module, grad_input, grad_output: got.append(grad_input))
        (net({"x": x}) + inner(data) + x * 10).sum().backward()
    assert x.grad is not None and x.grad.item() == 16.0
    assert sorted(str(one) for one in got) == sorted(str(one) for one in got if "3." in str(one)) and len(got) == 2
    assert data["deep"][0]["x"] is x


@pytest.mark.parametrize("session", SESSIONS)
def test_what_cannot_be_changed_is_given_as_a_copy(session: Any) -> None:
    """76: a frozen dataclass, a tuple; and a module that makes another one."""
    net = Works(lambda data: replace(data, y=data.x * 2).y, returns=False)
    x = torch.tensor([1.0], requires_grad=True)
    data = Frozen(x)
    with session(net):
        net(data).sum().backward()
    assert data.x is x and x.grad is not None and x.grad.item() == 2.0


@pytest.mark.parametrize("session", SESSIONS)
def test_an_interrupted_call_gives_its_container_back_with_the_next(session: Any) -> None:
    """76 and 24: an interrupt goes past all hooks; so does ``edit.stop``."""

    def work(data: Any) -> None:
        if data["x"].sum() > 1:
            raise KeyboardInterrupt

    net = Works(work, returns=False)
    base = torch.ones(2, requires_grad=True)
    interrupted = [{"x": base * 2} for _ in range(3)]
    before = [one["x"] for one in interrupted]
    with session(net):
        for one in interrupted:
            with contextlib.suppress(KeyboardInterrupt):
                net(one)
        net({"x": base * 0})
        assert all(one["x"] is x for one, x in zip(interrupted, before, strict=True))


class Recurs(nn.Module):
    def forward(self, data: Any, times: int = 2) -> Any:
        data["x"] = data["x"] * 2
        return self(data, times - 1) if times else data["x"]


@pytest.mark.parametrize("session", SESSIONS)
def test_a_container_is_handed_on_within_a_module(session: Any) -> None:
    """76, same kind: one call within another, of the same module and with the same container."""
    x = torch.ones(2, requires_grad=True)
    data = {"x": x}
    net = Recurs()
    with session(net):
        net(data).sum().backward()
    assert data["x"].tolist() == [8.0, 8.0] and x.grad is not None and x.grad.tolist() == [8.0, 8.0]
