"""All that is in a recording, as lines of text, and what is damaged in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tenterhook.recording import DiskSink, Manifest
from tenterhook.recording.dump import dump
from tests.recording.synthetic import modules_table, step_of_rows, value, values_batch

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def test_a_dump_shows_every_row_and_tensor(tmp_path: Path) -> None:
    manifest = Manifest(note="a note")
    sink = DiskSink(tmp_path / "a.thk", manifest)
    for step in range(3):
        for batch, write in zip(step_of_rows(step), (sink.write_calls, sink.write_values), strict=True):
            write(batch)
    sink.write_tensor("t0", np.ones((2, 3), np.float16))
    sink.close(manifest, modules_table())
    lines = list(dump(tmp_path / "a.thk"))
    assert any('"note": "a note"' in line for line in lines)
    assert "  calls-00000.parquet: 15 rows" in lines and "  values-00000.parquet: 15 rows" in lines
    assert sum("kind='output'" in line for line in lines) == 12
    assert any(line.startswith("    't0' float16 [2, 3] bytes") for line in lines)


def test_the_dump_command(tmp_path: Path) -> None:
    manifest = Manifest()
    sink = DiskSink(tmp_path / "a.thk", manifest)
    sink.write_values(values_batch(value(1, 0)))
    sink.close(manifest, modules_table())

    def dumped(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "tenterhook.recording.dump", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT, check=False)
        return done.returncode, done.stdout, done.stderr

    code, out, err = dumped("a.thk")
    assert (code, err) == (0, "") and "  values-00000.parquet: 1 rows\n" in out
    assert dumped("b.thk") == (3, "", "tenterhook: there is no recording at b.thk: no such directory\n")
    assert dumped() == (2, "", "usage: python -m tenterhook.recording.dump NAME.thk\n")
    part = tmp_path / "a.thk" / "rank-00000" / "values-00000.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    code, out, err = dumped("a.thk")
    assert (code, err) == (3, "") and "  DAMAGED " in out and "  modules.parquet: 4 rows\n" in out
