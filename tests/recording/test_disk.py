"""Writing to a directory: what is there afterwards, what is refused, what a fault costs."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tenterhook.errors import NotRecordedError, RecordingError, TargetError
from tenterhook.recording import DiskSink, Manifest, Pace, environment, find_recordings, open_recording
from tenterhook.recording.shards import ShardWriter
from tenterhook.recording.tensors import TensorStore
from tests.recording.synthetic import (
    call,
    calls_batch,
    many_values,
    modules_table,
    step_of_rows,
    value,
    values_batch,
)

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


# targets


def test_an_existing_target_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path / "a.thk")
    before = names(tmp_path)
    with pytest.raises(TargetError, match="exists; choose another name, or allow it to be replaced"):
        DiskSink(tmp_path / "a.thk", Manifest())
    assert names(tmp_path) == before


def test_overwriting_replaces_a_recording_and_leaves_what_is_not_ours(tmp_path: Path) -> None:
    recorded(tmp_path / "a.thk", steps=3)
    (tmp_path / "a.thk" / "notes.txt").write_text("mine")
    recorded(tmp_path / "a.thk", steps=1, overwrite=True)
    assert open_recording(tmp_path / "a.thk").steps == [0]
    assert (tmp_path / "a.thk" / "notes.txt").read_text() == "mine"


def test_overwriting_never_touches_what_is_not_a_recording(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "calls-00000.parquet").write_text("mine")
    with pytest.raises(TargetError, match="is not a recording, so it is not overwritten"):
        DiskSink(tmp_path / "data", Manifest(), overwrite=True)
    recorded(tmp_path / "a.thk")
    (tmp_path / "a.thk" / "rank-00000" / "model.pt").write_text("mine")
    with pytest.raises(TargetError, match="holds files that are not a recording's"):
        DiskSink(tmp_path / "a.thk", Manifest(), overwrite=True)
    assert (tmp_path / "data" / "calls-00000.parquet").read_text() == "mine"
    assert (tmp_path / "a.thk" / "rank-00000" / "model.pt").read_text() == "mine"


def test_a_link_in_a_recording_is_removed_and_not_followed(tmp_path: Path) -> None:
    recorded(tmp_path / "a.thk")
    (tmp_path / "precious").write_text("mine")
    link = tmp_path / "a.thk" / "rank-00000" / "values-00007.parquet"
    link.symlink_to(tmp_path / "precious")
    with pytest.raises(RecordingError, match="not a plain file"):
        open_recording(tmp_path / "a.thk")
    recorded(tmp_path / "a.thk", overwrite=True)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("where", ["file", "file/below.thk", "file/far/below.thk"])
def test_a_target_that_cannot_be_is_refused_at_once(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TargetError, match=r"is not a directory|[Nn]ot a directory"):
        DiskSink(tmp_path / where, Manifest())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_target_that_may_not_be_written_is_refused_at_once(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        place = Path("/proc/self/a.thk")  # root may write wherever a kernel lets anybody
    else:
        (tmp_path / "locked").mkdir(mode=0o555)
        place = tmp_path / "locked" / "a.thk"
    with pytest.raises(TargetError, match="cannot be written"):
        DiskSink(place, Manifest())


def test_what_could_not_be_begun_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TargetError, match="cannot be written: No space left on device"):
        DiskSink(tmp_path / "below" / "a.thk", Manifest())
    assert names(tmp_path) == [] and not (tmp_path / "below" / "a.thk").exists()


def test_two_processes_cannot_write_the_same_target(tmp_path: Path) -> None:
    sink = DiskSink(tmp_path / "a.thk", Manifest())
    code = """
import sys
from tenterhook.errors import TargetError
from tenterhook.recording import DiskSink, Manifest, Pace
try:
    DiskSink(sys.argv[1], Manifest(), overwrite=sys.argv[2] == "overwrite")
except TargetError as error:
    print(error)
