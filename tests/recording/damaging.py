"""Whole recordings to be damaged, and all the ways of reading them afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from tenterhook.errors import NotRecordedError, RecordingError
from tenterhook.recording import DiskSink, Manifest, open_recording
from tenterhook.recording.dump import dump
from tests.recording.synthetic import modules_table, step_of_rows


def write(path: Path, *, close: bool) -> None:
    sink = DiskSink(path, Manifest(argv=["train.py"]))
    for step in range(3):
        calls, values = step_of_rows(step)
        sink.write_calls(calls)
        sink.write_values(values)
        sink.write_tensor(f"t{step}", np.full((4, 5), step, np.float32))
        sink.flush()
    if close:
        sink.close(Manifest(argv=["train.py"]), modules_table())
    else:
        shutil.copytree(path, path.with_name("killed.thk"))
        sink.close(Manifest(), modules_table())


def read_all(path: Path) -> None:
    recording = open_recording(path)
    for table in ("calls", "values", "modules"):
        recording.table(table).validate(full=True)
    recording.query("select count(*), max(mean), sum(nan_count), max(len(sketch)), max(path) from values")
    for call in recording.order():
        repr(call)
        [repr(value) for value in call.values]
    for key in ("t0", "t1", "t2"):
        try:
            recording.tensor(key).sum()
        except NotRecordedError:
            pass
    repr(recording.first_nonfinite())
    str(recording.coverage)
    repr(recording)


def files_of(path: Path) -> list[Path]:
    return sorted(entry for entry in path.rglob("*") if entry.is_file() and entry.name != ".reserve")


def copy_of(whole: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    return folder


def refused_or_read(path: Path) -> None:
    try:
        read_all(path)
    except RecordingError as error:
        message = str(error)
        assert message and "\n" not in message.partition(" failed: ")[0] and len(message) < 3000
    for _ in range(1):
        try:
            list(dump(path))
        except RecordingError:
            return
