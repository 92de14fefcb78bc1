"""Whatever part of a session's end fails, the rest is done: nothing that was recorded is lost, and no hook stays on."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th

PARTS = [
    "capture.Capture.abandon_open_calls",
    "capture.Capture.detach",
    "gradient_capture.GradientCapture.close",
    "tracker.Tracker.release",
    "parameters.ParameterWatch.close",
    "op_capture.OpCapture.close",
    "flushing.Flusher.stop",
    "recording_session.RecordingSession._modules",
    "recording_session.model_manifest",
    "recording_session.finish_manifest",
    "hook_schedule.HookSchedule.recorded",
]

AT_ONCE = {"op_capture.OpCapture.close", "flushing.Flusher.stop"}
"""Those that a session takes hold of when it begins, and calls at its end only."""


def breaking(patch: pytest.MonkeyPatch, part: str, error: BaseException) -> None:
    """Have a part of the end raise when it has done its work."""
    module, _, names = part.partition(".")
    owner = importlib.import_module(f"tenterhook.{module}")
    *outer, name = names.split(".")
    for one in outer:
        owner = getattr(owner, one)
    found = getattr(owner, name)
    done: Any = found.fget if isinstance(found, property) else found

    def fails(*arguments: object, **options: object) -> object:
        done(*arguments, **options)
        raise error

    patch.setattr(owner, name, property(fails) if isinstance(found, property) else fails)


def recorder(target: Path | None, model: nn.Module, on_error: str = "warn") -> th.Recorder:
    kinds = ["output", "grad_output", "param"]
    return th.record(model, kinds=kinds, ops=True, to=target, on_error=on_error)  # type: ignore[arg-type]


def assert_whole(recording: th.Recording) -> None:
    assert recording.manifest.complete
    assert [(call.path, call.phase) for call in recording.order()] == [
        ("", "forward"), ("0", "forward"), ("1", "forward"), ("", "backward"), ("1", "backward"), ("0", "backward"),
    ]  # fmt: skip
    kinds = recording.query("select kind, count(*) n from values where path not like '%/%' group by kind order by kind")
    assert {row["kind"]: row["n"] for row in kinds.to_pylist()}["output"] == 3


@pytest.mark.parametrize(
    ("part", "place"),
    [*((part, "memory") for part in PARTS if "Flusher" not in part), *((part, "disk") for part in PARTS)],
)
def test_a_part_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, place: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    rec = recorder(tmp_path / "a.thk" if place == "disk" else None, model)
    if part in AT_ONCE:
        breaking(monkeypatch, part, RuntimeError("ours"))
    with rec:
        model(torch.ones(1, 2)).sum().backward()
        if part not in AT_ONCE:
            breaking(monkeypatch, part, RuntimeError("ours"))
    monkeypatch.undo()
    assert_whole(rec.recording)
    assert "RuntimeError: ours" in (rec.recording.manifest.partial or "")


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    if part in AT_ONCE:
        breaking(monkeypatch, part, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), recorder(tmp_path / "a.thk", model):
        model(torch.ones(1, 2)).sum().backward()
        if part not in AT_ONCE:
            breaking(monkeypatch, part, KeyboardInterrupt())
    monkeypatch.undo()
    assert_whole(th.open(tmp_path / "a.thk"))


@pytest.mark.parametrize("part", PARTS)
def test_the_fault_is_raised_where_that_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    if part in AT_ONCE:
        breaking(monkeypatch, part, RuntimeError("ours"))
    with pytest.raises(RuntimeError, match="ours"), recorder(tmp_path / "a.thk", model, "raise"):
        model(torch.ones(1, 2)).sum().backward()
        if part not in AT_ONCE:
            breaking(monkeypatch, part, RuntimeError("ours"))
    monkeypatch.undo()
    assert_whole(th.open(tmp_path / "a.thk"))


SCRIPT = """
import torch
from torch import nn
import pytest
from tests.test_session_end_faults import AT_ONCE, breaking
def break_now():
    breaking(pytest.MonkeyPatch(), {part!r}, RuntimeError("ours"))
if {part!r} in AT_ONCE:
    break_now()
model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
model(torch.ones(1, 2)).sum().backward()
if {part!r} not in AT_ONCE:
    break_now()
"""


@pytest.mark.parametrize(
    "part",
    [
        "capture.Capture.detach",
        "backends._torch_attachments.Attachment.remove",
        "flushing.Flusher.stop",
        "script_models.ScriptModels.rows",
        "script_recorder.finish_manifest",
        "event_log.EventLog.close",
    ],
)
def test_a_part_of_a_scripts_end_that_fails(tmp_path: Path, part: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(part=part))
    command = [sys.executable, "-m", "tenterhook", "record", "-o", "a.thk", "--log", "a.log", "train.py"]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert "PARTIAL" in done.stderr and "RuntimeError: ours" in done.stderr
    assert_whole(th.open(tmp_path / "a.thk"))