"""
    assert "exists" in in_process(code, tmp_path / "a.thk", "keep").stdout
    assert f"is being written by process {os.getpid()}" in in_process(code, tmp_path / "a.thk", "overwrite").stdout
    write_steps(sink, range(2))
    sink.close(Manifest(), modules_table())
    assert open_recording(tmp_path / "a.thk").steps == [0, 1]


def test_of_many_that_claim_at_once_one_writes(tmp_path: Path) -> None:
    sinks: list[DiskSink] = []
    refused: list[TargetError] = []
    start = threading.Barrier(8)

    def claim() -> None:
        start.wait()
        try:
            sinks.append(DiskSink(tmp_path / "a.thk", Manifest()))
        except TargetError as error:
            refused.append(error)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sinks) == 1 and len(refused) == 7
    sinks[0].close(Manifest(), modules_table())


# faults


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    code = """
import os, sys
from tenterhook.recording import DiskSink, Manifest, Pace, open_recording
from tests.recording.synthetic import modules_table, step_of_rows
sink = DiskSink(sys.argv[1], Manifest())
def write(step):
    calls, values = step_of_rows(step)
    sink.write_calls(calls); sink.write_values(values)
write(0)
child = os.fork()
write(1)
if child == 0:
    sink.flush()
    assert sink.write_tensor("t", __import__("numpy").ones(3)) is False
    sink.close(Manifest(note="child"), modules_table())
    sys.exit(0)  # with all exit handlers, as a careless worker does
assert os.waitpid(child, 0)[1] == 0
write(2)
sink.close(Manifest(note="parent"), modules_table())
recording = open_recording(sys.argv[1])
print(recording.table("values").num_rows, recording.steps, recording.manifest.note)
"""
    done = in_process(
        code.replace("import os, sys", "import os, sys, warnings; warnings.simplefilter('ignore')"), tmp_path / "a.thk"
    )
    assert done.stdout == "15 [0, 1, 2] parent\n", done.stderr


def test_a_process_that_ends_without_closing_loses_nothing(tmp_path: Path) -> None:
    code = """
