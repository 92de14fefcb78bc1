"""Row 52: under ``tenterhook record`` a module that several threads call for the first time at once loses none of these calls."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import tenterhook as th
from tenterhook.backends.torch import TorchBackend
from tenterhook.script_recorder import ScriptRecorder, ScriptRequest

LIMIT = 30  # seconds; what is waited for comes at once or never


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which code follows the calls."""
    if request.param == "python":
        monkeypatch.setattr("tenterhook.capture.new_engine", lambda parts: None)
    return request.param


class Calls:
    """Threads that call modules, and a hook for all modules of the user's in which one of them can be held up."""

    def __init__(self) -> None:
        self.held: dict[str, Callable[[nn.Module], None]] = {}
        self.errors: list[BaseException] = []

    def __call__(self, module: nn.Module, args: Any) -> None:
        hold = self.held.get(threading.current_thread().name)
        if hold is not None:
            hold(module)

    def start(self, name: str, work: Callable[[], Any]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, name=name)
        thread.start()
        return thread


@pytest.fixture
def calls() -> Iterator[Calls]:
    calls = Calls()
    with register_module_forward_pre_hook(
        calls
    ):  # it was there before the recorder, so that it runs before that meets a module
        yield calls
    assert not calls.errors


def recorded(tmp_path: Path, work: Callable[[], None], *, ops: bool = False) -> tuple[Any, list[tuple[Any, ...]]]:
    """Record work, and return the recording and (path, thread, call, depth, parent's path) of its calls."""
    recorder = ScriptRecorder(tmp_path / "a.thk", ScriptRequest(kinds=["output"], ops=ops))
    recorder.start()
    try:
        work()
    finally:
        recorder.close()
    rec = th.open(tmp_path / "a.thk")
    rows = rec.query("select path, thread, call, depth, seq, parent, error from calls order by seq").to_pylist()
    paths = {row["seq"]: row["path"] for row in rows}
    assert not any(row["error"] for row in rows)
    return rec, [(row["path"], row["thread"], row["call"], row["depth"], paths.get(row["parent"])) for row in rows]


def waiting(event: threading.Event) -> None:
    assert event.wait(LIMIT)


class Again(nn.Module):
    """Calls itself, so that one call of it begins within another."""

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        return self(x, times - 1) if times else x * 2


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), Again()))


X = torch.ones(1, 2)


@pytest.mark.parametrize("ops", [False, True])
def test_a_call_that_looked_for_hooks_before_the_module_was_met(
    way: str, calls: Calls, ops: bool, tmp_path: Path
) -> None:
    """It has the hooks of before, and meets the module when another thread has long done with it."""

    def work() -> None:
        late = calls.start("late", lambda: model(X))
        waiting(began)
        del calls.held["late"]
        calls.start("first", lambda: model(X)).join(LIMIT)
        go.set()
        late.join(LIMIT)
        model(X)

    def hold(module: nn.Module) -> None:
        began.set()
        waiting(go)

    began, go = threading.Event(), threading.Event()
    model = net()
    calls.held["late"] = hold
    _, rows = recorded(tmp_path, work, ops=ops)
    _assert_whole(rows, 3, ops=ops)


def _assert_whole(rows: list[tuple[Any, ...]], threads: int, *, ops: bool = False) -> None:
    """All threads have made the same calls, each of them once."""
    by_thread: dict[int, list[tuple[Any, ...]]] = {}
    for path, thread, *rest in rows:
        if not path.partition("/")[2]:  # no functional call
            by_thread.setdefault(thread, []).append((path, *rest))
    ran = [("", 0, 0, None), ("0", 0, 1, ""), ("1", 0, 1, ""), ("1.0", 0, 2, "1"), ("1.1", 0, 2, "1")]
    ran += [("1.1", 1, 3, "1.1"), ("1.1", 2, 4, "1.1")]
    assert list(by_thread.values()) == [ran] * threads
    if ops:
        assert Counter(row[0] for row in rows if "/" in row[0]) == {"1.1/mul": threads}


