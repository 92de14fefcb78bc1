"""SEMANTICS.md D, 52: what a thread runs is recorded as the step is in which it began, which another thread may end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th


class _Net(nn.Module):
    """Two layers, between which each thread does what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.amid = threading.local()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        getattr(self.amid, "work", lambda: None)()
        return self.second(x)


def _call(net: nn.Module, amid: Callable[[], Any] = lambda: None) -> None:
    [inner] = (module for module in net.modules() if isinstance(module, _Net))
    inner.amid.work = amid
    net(torch.ones(2, 4))


def _while_amid(net: nn.Module, work: Callable[[Callable[[], None]], None]) -> None:
    """Do some work while another thread is in the middle of a call; it is given what lets that call go on to its end."""
    reached, may_go_on = threading.Event(), threading.Event()

    def amid() -> None:
        reached.set()
        assert may_go_on.wait(30)

    other = threading.Thread(target=_call, args=(net, amid))
    other.start()
    assert reached.wait(30)

    def finish() -> None:
        may_go_on.set()
        other.join(30)
        assert not other.is_alive()

    work(finish)
    finish()


def _rows(rec: Any, path: str) -> list[tuple[int, int]]:
    """The steps of a module's calls, with whether the thread was another one."""
    return sorted((call.step, call.thread) for call in rec.order() if call.path == path and call.phase == "forward")


def _calls(rec: Any, path: str) -> int:
    [row] = rec.query(f"select calls from modules where path = '{path}'").to_pylist()
    return row["calls"]


def test_a_call_begun_on_a_step_that_is_not_recorded_is_not() -> None:
    net = _Net()
    with th.record(net, every=2) as rec:
        _call(net)
        _call(net)  # step 1
        _while_amid(net, lambda finish: _call(net, finish))  # begun on step 1, goes on in the middle of step 2
    for path in ("", "first", "second", "second.0"):
        assert _rows(rec, path) == [(0, 0), (2, 0)]
        assert _calls(rec, path) == 2
    assert set(rec.table("values")["step"].to_pylist()) == {0, 2}


def _ends(rec: Any, path: str) -> list[tuple[int, int, bool, str | None]]:
    """Step and thread of each call of a module, whether its duration is known, and its error."""
    rows = rec.query(
        f"select step, thread, duration_ns, error from calls where path = '{path}' order by seq"
    ).to_pylist()
    return [(row["step"], row["thread"], row["duration_ns"] is not None, row["error"]) for row in rows]


def test_of_a_call_whose_hooks_come_off_amid_it_is_not_said_that_it_did_not_end() -> None:
    net = nn.Sequential(_Net())
    with th.record(net, every=2) as rec:
        _call(net)

        def go_on(finish: Callable[[], None]) -> None:
            _call(net)  # step 1, which is not recorded
            finish()

        _while_amid(net, go_on)  # begun on step 0
        _call(net)
        _call(net)
    assert _ends(rec, "") == [(0, 0, True, None), (0, 1, True, None), (2, 0, True, None)]  # the root's hooks stay on
    assert _ends(rec, "0") == [(0, 0, True, None), (0, 1, False, None), (2, 0, True, None)]
    assert _ends(rec, "0.first") == [(0, 0, True, None), (0, 1, True, None), (2, 0, True, None)]
    assert _ends(rec, "0.second") == [(0, 0, True, None), (2, 0, True, None)]


@pytest.mark.parametrize("resumes", [False, True])
def test_a_pause_amid_a_call(resumes: bool) -> None:
    net = _Net()
    with th.record(net) as rec:
        rec.step()

        def pause() -> None:
            rec.pause()
            if resumes:
                rec.resume()

        _call(net, pause)
        rec.resume()
        _call(net)
    assert _ends(rec, "") == [(1, 0, resumes, None), (1, 0, True, None)]
    assert _ends(rec, "first") == [(1, 0, True, None)] * 2
    assert _ends(rec, "second") == [(1, 0, True, None)] * (1 + resumes)


def test_each_module_is_recorded_on_its_own_steps_only() -> None:
    net = _Net()
    with th.record(net, every={"first": 2, "second.0": 3}) as rec:
        for _ in range(3):
            _call(net)
        _while_amid(net, lambda finish: _call(net, finish))  # begun on step 2, goes on in the middle of step 3
    assert _rows(rec, "first") == [(0, 0), (2, 0), (2, 1)]
    assert _rows(rec, "second.0") == [(0, 0), (3, 0)]
    assert (_calls(rec, "first"), _calls(rec, "second.0")) == (3, 2)


def test_a_call_that_outlasts_its_step_is_recorded_to_its_end() -> None:
    net = _Net()
    with th.record(net) as rec:
        _call(net)

        def go_on(finish: Callable[[], None]) -> None:
            for _ in range(3):
                _call(net)
            finish()

        _while_amid(net, go_on)
    for path in ("", "first", "second", "second.0"):
        assert _rows(rec, path) == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]


def test_a_step_that_is_ended_amid_a_call() -> None:
    net = _Net()
    with th.record(net) as rec:
        _call(net, rec.step)
        _call(net, rec.step)
        _call(net)
    for path in ("", "first", "second", "second.0"):
        assert _rows(rec, path) == [(0, 0), (1, 0), (2, 0)]


def test_a_step_that_is_ended_amid_a_call_with_modules_of_different_rates() -> None:
    net = _Net()
    with th.record(net, every={"first": 1, "second.0": 2}) as rec:
        _call(net, rec.step)  # after it, second.0 has no hooks
        _call(net, rec.step)  # after it, it has, on a step that it is not recorded on
        _call(net)
    assert _rows(rec, "first") == [(0, 0), (1, 0), (2, 0)]
    assert _rows(rec, "second.0") == [(2, 0)]
    assert (_calls(rec, "first"), _calls(rec, "second.0")) == (3, 1)


@pytest.mark.parametrize("then", ["pause", "step", "close"])
def test_a_call_that_was_interrupted_before_its_hooks_came_off_did_not_end(then: str) -> None:
    net = nn.Sequential(_Net())

    def interrupt() -> None:
        raise KeyboardInterrupt

    with th.record(net, every=2) as rec:
        with pytest.raises(KeyboardInterrupt):
            _call(net, interrupt)
        getattr(rec, then)()
    for path in ("", "0"):
        [(step, _, known, error)] = _ends(rec, path)
        assert (step, known) == (0, False) and error is not None
