"""The native path where something happens in the middle of a call: an end, a hook, a block of rows that is handed over."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.calls import Watched
from tenterhook.recording.memory import MemorySink
from tests.native_rows import NATIVE_ONLY, Rows, _attributes, _both, _Gives, _net, _rows
from tests.properties.trees import Boom

pytestmark = NATIVE_ONLY


def test_closing_in_the_middle_of_a_call() -> None:
    class Closes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rec.close()
            return x * 2

    net = nn.Sequential(nn.ReLU(), Closes(), nn.ReLU())
    before = _attributes(net)
    rec = th.record(net).start()
    net(torch.ones(2))
    assert _attributes(net) == before
    net(torch.ones(2))
    assert {call.step for call in rec.order()} == {0}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("what", ["single", "own", "session", "pause", "pause and hook"])
def test_what_is_put_on_a_module_that_is_running_loses_nothing_of_its_call(what: str, raises: bool) -> None:
    class Puts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if what == "single":
                for module in (net[0], self):
                    stack.enter_context(th.register_forward_hook(module, lambda *_: None))
            elif what == "own":
                net[0].register_forward_hook(lambda *_: None)
            elif what == "session":
                stack.enter_context(th.hooks(net)).forward("**", lambda *_: None)
            else:
                recorders[0].pause()
                if "hook" in what:
                    net[0].register_forward_hook(lambda *_: None)
                recorders[0].resume()
            if raises:
                raise Boom
            return x * 2

    def work(net: nn.Module) -> Rows:
        with stack, th.record(net) as rec:
            recorders[:] = [rec]
            for _ in range(2):
                with contextlib.suppress(Boom):
                    net(torch.ones(2, requires_grad=True)).sum().backward()
        return _rows(rec)

    recorders: list[th.Recorder] = []
    stack = contextlib.ExitStack()
    net = nn.Sequential(nn.Sequential(Puts(), nn.ReLU()), nn.ReLU())
    native = work(net)
    net = nn.Sequential(nn.Sequential(Puts(), nn.ReLU()), nn.ReLU())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenterhook.capture.new_engine", lambda parts: None)
        assert work(net) == native
    assert not any(row["error"] == "did not end" for row in native[0])


class _View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2)[:]


def test_closing_from_another_thread_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    describe, moments, last = Watched.site, 0, 0
    recorders: list[th.Recorder] = []

    def site(watched: Watched, kind: str = "", slot: str = "") -> Any:
        nonlocal moments
        found = describe(watched, kind, slot)
        moments += 1
        if moments == last and recorders:
            closing = threading.Thread(target=recorders[0].close)
            closing.start()
            closing.join()
        return found

    monkeypatch.setattr(Watched, "site", site)
    net = nn.Sequential(_View(), nn.Sequential(_View(), nn.ReLU()), _View())
    while moments >= last:  # until it has been closed at each of them
        moments, last, x = 0, last + 1, torch.ones(3, requires_grad=True)
        with th.record(net, tensors="2", on_error="raise") as rec:
            recorders[:] = [rec]
            output = net(x)
            rec.table("calls")  # handed over, so that modules are described again
            output.sum().backward()
        recorders.clear()
        assert output.tolist() == x.grad.tolist() == [8.0] * 3
    assert last > 20


class _Recurs(nn.Module):
    """Calls itself, with something done before it does."""

    def __init__(self, between: Callable[[nn.Module], Any], error: Exception | None = None) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.between = between
        self.error = error
        self.depth = 0

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        try:
            if self.depth == 1:
                self.between(self)
                x = self(x) * 2
                if self.error is not None:
                    raise self.error
            return self.last(x)
        finally:
            self.depth -= 1


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("error", [None, ValueError("mine")])
def test_calls_that_run_while_hooks_take_the_place_of_ours_end_as_all_do(error: Exception | None) -> None:
    def another_recording(module: nn.Module) -> None:
        with th.record(module):
            pass

    betweens: list[Callable[[nn.Module], Any]] = [
        lambda module: module.register_forward_hook(lambda *arguments: None),
        lambda module: torch.jit.trace(module.last, torch.ones(2, 4)),
        another_recording,
    ]

    def work(net: nn.Module) -> None:
        for _ in range(2):
            try:
                net(torch.ones(2, 4)).sum().backward()
            except ValueError as caught:
                assert caught is error

    for between in betweens:
        native, python, _ = _both(lambda between=between: nn.Sequential(_Recurs(between, error)), work)
        assert native == python
        assert not [row for row in native[0] if row["error"] == "did not end"]


def test_rows_are_right_where_a_block_is_handed_over_while_a_row_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Watched.site

    def site(self: Watched, kind: str = "", slot: str = "") -> Any:
        if recs:
            recs[-1]._capture.rows.flush()  # as another thread may
        return plain(self, kind, slot)

    recs: list[th.Recorder] = []

    def rows() -> Rows:
        torch.manual_seed(0)
        net = _net()
        with th.record(net) as rec:
            recs.append(rec)
            for _ in range(3):
                net(torch.ones(2, 4)).sum().backward()
            recs.clear()
        return _rows(rec)

    clean = rows()
    monkeypatch.setattr(Watched, "site", site)
    assert rows() == clean


@pytest.mark.parametrize("rows", range(1, 7))
def test_a_session_that_ends_while_a_block_is_handed_over(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr("tenterhook.row_capture._BLOCK_ROWS", rows)
    plain = MemorySink.write_values
    recs: list[th.Recorder] = []

    def write_values(self: MemorySink, batch: Any) -> None:
        plain(self, batch)
        if recs:
            recs.pop().close()

    monkeypatch.setattr(MemorySink, "write_values", write_values)
    gives: list[Callable[[Tensor], Any]] = [lambda x: x * 2, lambda x: x.view(-1), lambda x: (x, x), Tensor.detach]
    for give in gives:
        net, x = _Gives(give), torch.ones(3, 4, requires_grad=True)
        clean = net(x)
        rec = th.record(net, on_error="raise").start()
        recs.append(rec)
        for _ in range(4):
            assert torch.equal(net(x), clean)
            net(x).sum().backward()
        assert not recs
        rec.close()


def test_blocks_are_handed_over_when_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenterhook.row_capture._BLOCK_ROWS", 5)

    def work(net: nn.Module) -> None:
        for _ in range(4):
            net(torch.ones(2, 4)).sum().backward()

    native, python, count = _both(_net, work)
    assert native == python
    assert count > 20


def test_blocks_are_handed_over_while_a_module_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    # As the thread that writes to the disk does, where it gets its turn then.
    describe = Watched.site
    handed: set[tuple[str, str]] = set()
    recorders: list[th.Recorder] = []

    def site(watched: Watched, kind: str = "", slot: str = "") -> Any:
        found = describe(watched, kind, slot)
        if recorders and (watched.path, kind) not in handed:
            handed.add((watched.path, kind))
            recorders[0].table("calls")
        return found

    def work(net: nn.Module) -> Rows:
        with th.record(net) as rec:
            recorders[:] = [rec]
            for _ in range(3):
                net(torch.ones(2, 4)).sum().backward()
        recorders.clear()
        return _rows(rec)

    torch.manual_seed(0)
    expected = work(_net())
    monkeypatch.setattr(Watched, "site", site)
    handed.clear()
    torch.manual_seed(0)
    assert work(_net()) == expected
    assert len(handed) > 6
