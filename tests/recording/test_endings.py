"""A recording says how its run ended; one that could not begin leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.recording import Cost, DiskSink, Manifest
from tests.cli.commands import tenterhook
from tests.recording.synthetic import call, calls_batch, modules_table, value, values_batch

ROOT = Path(__file__).parents[2]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("bad batch"), "ValueError: bad batch"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (None, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_the_body_that_raised_is_told(tmp_path: Path, error: BaseException | None, words: str, disk: bool) -> None:
    model = net()
    rec = th.record(model, to=tmp_path / "a.thk" if disk else None)
    try:
        with rec:
            model(torch.ones(1, 2))
            assert rec.ended_by is None and rec.recording.ended_by is None
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    recording = rec.save(tmp_path / "b.thk")
    assert rec.ended_by == recording.ended_by == th.open(tmp_path / "b.thk").ended_by == words
    assert recording.manifest.complete and len(recording.order()) == 3


SCRIPT = """
import os, signal, sys, time, torch
net = torch.nn.Linear(2, 1)
net(torch.ones(1, 2))
{end}
"""
KILLED = (False, None, "UNFINISHED", "unfinished")
# the script's last line -> its exit code; whether the recording is complete, what ended it, and its state in the summary and for programs
ENDS = {
    "pass": (0, (True, None, "complete", "complete")),
    "sys.exit(0)": (0, (True, None, "complete", "complete")),
    "raise ValueError('bad batch')": (1, (True, "ValueError: bad batch", "STOPPED", "stopped")),
    "raise KeyboardInterrupt": (-2, (True, "KeyboardInterrupt", "STOPPED", "stopped")),
    "sys.exit('no data')": (1, (True, "SystemExit: no data", "STOPPED", "stopped")),
    "sys.exit(7)": (7, (True, "SystemExit: 7", "STOPPED", "stopped")),
    "os.kill(os.getpid(), signal.SIGINT)": (-2, (True, "KeyboardInterrupt", "STOPPED", "stopped")),
    "os.kill(os.getpid(), signal.SIGTERM)": (-15, (True, "Terminated: ended by SIGTERM", "STOPPED", "stopped")),
    "os.kill(os.getpid(), signal.SIGHUP)": (-1, (True, "Terminated: ended by SIGHUP", "STOPPED", "stopped")),
    "os.kill(os.getpid(), signal.SIGTERM); sys.exit(3)": (
        -15, (True, "Terminated: ended by SIGTERM", "STOPPED", "stopped")
    ),
    "time.sleep(2); os._exit(0)": (0, KILLED),
    "time.sleep(2); os.kill(os.getpid(), signal.SIGKILL)": (-9, KILLED),
    "time.sleep(2); os.abort()": (-6, KILLED),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_how_a_script_ended_is_told(tmp_path: Path, end: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(end=end))
    code, (complete, words, state, status) = ENDS[end]
    command = [sys.executable, "-m", "tenterhook", "record", "-o", "a.thk", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    manifest = json.loads((tmp_path / "a.thk" / "recording.json").read_text())
    assert (manifest["complete"], manifest["error"]) == (complete, words)
    recording = th.open(tmp_path / "a.thk")
    assert (recording.manifest.complete, recording.ended_by) == (complete, words)
    assert [call.path for call in recording.order()] == [""]
    shown = tenterhook("show", str(tmp_path / "a.thk")).out
    assert shown.splitlines()[0].endswith(f" {state}")
    told = [shown, done.stderr] if complete else [shown]
    assert all((f"by {words}" in text) == (words is not None) and state in text for text in told)
    assert complete or "VERDICT" not in done.stderr
    assert json.loads(tenterhook("show", str(tmp_path / "a.thk"), "--json").out)["status"] == status


def test_of_several_ranks_each_says_its_own(tmp_path: Path) -> None:
    for rank, error in enumerate([None, "ValueError: odd", "KeyboardInterrupt"]):
        manifest = Manifest(rank=rank, world=3, error=error)
        DiskSink(tmp_path / "a.thk", manifest, rank=rank, budget=None).close(manifest, modules_table())
    assert th.open(tmp_path / "a.thk").ended_by == "rank 1: ValueError: odd; rank 2: KeyboardInterrupt"
    assert th.open(tmp_path / "a.thk", ranks=[0]).manifest.complete


def test_the_rank_that_ended_first_is_told_first(tmp_path: Path) -> None:
    for rank, (error, ended) in enumerate([("RuntimeError: closed\nby peer", "12"), ("ValueError: odd", "11")]):
        manifest = Manifest(rank=rank, world=2, error=error, ended=f"2026-01-01T00:00:{ended}.000+00:00")
        DiskSink(tmp_path / "a.thk", manifest, rank=rank, budget=None).close(manifest, modules_table())
    found = th.open(tmp_path / "a.thk")
    assert found.ended_by == "rank 1: ValueError: odd; rank 0: RuntimeError: closed"
    assert list(found.ends) == [1, 0]
    assert list(th.open(tmp_path / "a.thk", ranks=[0]).ends) == [0]
    ended = [line.split() for line in tenterhook("show", str(tmp_path / "a.thk")).out.splitlines() if " ended " in line]
    assert ended == [
        ["ended", "rank", "1", "by", "ValueError:", "odd"],
        ["ended", "rank", "0", "by", "RuntimeError:", "closed"],
    ]
    first = next(
        line
        for line in tenterhook("show", str(tmp_path / "a.thk"), "--rank", "0").out.splitlines()
        if " ended " in line
    )
    assert "rank 0" in first


@pytest.mark.parametrize("place", ["watch_model", "watching_edits"])
@pytest.mark.parametrize("resume", [False, True])
def test_what_could_not_begin_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, resume: bool
) -> None:
    model, target = net(), tmp_path / "a.thk"
    if resume:
        with th.record(model, to=target):
            for _ in range(3):
                model(torch.ones(1, 2))
    before = th.open(target).table("values").to_pylist() if resume else []

    def fails(*arguments: object, **options: object) -> None:
        raise MemoryError("ours")

    with monkeypatch.context() as patch:
        patch.setattr(f"tenterhook.recording_session.{place}", fails)
        with pytest.raises(MemoryError, match="ours"), th.record(model, to=target, resume=resume):
            raise AssertionError("the body ran")
    assert not {thread.name for thread in threading.enumerate() if thread.name.startswith("tenterhook")}
    assert target.exists() == resume
    with th.record(model, to=target, resume=resume) as rec:  # nobody writes there
        model(torch.ones(1, 2))
    assert rec.resumed_from == (3 if resume else 0)
    kept = [row for row in before if row["step"] < 3]
    assert th.open(target).table("values").to_pylist()[: len(kept)] == kept
    assert th.open(target).steps == list(range(rec.resumed_from + 1))


# copies


def killed(path: Path) -> Path:
    """Leave a recording as a kill does: rows that name a tensor which was not written, and a batch that is half there."""
    sink = DiskSink(path / "whole.thk", Manifest(), budget=None)
    for step in range(4):
        sink.write_calls(calls_batch(call(step * 2, step)))
        sink.write_values(values_batch(value(step * 2 + 1, step * 2, step, tensor=f"{step}")))
        if step < 2:
            sink.write_tensor(f"{step}", np.full(3, step))
        sink.flush()
    left = shutil.copytree(path / "whole.thk", path / "killed.thk")
    stream = left / "rank-00000" / "calls-00000.arrows"
    stream.write_bytes(stream.read_bytes()[:-10])
    sink.close(Manifest(), modules_table())
    return left


def test_a_copy_of_a_killed_recording_says_what_is_missing(tmp_path: Path) -> None:
    recording = th.open(killed(tmp_path))
    recording.save(tmp_path / "copy.thk")
    copy = th.open(tmp_path / "copy.thk")
    assert copy.table("values").num_rows == 4 and copy.table("calls").num_rows == 3
    assert copy.tensor("1").tolist() == [1, 1, 1]
    partial = copy.manifest.partial or ""
    assert partial.startswith("calls-00000.arrows: its last ")
    assert partial.endswith(
        "saved though it was never closed, with 4 steps so far; 2 tensors that rows name had not been stored"
    )
    assert not copy["conv1"].calls[2].values[0].stored


def test_a_copy_says_what_its_original_lost(tmp_path: Path) -> None:
    manifest = Manifest(partial="a fault", lost_rows=7, error="ValueError: odd", cost=Cost(blocked_seconds=2.5))
    sink = DiskSink(tmp_path / "a.thk", manifest, budget=10)
    sink.write_tensor("t", np.ones(100))
    sink.close(manifest, modules_table())
    th.open(tmp_path / "a.thk").save(tmp_path / "b.thk")
    copy = th.open(tmp_path / "b.thk").manifest
    assert (copy.partial, copy.lost_rows, copy.error) == ("a fault", 7, "ValueError: odd")
    assert copy.tensors_stopped == "the budget of 10 bytes was reached at t" and copy.cost.blocked_seconds >= 2.5


def test_a_copy_made_in_the_loop_says_so(tmp_path: Path) -> None:
    model = net()
    with th.record(model) as rec:
        for step in range(2):
            model(torch.ones(1, 2))
            rec.save(tmp_path / f"{step}.thk")
    rec.save(tmp_path / "end.thk")
    partial = [th.open(tmp_path / f"{name}.thk").manifest.partial for name in (0, 1, "end")]
    assert partial == [f"saved while it was being recorded, with {steps} steps so far" for steps in (1, 2)] + [None]
    assert not rec.recording.manifest.partial


def test_a_copy_of_one_rank_keeps_its_number(tmp_path: Path) -> None:
    for rank in range(3):
        manifest = Manifest(rank=rank, world=3)
        sink = DiskSink(tmp_path / "a.thk", manifest, rank=rank)
        sink.write_values(values_batch(value(1, 0, rank)))
        sink.close(manifest, modules_table())
    th.open(tmp_path / "a.thk", ranks=[2]).save(tmp_path / "b.thk")
    copy = th.open(tmp_path / "b.thk")
    assert copy.ranks == [2] and copy.steps == [2]
    assert copy.manifest.partial == "ranks 0, 1 of 3 are missing" and not copy.manifest.complete