import sys
from tenterhook.recording import DiskSink, Manifest, Pace
from tests.recording.synthetic import step_of_rows
sink = DiskSink(sys.argv[1], Manifest(), pace=Pace(flush_interval=1000.0))
calls, values = step_of_rows(0)
sink.write_calls(calls); sink.write_values(values)
raise SystemExit(3)
"""
    assert in_process(code, tmp_path / "a.thk").returncode == 3
    recording = open_recording(tmp_path / "a.thk")
    assert recording.steps == [0] and len(recording.order()) == 5 and not recording.manifest.complete


def test_a_batch_of_another_schema_stops_the_recording_and_not_the_run(tmp_path: Path) -> None:
    manifest = Manifest()
    sink = DiskSink(tmp_path / "a.thk", manifest)
    write_steps(sink, range(1))
    sink.flush()
    sink.write_calls(values_batch(value(1, 0)))
    sink.flush()
    assert sink.failure
    write_steps(sink, range(1, 3))
    sink.close(manifest, modules_table())
    recording = open_recording(tmp_path / "a.thk")
    assert recording.steps == [0] and manifest.partial and manifest.lost_rows == 21


def test_a_slow_disk_slows_the_run_and_memory_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tenterhook.recording import rows, writer

    append, most = rows.RowWriter.append, [0]

    def slow(self: rows.RowWriter, batches: list[object]) -> int:
        time.sleep(0.02)
        return append(self, batches)

    monkeypatch.setattr(rows.RowWriter, "append", slow)
    monkeypatch.setattr(writer, "_WAIT_TOLD", 0.05)
    batch = many_values(300)
    manifest = Manifest()
    limit = 4 * len(batch) * 500
    sink = DiskSink(tmp_path / "a.thk", manifest, pace=Pace(queue_limit=limit))
    for _ in range(60):
        sink.write_values(batch)
        most[0] = max(most[0], sink._worker.queue.held)
    sink.close(manifest, modules_table())
    assert most[0] <= limit
    assert manifest.cost.blocked_seconds > 0.05
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'a.thk'}: the disk is slower than the run, which waits for it; record less, or elsewhere"
    ]
    assert open_recording(tmp_path / "a.thk").table("values").num_rows == 60 * 300


def test_over_budget_tensors_stop_and_rows_go_on(tmp_path: Path) -> None:
    manifest = Manifest()
    sink = DiskSink(tmp_path / "a.thk", manifest, budget=200_000)
    stored = []
    for step in range(5):
        stored.append(sink.write_tensor(f"t{step}", np.ones(10_000)))
        sink.write_calls(calls_batch(call(step * 10, step)))
        sink.write_values(values_batch(value(step * 10 + 1, step * 10, step, tensor=f"t{step}")))
    sink.close(manifest, modules_table())
    recording = open_recording(tmp_path / "a.thk")
    assert stored == [True, True, False, False, False]
    assert recording.steps == [0, 1, 2, 3, 4] and len(recording["conv1"].outputs) == 2
    assert recording.manifest.tensors_stopped == "the budget of 200000 bytes was reached at t2"
    late = recording["conv1"].calls[3].values[0]
    assert not late.stored
    with pytest.raises(NotRecordedError, match="was not stored: the budget of 200000 bytes"):
        late.tensor  # noqa: B018


def test_closing_twice_and_writing_late_do_no_harm(tmp_path: Path) -> None:
    manifest = Manifest()
    sink = DiskSink(tmp_path / "a.thk", manifest)
    write_steps(sink, range(1))
    sink.close(manifest, modules_table())
    write_steps(sink, range(1, 2))
    sink.flush()
    sink.close(Manifest(note="again"), modules_table())
    recording = open_recording(tmp_path / "a.thk")
    assert recording.steps == [0] and recording.manifest.note is None
    assert sink.lost_rows == 10


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


# ranks


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


def test_a_rank_that_died_leaves_the_others_whole(tmp_path: Path) -> None:
    for rank in (0, 1):
        sink, manifest = rank_sink(tmp_path / "a.thk", rank)
        write_steps(sink, range(2))
        if rank == 0:
            sink.close(manifest, modules_table())
        else:
            sink.flush()
    recording = open_recording(tmp_path / "a.thk")
    assert not recording.manifest.complete and recording.manifest.partial == "only 2 of 3 ranks are there"
    assert recording.table("values").num_rows == 20
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


# finding


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


def test_a_clock_that_jumps_changes_nothing_but_the_dates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Jumping(datetime.datetime):
        hours = 50

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            cls.hours -= 7
            return datetime.datetime(2026, 1, 1, tzinfo=tz) + datetime.timedelta(hours=cls.hours)

    seconds = iter(range(10**9, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))
    monkeypatch.setattr(environment, "datetime", Jumping)
    manifest = environment.start_manifest()
    sink = DiskSink(tmp_path / "a.thk", manifest, pace=Pace(flush_interval=0.1))
    for step in range(3):
        calls, values = step_of_rows(step)
        sink.write_calls(calls)
        sink.write_values(values)
    deadline = time.monotonic() + 20
    while open_recording(tmp_path / "a.thk").table("values").num_rows < 15 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert open_recording(tmp_path / "a.thk").table("values").num_rows == 15
    manifest.ended = environment.now()
    sink.close(manifest, modules_table())
    recording = open_recording(tmp_path / "a.thk")
    assert recording.manifest.complete and recording.manifest.ended < recording.manifest.started
    assert recording.steps == [0, 1, 2] and find_recordings(tmp_path) == [tmp_path / "a.thk"]


def test_a_tensor_that_is_written_while_the_others_are_looked_at_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ShardWriter(tmp_path)
    writer.append("0", np.zeros(4, np.float32))
    draft = tmp_path / "tensors-00000.safetensors.part"
    store = TensorStore(tmp_path)

    def written_meanwhile(path: Path) -> Path:
        if path.suffix == ".jsonl" and "1" not in written:
            written.append("1")
            writer.append("1", np.ones(100_000, np.float32))
        return path

    written: list[str] = []
    monkeypatch.setattr("tenterhook.recording.tensors.plain_file", written_meanwhile)
    for _ in range(2):
        store.look({0: draft}, finished=False)
        assert list(store) == ["0", "1"]
    assert store.get("1").sum() == 100_000
    writer.stop()
