"""What a recorder holds reaches the files while the run goes on, hangs or forks."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import tenterhook as th

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def wait_for(condition: object, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.05)
    assert condition()  # type: ignore[operator]


def test_rows_are_on_the_disk_though_nothing_is_called_any_more(tmp_path: Path) -> None:
    model = net()
    with th.record(model, to=tmp_path / "a.thk"):
        model(torch.ones(2, 3)).sum().backward()
        wait_for(lambda: th.open(tmp_path / "a.thk").table("values").num_rows == 6)
        assert th.open(tmp_path / "a.thk").table("calls").num_rows == 6
    assert th.open(tmp_path / "a.thk").table("values").num_rows == 6


def test_the_thread_ends_with_the_session(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(ZeroDivisionError), th.record(model, to=tmp_path / "a.thk"):
        assert "tenterhook-flush" in {thread.name for thread in threading.enumerate()}
        raise ZeroDivisionError
    assert "tenterhook-flush" not in {thread.name for thread in threading.enumerate()}
    with th.record(model):
        assert "tenterhook-flush" not in {thread.name for thread in threading.enumerate()}


def test_calls_and_flushes_from_several_threads_lose_nothing(tmp_path: Path) -> None:
    model = net()
    with th.record(model, kinds=["output"], to=tmp_path / "a.thk") as rec:
        stop = threading.Event()

        def flush() -> None:
            while not stop.is_set():
                rec._capture.rows.flush()

        flusher = threading.Thread(target=flush)
        flusher.start()
        with torch.no_grad():
            for _ in range(200):
                model(torch.ones(2, 3))
        stop.set()
        flusher.join()
    recording = th.open(tmp_path / "a.thk")
    assert recording.table("calls").num_rows == recording.table("values").num_rows == 600
    seqs = [row["seq"] for name in ("calls", "values") for row in recording.table(name).to_pylist()]
    assert len(set(seqs)) == 1200
    assert recording.steps == list(range(200))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_runs_the_model_unrecorded(tmp_path: Path) -> None:
    model = net()
    with th.record(model, kinds=["output"], to=tmp_path / "a.thk") as rec, torch.no_grad():
        model(torch.ones(2, 3))
        with rec._capture.rows._lock, warnings.catch_warnings():  # as if the other thread were flushing just now
            warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
            child = os.fork()
            if child == 0:
                model(torch.ones(2, 3))
                os._exit(0 if rec._capture.closed else 1)
        assert os.waitpid(child, 0)[1] == 0
        model(torch.ones(2, 3))
    assert th.open(tmp_path / "a.thk").table("calls").num_rows == 6


def test_a_live_recording_tells_what_is_new_at_each_look() -> None:
    model = net()
    with th.record(model, kinds=["output"]) as rec, torch.no_grad():
        assert {row["calls"] for row in rec.table("modules").to_pylist()} == {0}
        for times in (1, 2):
            model(torch.ones(2, 3))
            assert {row["calls"] for row in rec.table("modules").to_pylist()} == {times}
            assert rec.coverage.complete


def test_a_flush_brings_no_pandas_in(tmp_path: Path) -> None:
    """It takes longer than all else in the first flush, for which the run waits; pyarrow loads it for much of what it can do."""
    program = """
import sys, torch
from torch import nn
import tenterhook as th
model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
with th.record(model, kinds=["input", "output", "grad_output", "param"], tensors=True, to=sys.argv[1]) as rec:
    model(torch.ones(1, 2)).sum().backward()
    try:
        model(torch.ones(1, 5))
    except RuntimeError:
        pass
    rec._hand_over()
    rec._sink.flush()
    print("pandas" in sys.modules)
"""
    importlib.import_module("pandas")  # it is there
    command = [sys.executable, "-c", program, str(tmp_path / "a.thk")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.stdout == "False\n", done.stderr
