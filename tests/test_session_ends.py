"""How sessions end and go on: faults of ours, signals, pauses and wrong options harm neither the run nor the recording."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.errors import SelectionError
from tenterhook.parameters import ParameterWatch
from tenterhook.recording_session import RecordingSession


def _net() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def _train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()


def test_a_fault_of_ours_at_the_end_of_a_step_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: ParameterWatch, step: int) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(ParameterWatch, "step_ended", fails)
    net, optimizer = _net()
    with th.record(net, kinds=["output", "update"]) as rec:
        for _ in range(3):
            _train(net, optimizer)
    assert rec.recording.manifest.partial == "RuntimeError: ours"
    with th.record(net, kinds=["output", "update"]) as rec:
        rec.step()
    assert rec.recording.manifest.partial == "RuntimeError: ours"


def test_hooks_stay_off_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = _net()
    with th.record(net) as rec:
        rec._capture.stop("a fault")
        _train(net, optimizer)
        assert not [hook for module in net.modules() for hook in module._forward_hooks]


def test_the_users_exception_wins_over_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(self: RecordingSession) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(RecordingSession, "_modules", fails)
    net, optimizer = _net()
    with pytest.raises(ValueError, match="the user's"), th.record(net, to=tmp_path / "a.thk"):
        _train(net, optimizer)
        raise ValueError("the user's")
    manifest = th.open(tmp_path / "a.thk").manifest
    assert manifest.complete and "ours" in str(manifest.partial)


def test_a_pause_within_a_step_loses_no_parameter_gradient() -> None:
    net, optimizer = _net()
    with th.record(net, kinds=["param_grad"]) as rec:
        for _ in range(2):
            optimizer.zero_grad()
            loss = net(torch.ones(3, 2)).sum()
            rec.pause()
            rec.resume()
            loss.backward()
            optimizer.step()
    assert rec.query("select count(*) as n from values where kind = 'param_grad'")["n"].to_pylist() == [8]


@pytest.mark.parametrize("option", [{"tensors": "nomatch"}, {"every": {"nomatch": 2}}])
def test_a_wrong_option_leaves_the_target_free(option: dict[str, object], tmp_path: Path) -> None:
    net, _ = _net()
    with pytest.raises(SelectionError):
        th.record(net, to=tmp_path / "a.thk", **option)  # type: ignore[arg-type]
    with th.record(net, to=tmp_path / "a.thk") as rec:
        net(torch.ones(1, 2))
    assert rec.recording.manifest.complete


def test_a_budget_without_a_disk_is_refused() -> None:
    with pytest.raises(th.TenterhookError, match="give to="):
        th.record(_net()[0], tensors=True, budget=10)


def test_a_budget_counts_tensors_only(tmp_path: Path) -> None:
    net, optimizer = _net()
    with th.record(net, kinds=["output"], tensors=True, to=tmp_path / "a.thk", budget=3 * 4 * 2 * 50) as rec:
        for _ in range(60):
            _train(net, optimizer)
    stored = rec.query("select count(tensor) as n, count(*) as all from values where kind = 'output' and path = '0'")
    assert stored.to_pylist() == [{"n": 25, "all": 60}]  # 24 bytes a step beside the 24 of the two others
    assert "budget" in str(rec.recording.manifest.tensors_stopped)


PROGRAM = """
import sys, torch
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        return x.expand(400_000_000)  # takes long to measure

net = Slow()
print("running", flush=True)
while True:
    net(torch.ones(1))
"""


def test_a_signal_in_the_middle_of_a_measurement_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "tenterhook", "record", "-q", "--to", "run.thk", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "running\n"
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == -signal.SIGTERM
        finally:
            process.kill()
    assert th.open(tmp_path / "run.thk").manifest.complete


def test_a_call_that_was_cut_off_takes_no_later_one_with_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.record(model) as rec:
        with th.edit(model) as edit:
            edit.stop("encoder.0")
            model.encoder(torch.ones(1, 2))
        for _ in range(3):
            _train(model.encoder, optimizer)
    calls = [call for call in rec.order() if call.path == "encoder" and call.phase == "forward"]
    assert [(call.step, call.call, call.depth) for call in calls][1:] == [(0, 1, 0), (1, 0, 0), (2, 0, 0)]


LOCKED = """
import gc, os, signal, threading, time, torch
from torch import nn
from tenterhook.row_capture import RowCapture

net = nn.Linear(2, 2)
net(torch.ones(1, 2))
(rows,) = [one for one in gc.get_objects() if type(one) is RowCapture]
mine, held = threading.Lock(), threading.Event()

def work():  # as a thread that hands rows over while the main thread puts a tensor into the queue
    with rows._lock:
        held.set()
        with mine:
            pass

with mine:
    threading.Thread(target=work, daemon=True).start()
    held.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
