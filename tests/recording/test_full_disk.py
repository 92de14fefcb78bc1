"""A disk that is full, or may only be read, stops a recording, and never the run."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tenterhook.errors import TargetError
from tenterhook.recording import DiskSink, Manifest, Pace, open_recording
from tests.recording.synthetic import many_values, modules_table, value, values_batch

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "COLUMNS": "100"}


def test_a_full_disk_stops_the_recording_and_not_the_run(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from tenterhook.recording import DiskSink, Manifest, Pace
from tests.recording.synthetic import many_values, modules_table
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a file at its limit gives an error, as a full disk does
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
manifest = Manifest()
sink = DiskSink(sys.argv[1], manifest, pace=Pace(flush_interval=0.01))
for step in range(200):
    sink.write_values(many_values(3000, first_step=step * 10))
    sink.flush()
sink.close(manifest, modules_table())
print(sink.failure, manifest.lost_rows, sep="|")
"""
    command = [sys.executable, "-c", code, str(tmp_path / "a.thk")]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    failure, lost = done.stdout.strip().split("|")
    assert failure == "writing stopped: File too large"
    recording = open_recording(tmp_path / "a.thk")
    kept = recording.table("values").num_rows
    assert kept > 0 and kept + int(lost) == 600_000
    assert recording.manifest.complete and recording.manifest.partial == failure
    assert recording.manifest.lost_rows == int(lost)
    assert recording.query("select count(*) n from values").to_pylist() == [{"n": kept}]


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system of its own, where that is permitted."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_has_room_to_say_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        manifest = Manifest()
        sink = DiskSink(disk / "a.thk", manifest, pace=Pace(flush_interval=0.01))
        total = 0
        for step in range(60):
            batch = many_values(3000, first_step=step * 10)
            total += len(batch)
            sink.write_values(batch)
            sink.write_tensor(f"t{step}", np.ones(1000))
            sink.flush()
        sink.close(manifest, modules_table())
        assert sink.failure == "writing stopped: No space left on device"
        recording = open_recording(disk / "a.thk")
        assert recording.manifest.complete and recording.manifest.partial == sink.failure
        assert recording.table("values").num_rows + manifest.lost_rows == total
        assert recording.coverage.modules == 4
        assert float(recording.tensor("t0").sum()) == 1000


@pytest.mark.parametrize("place", ["rows.pq.ParquetWriter", "writer.write_index", "rows.pq.write_table"])
def test_a_disk_that_is_full_at_the_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """All rows are there, in streams; nobody counts as writing there, and the kept space is given back."""
    manifest = Manifest()
    sink = DiskSink(tmp_path / "a.thk", manifest)
    sink.write_values(many_values(3000))
    sink.write_tensor("t", np.ones(1000))
    sink.flush()

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(f"tenterhook.recording.{place}", full)
        sink.close(manifest, modules_table())
    assert sink.failure == "writing stopped: No space left on device"
    left = {path.name for path in (tmp_path / "a.thk" / "rank-00000").iterdir()}
    assert not left & {"claim.json", ".reserve"}
    recording = open_recording(tmp_path / "a.thk")
    assert recording.manifest.complete and recording.manifest.partial == sink.failure
    assert recording.manifest.lost_rows == 0 and recording.table("values").num_rows == 3000
    assert float(recording.tensor("t").sum()) == 1000
    again = DiskSink(tmp_path / "a.thk", Manifest(), resume=True)
    assert again.resumed is not None  # nobody writes there
    again.close(Manifest(), modules_table())


def test_a_real_disk_that_has_room_for_the_stream_alone(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "3m") as disk:
        manifest = Manifest()
        sink = DiskSink(disk / "a.thk", manifest)
        rows = 0
        while sum(path.stat().st_size for path in disk.rglob("*") if path.is_file()) < 2_600_000:
            batch = many_values(500, first_step=rows, sketch=True)
            sink.write_values(batch)
            sink.flush()
            rows += len(batch)
        sink.close(manifest, modules_table())
        assert sink.failure == "writing stopped: No space left on device"
        recording = open_recording(disk / "a.thk")
        assert recording.manifest.complete and recording.manifest.partial == sink.failure
        assert recording.table("values").num_rows == rows and recording.coverage.modules == 4


SCRIPT = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
for step in range(400):
    net(torch.randn(64, 64)).square().mean().backward()
print("trained")
"""


@pytest.mark.parametrize("options", [["--tensors"], ["--log", "disk/a.log"]], ids=" ".join)
def test_a_script_on_a_full_disk_comes_to_its_end_and_is_told(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with small_disk(tmp_path / "disk", "1m") as disk:
        command = [sys.executable, "-m", "tenterhook", "record", "-o", "disk/a.thk", *options, "train.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT, check=False)
        assert (done.returncode, done.stdout) == (0, "trained\n")
        assert "PARTIAL" in done.stderr and "No space left on device" in done.stderr and "Traceback" not in done.stderr
        recording = open_recording(disk / "a.thk")
        assert recording.manifest.complete and "No space left on device" in (recording.manifest.partial or "")
        stored = sum(recording.table(table).num_rows for table in ("calls", "values"))
        made = 400 * (20 if "--tensors" in options else 16)  # calls, outputs and gradients of four modules; inputs, too
        assert stored + recording.manifest.lost_rows == made
        told = " ".join(done.stderr.replace("PARTIAL", "").split())  # stands at the end of its first line
        assert f"{recording.manifest.lost_rows:,} of these {made:,} rows are not stored" in told
        assert recording.manifest.lost_rows > 0 and recording.manifest.steps_recorded is None


def test_a_disk_that_is_mounted_read_only_is_refused_and_read(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        manifest = Manifest()
        sink = DiskSink(disk / "a.thk", manifest)
        sink.write_values(values_batch(value(1, 0)))
        sink.close(manifest, modules_table())
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert open_recording(disk / "a.thk").table("values").num_rows == 1
        for name, options in (("b.thk", {}), ("a.thk", {"overwrite": True}), ("a.thk", {"resume": True})):
            with pytest.raises(TargetError, match="cannot be written: Read-only file system"):
                DiskSink(disk / name, Manifest(), **options)  # type: ignore[arg-type]
        assert open_recording(disk / "a.thk").manifest.complete
