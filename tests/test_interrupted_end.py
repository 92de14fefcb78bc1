"""A second Ctrl-C while a recording is finished: what was recorded is there, nothing hangs, and it counts as unfinished."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tenterhook as th
from tests.cli.commands import tenterhook

ROOT = Path(__file__).parents[1]
STEPS = 5
PARTS = [
    "recording.bounded.BoundedQueue.shut",
    "recording.rows.RowWriter._shut",
    "recording.rows.RowWriter._wait",
    "recording.rows.RowWriter.close",
    "recording.shards._header",
    "recording.shards.ShardWriter.close",
    "recording.writer.write_index",
    "recording.writer.write_modules",
    "recording.target.sign_off",
    "recording.manifest.Manifest.to_json",
    "recording_session.end_capture",
    "recording_session.table_of",
    "session_end.Ending.do",
]


def interrupt(patch: pytest.MonkeyPatch, part: str, when: str) -> None:
    """Have Ctrl-C come once, before or after a part of the end."""
    names = part.split(".")
    owner: Any = importlib.import_module("tenterhook")
    for name in names[:-1]:
        owner = getattr(owner, name, None) or importlib.import_module(f"{owner.__name__}.{name}")
    done, left = getattr(owner, names[-1]), [KeyboardInterrupt()]

    def interrupted(*arguments: Any, **options: Any) -> Any:
        here = threading.current_thread() is threading.main_thread()
        if when == "before" and here and left:
            raise left.pop()
        result = done(*arguments, **options)
        if when == "after" and here and left:
            raise left.pop()
        return result

    patch.setattr(owner, names[-1], interrupted)


def collect(model: nn.Module, rec: th.Recorder, steps: range, last: Any = None) -> None:
    with rec, torch.no_grad():
        for step in steps:
            model(torch.full((2, 4), float(step)))
        if last is not None:
            last()


def outputs_of(model: nn.Module, steps: int) -> list[Any]:
    with torch.no_grad():
        return [model[0](torch.full((2, 4), float(step))).tolist() for step in range(steps)]  # type: ignore[index]


def assert_all_is_there(recording: th.Recording, model: nn.Module, steps: int) -> None:
    assert recording.steps == list(range(steps))
    assert [np.asarray(output).tolist() for output in recording["0"].outputs] == outputs_of(model, steps)
    assert [call.step for call in recording.order() if call.path == "0"] == list(range(steps))
    recording.query("select count(*) from values")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("first", [None, KeyboardInterrupt], ids=["ended well", "second"])
def test_wherever_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, when: str, first: type[BaseException] | None
) -> None:
    model, target = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), tmp_path / "a.thk"

    def last() -> None:
        interrupt(monkeypatch, part, when)
        if first is not None:
            raise first

    options: dict[str, Any] = {"tensors": "0", "kinds": ["output"], "to": target}
    rec = th.record(model, **options)
    with pytest.raises(KeyboardInterrupt):
        collect(model, rec, range(STEPS), last)
    monkeypatch.undo()
    assert not {thread.name for thread in threading.enumerate() if thread.name.startswith("tenterhook")}
    assert not [hook for hook in th.installed_hooks(model) if hook.owner == "tenterhook"]
    recording = th.open(target)
    assert_all_is_there(recording, model, STEPS)
    if not recording.manifest.complete:
        state = tenterhook("show", str(target)).out.splitlines()[0]
        assert state.endswith(" UNFINISHED")
    again = th.record(model, **options, resume=True)  # nobody writes there any more
    with again, torch.no_grad():
        assert again.resumed_from >= STEPS - 2
        for step in range(again.resumed_from, STEPS + 2):
            model(torch.full((2, 4), float(step)))
    assert th.open(target).manifest.complete
    assert_all_is_there(th.open(target), model, STEPS + 2)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["in the loop", "at the end"])
def test_rows_that_are_being_handed_over_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, where: str
) -> None:
    """Ctrl-C may come anywhere: what it may have cost is said."""
    model, target = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), tmp_path / "a.thk"
    with pytest.raises(KeyboardInterrupt), th.record(model, kinds=["output"], to=target) as rec, torch.no_grad():
        for _ in range(STEPS):
            model(torch.ones(2, 4))
        interrupt(monkeypatch, "recording.bounded.BoundedQueue.put", when)
        if where == "in the loop":
            rec._hand_over()
    monkeypatch.undo()
    recording = th.open(target)
    assert recording.table("calls").num_rows == (0 if when == "before" else 3 * STEPS)
    assert recording.table("values").num_rows == 3 * STEPS
    why = f"interrupted while {3 * STEPS} rows were handed over, which may be missing"
    assert recording.manifest.complete and recording.manifest.partial == why


PROGRAM = """
import os, signal, sys, threading, time
import torch
from torch import nn
import tenterhook as th
from tenterhook.recording import rows
compact = rows.compact
def slowly(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
    compact(*arguments)
rows.compact = slowly
model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
{record}
for step in range(5):
    model(torch.ones(2, 4))
{end}
"""
SESSION = """
with th.record(model, to='a.thk', tensors=True):
    for step in range(5):
        model(torch.ones(2, 4))
    raise KeyboardInterrupt
"""
ENDS = {"well": "", "by Ctrl-C": "raise KeyboardInterrupt", "by an exception": "raise ValueError('bad batch')"}


def run(folder: Path, *command: str, **parts: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(PROGRAM.format(**parts))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *command, "train.py"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_in_a_program(tmp_path: Path) -> None:
    done = run(tmp_path, record=SESSION, end="")
    assert done.returncode == -signal.SIGINT, done.stderr
    recording = th.open(tmp_path / "a.thk")
    assert not recording.manifest.complete and recording.ended_by == "KeyboardInterrupt"
    assert recording.steps == list(range(5)) and len(recording["0"].outputs) == 5


@pytest.mark.parametrize("end", ENDS)
def test_of_the_command(tmp_path: Path, end: str) -> None:
    """The code of a script that has failed wins; else the process dies by the signal."""
    done = run(tmp_path, "-m", "tenterhook", "record", "-o", "a.thk", record="", end=ENDS[end])
    assert done.returncode == (1 if "exception" in end else -signal.SIGINT), done.stderr
    assert "interrupted while a.thk was finished" in done.stderr and "VERDICT" not in done.stderr
    assert done.stderr.count("Traceback") == (0 if end == "well" else 1)
    recording = th.open(tmp_path / "a.thk")
    assert not recording.manifest.complete
    assert recording.table("calls").num_rows == 15
    assert not list((tmp_path / "a.thk" / "rank-00000").glob("claim.json"))
