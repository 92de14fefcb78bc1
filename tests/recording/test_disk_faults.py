"""What goes wrong while a recording is written costs what it must, and no more."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import numpy as np
import pytest

from tenterhook.errors import NotRecordedError
from tenterhook.recording import DiskSink, Manifest, Pace, environment, find_recordings, open_recording
from tenterhook.recording.shards import ShardWriter
from tenterhook.recording.tensors import TensorStore
from tests.recording.synthetic import call, calls_batch, many_values, modules_table, step_of_rows, value, values_batch
from tests.recording.writing import in_process, write_steps


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