def test_a_call_that_looked_for_hooks_while_the_module_was_met(
    way: str, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the hooks of the module already, and finds that nobody knows it yet: it begins once."""

    def work() -> None:
        first = calls.start("first", lambda: model(X))
        waiting(put)
        second = calls.start("second", lambda: model(X))
        first.join(LIMIT)
        second.join(LIMIT)
        model(X)

    def beginning(self: TorchBackend, modules: Any) -> list[object]:
        put.set()
        if not looked.is_set():
            waiting(looked)
        return find(self, modules)

    find = TorchBackend.beginning
    monkeypatch.setattr(TorchBackend, "beginning", beginning)
    put, looked = threading.Event(), threading.Event()
    model = net()
    calls.held["second"] = lambda module: looked.set()
    _, rows = recorded(tmp_path, work)
    _assert_whole(rows, 3)


def test_a_part_that_is_called_by_itself_while_the_model_is_met(way: str, calls: Calls, tmp_path: Path) -> None:
    """The call of a part is that part's, also where it looked for hooks before the model was known."""

    def work() -> None:
        late = calls.start("late", lambda: model[1](X))
        waiting(began)
        del calls.held["late"]
        model(X)
        go.set()
        late.join(LIMIT)

    def hold(module: nn.Module) -> None:
        began.set()
        waiting(go)

    began, go = threading.Event(), threading.Event()
    model = net()
    calls.held["late"] = hold
    _, rows = recorded(tmp_path, work)
    assert [row for row in rows if row[1] != rows[0][1]] == [
        ("1", 1, 0, 0, None), ("1.0", 1, 0, 1, "1"), ("1.1", 1, 0, 1, "1"), ("1.1", 1, 1, 2, "1.1"), ("1.1", 1, 2, 3, "1.1"),
    ]  # fmt: skip


def test_a_late_call_that_raises_is_one_call(way: str, calls: Calls, tmp_path: Path) -> None:
    """Its error is recorded as that of any other call, and the calls after it begin and end as ever."""

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread().name == "late":
                raise ValueError("late")
            return x

    def call_late() -> None:
        with pytest.raises(ValueError, match="late") as raised:
            model(X)
        kept.append(raised.value)  # with all of the call

    def work() -> None:
        late = calls.start("late", call_late)
        waiting(began)
        del calls.held["late"]
        model(X)
        go.set()
        late.join(LIMIT)
        model(X)

    def hold(module: nn.Module) -> None:
        began.set()
        waiting(go)

    kept: list[BaseException] = []
    began, go = threading.Event(), threading.Event()
    model = nn.Sequential(Raises(), nn.ReLU())
    calls.held["late"] = hold
    recorder = ScriptRecorder(tmp_path / "a.thk", ScriptRequest(kinds=["output"]))
    recorder.start()
    work()
    recorder.close()
    rows = th.open(tmp_path / "a.thk").query("select path, error from calls order by thread, seq").to_pylist()
    plain = [("", None), ("0", None), ("1", None)]
    error = "ValueError: late"
    assert sorted((row["path"], row["error"]) for row in rows if not row["error"]) == sorted([*plain, *plain])
    assert [(row["path"], row["error"]) for row in rows if row["error"]] == [("", error), ("0", error)]


def test_threads_that_meet_modules_at_once_lose_no_call(way: str, tmp_path: Path) -> None:
    """Whatever the threads do meanwhile."""
    nets = [nn.Linear(2, 2) for _ in range(600)]
    barrier = threading.Barrier(3)

    def work() -> None:
        for one in nets:
            barrier.wait(LIMIT)
            one(X)

    def run() -> None:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        rec, _ = recorded(tmp_path, run)
    finally:
        sys.setswitchinterval(before)
    counts = rec.query("select model, count(*) as n from calls group by model").to_pylist()
    assert Counter(row["n"] for row in counts) == {3: len(nets)}
