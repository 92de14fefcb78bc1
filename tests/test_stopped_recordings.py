"""What is said of a recording that a fault of ours stopped: of what came later nothing is known, and that is what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.calls import LiveCall
from tenterhook.row_capture import RowCapture
from tests.cli.commands import tenterhook

STOPPED = "before the recording stopped: RuntimeError: a fault of ours"
WORDS = f"""\
3 of 5 selected modules were seen; not seen, or not whole:
  (root), 0, 1: no gradient {STOPPED}
  2, 3: not called {STOPPED}"""


@pytest.fixture(params=["native", "by Python"], autouse=True)
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by Python":
        monkeypatch.setattr("tenterhook.capture.new_engine", lambda parts: None)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the output of the second module meet a fault of ours."""
    value = RowCapture.value

    def fail(self: RowCapture, call: LiveCall, kind: str, slot: str, tensor: Any, **more: Any) -> int:
        if call.watched.path == "1" and kind == "output":
            raise RuntimeError("a fault of ours\nwith more to say")
        return value(self, call, kind, slot, tensor, **more)

    monkeypatch.setattr(RowCapture, "value", fail)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Tanh())


def run(where: dict[str, Any]) -> Any:
    model = net()
    with th.record(model, tensors=True, **where) as rec:
        model(torch.ones(1, 2)).sum().backward()
    return rec


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_the_coverage_says_that_it_stopped_and_why(place: str, tmp_path: Path) -> None:
    rec = run({"to": tmp_path / "one.thk"} if place == "disk" else {})
    assert str(rec.coverage) == WORDS
    if place == "disk":
        assert str(th.open(tmp_path / "one.thk").coverage) == WORDS


@pytest.mark.usefixtures("faulty")
def test_it_says_so_in_the_session_already() -> None:
    model = net()
    with th.record(model, tensors=True) as rec:
        model(torch.ones(1, 2)).sum().backward()
        assert str(rec.coverage).endswith(f"2, 3: not called {STOPPED}")


@pytest.mark.usefixtures("faulty")
def test_a_call_that_was_open_then_has_not_raised(tmp_path: Path) -> None:
    rec = run({"to": tmp_path / "one.thk"})
    ends = {call.path: (call.error, call.duration_ns is None) for call in rec.order()}
    assert ends == {"": (None, True), "0": (None, False), "1": (None, False)}
    shown = tenterhook("show", str(tmp_path / "one.thk"), width=200).out
    assert "raised" not in shown
    assert "did not end" not in shown
    assert f"2, 3 (not called {STOPPED})" in " ".join(shown.split())


@pytest.mark.usefixtures("faulty")
def test_an_error_of_the_user_after_that_is_not_that_of_the_call() -> None:
    model = net()
    with pytest.raises(KeyError), th.record(model, tensors=True) as rec:
        model(torch.ones(1, 2))
        raise KeyError("later")
    assert {call.error for call in rec.order()} == {None}
    assert rec.ended_by == "KeyError: 'later'"


def test_a_fault_at_the_very_end_hides_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module that is not called until the end it is known that it never was."""

    def fail(self: RowCapture, **more: Any) -> bool:
        raise RuntimeError("a fault of ours")

    model = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    with th.record(model, kinds=["output"]) as rec:
        model["one"](torch.ones(1, 2))
        monkeypatch.setattr(RowCapture, "flush", fail)
    monkeypatch.undo()
    assert "never called" in str(rec.coverage)
    assert "stopped" not in str(rec.coverage)
