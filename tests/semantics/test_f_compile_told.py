"""Section F, compiled code (row 13): what is said of it, of which sessions, and when the compiler is loaded."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tests.semantics.compiling import TOLD, in_place, make_net


@pytest.fixture(autouse=True)
def fresh_compiler(loaded_compiler: None) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_nothing_is_told_where_nothing_is_compiled() -> None:
    """Row 13: the sentence stands only where there is compiled code; an optimizer alone has torch load its compiler."""
    net = make_net()
    torch.optim.SGD(net.parameters(), lr=0.1).zero_grad()
    for _ in range(2):
        with th.record(net) as rec:
            pass
        assert rec.told == []


def _sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


class Whole(nn.Module):
    """Contains what a session is on."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


# What is compiled, and whether that runs the session's model.
COMPILED: dict[str, tuple[Callable[[nn.Module], Callable[[torch.Tensor], Any]], bool]] = {
    "another function": (lambda net: torch.compile(_sine, backend="eager"), False),
    "another model": (lambda net: torch.compile(make_net(), backend="eager"), False),
    "another model in place": (lambda net: in_place(make_net(), "eager"), False),
    "a function that is given the model": (lambda net: partial(torch.compile(_run, backend="eager"), net), True),
    "a function that runs a part of it": (lambda net: partial(torch.compile(_run, backend="eager"), net[2]), True),  # type: ignore[index]
    "a whole that contains it": (lambda net: torch.compile(Whole(net), backend="eager"), True),
    "a part of it in place": (lambda net: (net[0].compile(backend="eager"), net)[1], True),  # type: ignore[index]
    "a function in its forward": (lambda net: Whole(net.append(Calls(torch.compile(_sine, backend="eager")))), True),  # type: ignore[operator]
}


class Calls(nn.Module):
    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x)


def _run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


@torch.no_grad()  # torch warns of what it does itself when it compiles code that is given the result of a computation
@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize(("compiled", "concerns"), COMPILED.values(), ids=COMPILED)
def test_it_is_told_of_what_concerns_the_model(
    compiled: Callable[[nn.Module], Callable[[torch.Tensor], Any]], concerns: bool, when: str
) -> None:
    """Row 13: by recordings, hooks and edits; compiled code of others is no news for a session that it never meets."""
    net, x = make_net(), torch.ones(2, 2)
    if when == "before":
        run = compiled(net)
        run(x)
    with th.record(net) as rec, th.hooks(net) as hooks, th.edit(net) as edit:
        hooks.forward("0", lambda module, args, output: None)
        edit.output("0", th.edits.scale(1.0))
        run = compiled(net) if when == "during" else run
        net(x)
        run(x)
    expected = [TOLD] if concerns else []
    assert rec.told == expected
    assert rec.recording.manifest.told == expected
    assert (TOLD in str(hooks)) == concerns
    assert (TOLD in str(edit)) == concerns


def test_the_thread_of_somebody_elses_compiled_code_tells_nothing() -> None:
    """Row 13, same kind: a compiled function in another thread, and the model in this one, at the same time."""
    net, x = make_net(), torch.ones(2, 2)
    other = torch.compile(_sine, backend="eager")
    with th.record(net) as rec:
        thread = threading.Thread(target=other, args=(x,))
        thread.start()
        net(x)
        thread.join()
        net(x)
    assert rec.told == []


def test_the_compiler_is_waited_for_and_not_imported() -> None:
    """Row 13, same kind: the model is compiled in a session that began before torch loaded its compiler."""
    program = """
import sys, torch, tenterhook as th
net = torch.nn.Sequential(torch.nn.Linear(2, 2))
finders = sys.meta_path[:]

def waiting():
    return [finder for finder in sys.meta_path if type(finder).__module__.startswith("tenterhook")]

with th.hooks(net):
    pass
assert "torch._dynamo" not in sys.modules and sys.meta_path == finders
with th.hooks(net) as hooks:
    assert waiting()
    handle = hooks.forward("0", lambda module, args, output: output + 100)
    compiled = torch.compile(net, backend="eager")
    assert "torch._dynamo" in sys.modules and not waiting()
    for _ in range(2):
        assert (compiled(torch.ones(1, 2)) > 50).all()
assert handle.fired == 2
assert (compiled(torch.ones(1, 2)) < 50).all()
assert handle.fired == 2
assert "runs eager" in str(hooks)
assert torch._dynamo.eval_frame._stance.stance == "default"
assert type(torch._dynamo.__loader__).__module__.startswith("_frozen_importlib"), torch._dynamo.__loader__
"""
    subprocess.run([sys.executable, "-c", program], check=True)
