"""Recordings that tests write to disk, in this process or in another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tenterhook.recording import DiskSink, Manifest
from tests.recording.synthetic import modules_table, step_of_rows

ROOT = Path(__file__).parents[2]


def write_steps(sink: DiskSink, steps: range) -> None:
    for step in steps:
        calls, values = step_of_rows(step)
        sink.write_calls(calls)
        sink.write_values(values)


def recorded(path: Path, steps: int = 3, **options: object) -> Manifest:
    manifest = Manifest()
    sink = DiskSink(path, manifest, **options)  # type: ignore[arg-type]
    write_steps(sink, range(steps))
    sink.close(manifest, modules_table())
    return manifest


def names(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if entry.is_file())


def in_process(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
