"""A process that dies before its recording has a manifest: nothing was recorded, so the next one begins."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tenterhook.errors import RecordingError, TargetError
from tenterhook.recording import DiskSink, Manifest, open_recording
from tests.recording.synthetic import modules_table, value, values_batch

ROOT = Path(__file__).parents[2]
POINTS = ["Path.mkdir", "Path.write_bytes", "Path.replace", "os.fsync"]

PROGRAM = """
import os, sys
from pathlib import Path
from tenterhook.recording import DiskSink, Manifest
names, times = sys.argv[2].split("."), int(sys.argv[3])
owner = {"Path": Path, "os": os}[names[0]]
done = getattr(owner, names[1])
def dies(*arguments, **options):
    global times
    times -= 1
    if times == 0:
        os._exit(9)
    return done(*arguments, **options)
setattr(owner, names[1], dies)
DiskSink(sys.argv[1], Manifest(rank=int(sys.argv[4]), world=int(sys.argv[5])), rank=int(sys.argv[4]))
os._exit(0)
"""


def died(target: Path, point: str, times: int, rank: int = 0, world: int = 1) -> bool:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-c", PROGRAM, str(target), point, str(times), str(rank), str(world)]
    return subprocess.run(command, env=environment, check=False).returncode == 9


def goes_on(target: Path, rank: int = 0, world: int = 1, **options: object) -> None:
    manifest = Manifest(rank=rank, world=world, steps=1)
    sink = DiskSink(target, manifest, rank=rank, **options)  # type: ignore[arg-type]
    assert sink.resumed is None or sink.resumed.step in (0, 1, 4)
    sink.write_values(values_batch(value(1, 0)))
    sink.close(manifest, modules_table())


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("options", [{"resume": True}, {"resume": 4}, {"overwrite": True}], ids=str)
def test_the_next_one_begins(tmp_path: Path, point: str, options: dict[str, object]) -> None:
    deaths = 0
    for times in (1, 2, 3):
        target = tmp_path / f"{times}.thk"
        deaths += died(target, point, times)
        goes_on(target, **options)
        recording = open_recording(target)
        assert recording.manifest.complete and recording.table("values").num_rows == 1
        assert not list(target.rglob("*.tmp"))
    assert deaths


@pytest.mark.parametrize("dead", [0, 1])
def test_of_several_ranks_one_may_not_have_begun(tmp_path: Path, dead: int) -> None:
    target = tmp_path / "a.thk"
    assert died(target, "os.fsync", 1, rank=dead, world=2)
    goes_on(target, rank=1 - dead, world=2)
    assert not open_recording(target).manifest.complete
    for rank in (0, 1):
        goes_on(target, rank=rank, world=2, resume=True)
    recording = open_recording(target)
    assert recording.manifest.complete and recording.ranks == [0, 1]
    assert sorted(recording.table("values")["rank"].to_pylist()) == sorted([1 - dead, 0, 1])


def test_what_lives_or_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "a.thk"
    folder = target / "rank-00000"
    folder.mkdir(parents=True)
    (folder / "claim.json").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
    with pytest.raises(TargetError, match="is being written by process"):
        goes_on(target, resume=True)
    (folder / "claim.json").unlink()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(RecordingError, match=r"has no recording\.json"):
        goes_on(target, resume=True)
    assert (folder / "mine.txt").read_text() == "mine"
    shutil.rmtree(folder)
    (target / "mine.txt").write_text("mine")
    with pytest.raises(TargetError, match="is a directory already, and not a recording"):
        goes_on(target, resume=True)
    assert [path.name for path in target.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("world", [1, 2])
def test_rows_without_a_manifest_are_not_taken_away(tmp_path: Path, world: int) -> None:
    target = tmp_path / "a.thk"
    goes_on(target, world=world)
    for path in target.rglob("recording.json"):
        path.unlink()
    before = sorted(path.name for path in target.rglob("*"))
    with pytest.raises(RecordingError, match=r"has no recording\.json for rank 0, but calls-00000\.parquet"):
        goes_on(target, world=world, resume=True)
    assert sorted(path.name for path in target.rglob("*")) == before


def test_a_recording_of_one_process_is_no_rank_of_two(tmp_path: Path) -> None:
    target = tmp_path / "a.thk"
    goes_on(target)
    with pytest.raises(TargetError, match="recorded with world=1, and now world=2"):
        goes_on(target, world=2, resume=True)
    assert open_recording(target).table("values").num_rows == 1
