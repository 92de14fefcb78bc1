"""Writing to a directory: what is there afterwards, from one rank or from several."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tenterhook.errors import RecordingError, TargetError
from tenterhook.recording import DiskSink, Manifest, Pace, find_recordings, open_recording
from tests.recording.synthetic import many_values, modules_table
from tests.recording.writing import in_process, names, recorded, write_steps


def test_a_closed_recording_is_parquet_and_a_manifest(tmp_path: Path) -> None:
    recorded(tmp_path / "a.thk")
    rank = "rank-00000"
    assert names(tmp_path / "a.thk") == [
        f"{rank}/calls-00000.parquet",
        f"{rank}/modules.parquet",
        f"{rank}/values-00000.parquet",
        "recording.json",
    ]
    assert json.loads((tmp_path / "a.thk" / "recording.json").read_bytes())["complete"] is True


def test_the_manifest_is_there_from_the_start(tmp_path: Path) -> None:
    sink = DiskSink(tmp_path / "a.thk", Manifest(note="first"))
    assert open_recording(tmp_path / "a.thk").manifest.note == "first"
    assert not open_recording(tmp_path / "a.thk").manifest.complete
    sink.close(Manifest(note="last"), modules_table())
    assert open_recording(tmp_path / "a.thk").manifest.note == "last"


def test_rows_reach_the_file_within_the_interval(tmp_path: Path) -> None:
    sink = DiskSink(tmp_path / "a.thk", Manifest(), pace=Pace(flush_interval=0.05))
    write_steps(sink, range(2))
    deadline = time.monotonic() + 20
    while open_recording(tmp_path / "a.thk").table("calls").num_rows < 10 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert open_recording(tmp_path / "a.thk").steps == [0, 1]
    sink.close(Manifest(), modules_table())


def test_streams_are_rolled_into_parts(tmp_path: Path) -> None:
    manifest = Manifest()
    sink = DiskSink(tmp_path / "a.thk", manifest, pace=Pace(roll_bytes=50_000))
    for step in range(40):
        write_steps(sink, range(step, step + 1))
        sink.flush()
    deadline = time.monotonic() + 20  # compaction has a thread of its own
    while len(list(tmp_path.rglob("values-*.parquet"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(list(tmp_path.rglob("values-*.parquet"))) >= 2
    before = open_recording(tmp_path / "a.thk").table("values").to_pylist()
    assert len(before) == 200
    sink.close(manifest, modules_table())
    recording = open_recording(tmp_path / "a.thk")
    assert recording.table("values").to_pylist() == before
    assert not [name for name in names(tmp_path / "a.thk") if name.endswith(".arrows")]
    assert recording.query("select count(*) n, count(distinct step) s from values").to_pylist() == [{"n": 200, "s": 40}]


def test_a_row_costs_at_most_100_bytes_without_its_sketch(tmp_path: Path) -> None:
    manifest = Manifest()
    sink = DiskSink(tmp_path / "a.thk", manifest)
    rows = 0
    for part in range(4):
        batch = many_values(50_000, first_step=part * 500)
        sink.write_values(batch)
        rows += len(batch)
    sink.close(manifest, modules_table())
    file = tmp_path / "a.thk" / "rank-00000" / "values-00000.parquet"
    assert pq.ParquetFile(file).metadata.num_rows == rows
    assert file.stat().st_size / rows <= 100


def test_many_threads_may_write(tmp_path: Path) -> None:
    manifest = Manifest()
    sink = DiskSink(tmp_path / "a.thk", manifest)
    threads = [
        threading.Thread(target=write_steps, args=(sink, range(first, first + 50))) for first in range(0, 400, 50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close(manifest, modules_table())
    assert sorted(open_recording(tmp_path / "a.thk").table("calls")["step"].to_pylist()) == sorted([*range(400)] * 5)


def rank_sink(path: Path, rank: int, world: int = 3, **options: bool) -> tuple[DiskSink, Manifest]:
    manifest = Manifest(rank=rank, world=world)
    return DiskSink(path, manifest, rank=rank, **options), manifest


def test_ranks_are_read_as_one(tmp_path: Path) -> None:
    sinks = [rank_sink(tmp_path / "a.thk", rank) for rank in (2, 0, 1)]
    for sink, manifest in sinks:
        write_steps(sink, range(2))
        sink.write_tensor("t", np.full(2, manifest.rank))
        sink.close(manifest, modules_table())
    recording = open_recording(tmp_path / "a.thk")
    assert recording.ranks == [0, 1, 2] and recording.manifest.complete and recording.manifest.partial is None
    assert [call.rank for call in recording["conv1"].calls] == [0, 0, 1, 1, 2, 2]
    counted = recording.query("select rank, count(*) n from values group by rank order by rank").to_pylist()
    assert counted == [{"rank": rank, "n": 10} for rank in range(3)]
    assert [recording.tensor("t", rank).tolist() for rank in range(3)] == [[0, 0], [1, 1], [2, 2]]
    assert [row["calls"] for row in recording.table("modules").to_pylist()] == [3, 3, 3, 3]
    only = open_recording(tmp_path / "a.thk", ranks=[1])
    assert only.ranks == [1] and only.query("select distinct rank from calls").to_pylist() == [{"rank": 1}]
    with pytest.raises(RecordingError, match="has no rank 7; it has ranks 0 to 2"):
        open_recording(tmp_path / "a.thk", ranks=[7])


def test_a_program_that_changes_its_directory_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "a.thk")
    monkeypatch.chdir(tmp_path)
    recording = open_recording("a.thk")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    rows = recording.table("values").num_rows
    assert rows > 0 and recording.query("select count(*) n from values").to_pylist() == [{"n": rows}]
    assert str(recording.path) == "a.thk" and recording.coverage.modules
    recording.refresh()
    assert recording.save("b.thk").path == recording.path and (tmp_path / "elsewhere" / "b.thk").is_dir()


def test_what_holds_of_some_ranks_alone_is_told_with_their_number(tmp_path: Path) -> None:
    for rank, gaps in enumerate(([(2, 5)], [(2, 5), (7, 8)], [(1, 5)])):
        sink, manifest = rank_sink(tmp_path / "a.thk", rank)
        manifest.gaps = list(gaps)
        sink.close(manifest, modules_table())
    recording = open_recording(tmp_path / "a.thk")
    assert recording.manifest.gaps == []
    assert str(recording.coverage).splitlines()[1:] == [
        "rank 0: steps 2 to 4 are missing: the recording was gone on with at step 5",
        "rank 1: steps 2 to 4 are missing: the recording was gone on with at step 5",
        "rank 1: step 7 is missing: the recording was gone on with at step 8",
        "rank 2: steps 1 to 4 are missing: the recording was gone on with at step 5",
    ]
    two = open_recording(tmp_path / "a.thk", ranks=[0, 1])
    assert two.manifest.gaps == [(2, 5)]
    assert str(two.coverage).splitlines()[1:] == [
        "steps 2 to 4 are missing: the recording was gone on with at step 5",
        "rank 1: step 7 is missing: the recording was gone on with at step 8",
    ]
    assert open_recording(tmp_path / "a.thk", ranks=[2]).manifest.gaps == [(1, 5)]


def test_a_rank_that_died_leaves_the_others_whole(tmp_path: Path) -> None:
    for rank in (0, 1):
        sink, manifest = rank_sink(tmp_path / "a.thk", rank)
        write_steps(sink, range(2))
        if rank == 0:
            sink.close(manifest, modules_table())
        else:
            sink.flush()
    recording = open_recording(tmp_path / "a.thk")
    assert not recording.manifest.complete and recording.manifest.partial == "rank 2 of 3 is missing"
    assert recording.table("values").num_rows == 20
    one, other = (open_recording(tmp_path / "a.thk", ranks=[rank]) for rank in (0, 1))
    assert one.manifest.complete and one.manifest.partial is None and not other.manifest.complete
    sink.close(manifest, modules_table())


def test_without_rank_0_the_others_can_be_read(tmp_path: Path) -> None:
    sink, manifest = rank_sink(tmp_path / "a.thk", 2)
    write_steps(sink, range(1))
    sink.close(manifest, modules_table())
    assert open_recording(tmp_path / "a.thk").ranks == [2]


def test_ranks_overwrite_their_own_folders_in_any_order(tmp_path: Path) -> None:
    for world, order in ((4, (0, 1, 2, 3)), (2, (1, 0))):
        for rank in order:
            sink, manifest = rank_sink(tmp_path / "a.thk", rank, world, overwrite=True)
            write_steps(sink, range(world))
            sink.close(manifest, modules_table())
    recording = open_recording(tmp_path / "a.thk")
    assert recording.ranks == [0, 1] and recording.steps == [0, 1] and recording.manifest.complete


def test_recordings_are_found_newest_first(tmp_path: Path) -> None:
    for age, name in ((30, "old"), (10, "new"), (20, "middle")):
        recorded(tmp_path / name)
        stamp = time.time() - age
        os.utime(tmp_path / name / "recording.json", (stamp, stamp))
    (tmp_path / "other").mkdir()
    assert [path.name for path in find_recordings(tmp_path)] == ["new", "middle", "old"]


def test_memory_stays_flat_over_a_long_recording(tmp_path: Path) -> None:
    code = """
import resource, sys
from tenterhook.recording import DiskSink, Manifest, Pace
from tests.recording.synthetic import many_values, modules_table
sink = DiskSink(sys.argv[1], Manifest(), pace=Pace(roll_bytes=4 << 20, queue_limit=8 << 20))
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
batch = many_values(20_000)
for _ in range(20): sink.write_values(batch)
sink.flush(); early = peak()
for _ in range(200): sink.write_values(batch)
sink.flush(); late = peak()
sink.close(Manifest(), modules_table())
print(early, late)
"""
    done = in_process(code, tmp_path / "a.thk")
    early, late = map(int, done.stdout.split())
    assert late - early < 60, (early, late)  # 4 million rows are 500 MB


def test_ranks_of_another_run_are_not_mixed_in(tmp_path: Path) -> None:
    for rank in range(2):
        manifest = Manifest(rank=rank, world=2)
        DiskSink(tmp_path / "a.thk", manifest, rank=rank).close(manifest, modules_table())
    with pytest.raises(TargetError, match="exists; choose another name"):
        DiskSink(tmp_path / "a.thk", Manifest(rank=3, world=4), rank=3)
    assert open_recording(tmp_path / "a.thk").ranks == [0, 1]
