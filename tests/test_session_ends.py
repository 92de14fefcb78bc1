"""How sessions end and go on: faults of ours, signals, pauses and wrong options harm neither the run nor the recording."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
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