time.sleep(120)
"""


def test_a_signal_amid_what_closing_waits_for_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOCKED)
    command = [sys.executable, "-m", "tenterhook", "record", "-q", "--to", "run.thk", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == -signal.SIGTERM, done.stderr
    manifest = th.open(tmp_path / "run.thk").manifest
    assert manifest.complete and str(manifest.error).startswith("Terminated: ended by SIGTERM")


# ---- sessions that have not begun, or are over ----


def test_a_recorder_that_was_never_started_says_how(tmp_path: Path) -> None:
    net, _ = _net()
    rec = th.record(net, to=tmp_path / "a.thk")
    net(torch.ones(1, 2))
    assert not (tmp_path / "a.thk").exists()
    asked: list[Callable[[], object]] = [
        lambda: rec["0"], lambda: rec.order(), lambda: rec.table("calls"), lambda: rec.query("select 1"), lambda: rec.coverage,
        lambda: rec.recording, lambda: rec.save(tmp_path / "b.thk"), lambda: rec.told, lambda: rec.ended_by,
        lambda: rec.resumed_from, rec.step, rec.pause, rec.resume, lambda: list(rec),
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(th.TenterhookError, match="has not begun(.|\n)*with th.record"):
            ask()
    rec.close()
    assert repr(rec) == "<Recorder of Sequential, new: nothing yet>"
    with rec:
        net(torch.ones(1, 2))
    assert len(rec["0"].calls) == 1


def test_a_recorder_after_its_end_answers_and_does_no_more() -> None:
    net, _ = _net()
    with th.record(net) as rec:
        net(torch.ones(1, 2))
    assert len(rec.order()) == 3
    for act in (rec.step, rec.pause, rec.resume):
        with pytest.raises(th.TenterhookError, match="of a recording that has ended"):
            act()
    with pytest.raises(th.TenterhookError, match="closed already"):
        rec.start()
    rec.close()
    assert len(rec.order()) == 3


def test_steps_go_on_after_a_fault_of_ours() -> None:
    net, optimizer = _net()
    with th.record(net) as rec:
        rec._capture.stop("a fault")
        rec.step()
        rec.pause()
        rec.resume()
        _train(net, optimizer)
    assert rec.recording.manifest.partial == "a fault"


@pytest.mark.parametrize("place", ["seeing_everything", "on_optimizer_step", "attach"])
@pytest.mark.parametrize("to_disk", [True, False])
def test_a_start_that_fails_leaves_nothing(
    place: str, to_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tenterhook.backends.torch import TorchBackend

    def fails(*arguments: object, **options: object) -> None:
        raise MemoryError("ours")

    net, _ = _net()
    rec = th.record(net, to=tmp_path / "a.thk" if to_disk else None)
    with monkeypatch.context() as patch:
        patch.setattr(TorchBackend, place, fails)
        with pytest.raises(MemoryError, match="ours"):
            rec.start()
    assert not (tmp_path / "a.thk").exists()
    assert not {thread.name for thread in threading.enumerate() if thread.name.startswith("tenterhook")}
    assert not [hook for module in net.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
    with pytest.raises(th.TenterhookError, match="could not begin"):
        rec.order()
    with pytest.raises(th.TenterhookError, match="closed already"):
        rec.start()


def test_tensors_of_modules_that_are_not_recorded_are_refused() -> None:
    net, _ = _net()
    with pytest.raises(th.TenterhookError, match="of modules that are not recorded"):
        th.record(net, "0", tensors="1")


def test_selections_may_be_iterators() -> None:
    net, _ = _net()
    with th.record(net, iter(["0", "1"]), tensors=(path for path in ("1",))) as rec:
        net(torch.ones(1, 2))
    assert [call.path for call in rec.order()] == ["0", "1"]
    assert rec["1"].output.shape == (1, 1)
    assert (rec.recording.manifest.select, rec.recording.manifest.tensors) == ("0, 1", "1")


# ---- what went past all hooks ----


class _Stop(BaseException):
    pass


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        self.broken: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enc(x)
        if self.broken == "forward":
            raise _Stop
        return x + 1


@pytest.mark.parametrize("broken", ["forward", "hook"])
@pytest.mark.parametrize("next_call", ["enc", "enc.0", "enc.1.0", ""])
def test_what_is_called_after_an_interrupt_stands_by_itself(broken: str, next_call: str) -> None:
    net = _Deep()

    def interrupts(module: nn.Module, args: object, output: object) -> None:
        raise _Stop

    with th.record(net) as rec:
        handle = net.enc[1][1].register_forward_hook(interrupts) if broken == "hook" else None
        net.broken = broken
        with pytest.raises(_Stop):
            net(torch.ones(1, 2))
        if handle is not None:
            handle.remove()
        net.broken = None
        time.sleep(0.001)  # an exception that goes through frames takes its time, too
        part = net.get_submodule(next_call)
        part(torch.ones(1, 2))
    calls = [call for call in rec.order() if call.path == next_call]
    assert (calls[-1].depth, calls[-1].parent, calls[-1].error) == (0, None, None)
    assert [call.error for call in rec.order() if call.path == ""][0] == "did not end"


def test_a_long_forward_is_no_interrupt() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                time.sleep(0.001)
                x = part(x)
            return x

    net = Slow()
    with th.record(net) as rec:
        net(torch.ones(1, 2))
    depths = {call.path: call.depth for call in rec.order()}
    assert depths == {"": 0} | {f"parts.{n}": 1 for n in range(3)} | {f"parts.{n}.0": 2 for n in range(3)}
    assert all(call.error is None for call in rec.order())
