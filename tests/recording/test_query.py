"""SQL over a recording sees the recording and nothing else, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tenterhook.errors import RecordingError
from tenterhook.recording import DiskSink, Manifest, MemorySink, Pace, Recording, open_recording
from tenterhook.recording.rows import ROW_GROUP
from tenterhook.stats import STATISTICS
from tests.recording.synthetic import call, calls_batch, many_values, modules_table, step_of_rows, value, values_batch


@pytest.fixture(params=["memory", "disk"])
def recording(request: pytest.FixtureRequest, tmp_path: Path) -> Recording:
    sink = MemorySink() if request.param == "memory" else DiskSink(tmp_path / "a 'quoted' name.thk", Manifest())
    for step in range(4):
        calls, values = step_of_rows(step)
        sink.write_calls(calls)
        sink.write_values(values)
    sink.write_calls(calls_batch(call(900, 9)))
    sink.write_values(values_batch(value(901, 900, 9, nan_count=2)))
    sink.close(Manifest(), modules_table())
    return Recording(sink) if isinstance(sink, MemorySink) else open_recording(sink.path)


def test_the_first_value_that_is_not_finite(recording: Recording) -> None:
    sql = """select step, path, kind from values where nan_count > 0 or posinf_count > 0 or neginf_count > 0
             order by step, seq limit 1"""
    assert recording.query(sql).to_pylist() == [{"step": 9, "path": "conv1", "kind": "output"}]
    first = recording.first_nonfinite()
    assert first is not None and (first.address, first.nan_count) == ("conv1:output#0@9", 2)


def changed(batch: pa.RecordBatch, column: str, row: int, number: int) -> pa.RecordBatch:
    """Give the batch with another number in one place."""
    numbers = batch.column(column).to_numpy().copy()
    numbers[row] = number
    place = batch.schema.get_field_index(column)
    return batch.set_column(place, batch.schema.field(place), pa.array(numbers))


@pytest.mark.parametrize("bad", ["nan_count", "posinf_count", "neginf_count"])
@pytest.mark.parametrize("close", [True, False], ids=["closed", "open"])
def test_the_first_of_many_that_are_not_finite(tmp_path: Path, bad: str, close: bool) -> None:
    sinks = []
    for rank, places in enumerate(([], [(5, 70_000), (5, 64_999)], [(5, 64_999), (8, 3)])):
        manifest = Manifest(rank=rank, world=3)
        sink = DiskSink(tmp_path / "a.thk", manifest, rank=rank, pace=Pace(roll_bytes=8_000_000))
        batch = many_values(100_000, modules=13_000)
        for step, seq in places:
            batch = changed(changed(batch, "step", seq, step), bad, seq, 2)
        for start in range(0, len(batch), 25_000):
            sink.write_values(batch.slice(start, 25_000))
            sink.flush()
        sinks.append((sink, manifest))
    for sink, manifest in sinks if close else ():
        sink.close(manifest, modules_table())
    recording = open_recording(tmp_path / "a.thk")
    first = recording.first_nonfinite()
    assert first is not None and (first.step, first.seq, first.rank, first.statistics[bad]) == (5, 64_999, 1, 2)
    rows = recording.query(f"select * from values where {bad} > 0 order by step, seq, rank").to_pylist()
    assert len(rows) == 4 and first.path == rows[0]["path"] and first.mean == rows[0]["mean"]
    assert open_recording(tmp_path / "a.thk", ranks=[0]).first_nonfinite() is None
    for sink, manifest in sinks:
        sink.close(manifest, modules_table())


def test_groups_of_rows_without_one_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = DiskSink(tmp_path / "a.thk", Manifest())
    batch = many_values(10 * ROW_GROUP, modules=100)
    counts = np.zeros(len(batch), np.int64)
    counts[7 * ROW_GROUP + 5 :] = 1
    place = batch.schema.get_field_index("nan_count")
    sink.write_values(batch.set_column(place, batch.schema.field(place), pa.array(counts)))
    sink.close(Manifest(), modules_table())
    groups, read = [], pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, at, **kw: groups.append(at) or read(self, at, **kw)
    )
    first = open_recording(tmp_path / "a.thk").first_nonfinite()
    assert first is not None and first.seq == 7 * ROW_GROUP + 5
    assert groups == [7, 7]  # once to find it, once for the row; what is later is not looked at


def test_tables_join(recording: Recording) -> None:
    sql = """select m.type, count(*) n from values v join calls c on c.seq = v.call_seq and c.rank = v.rank
             join modules m on m.path = v.path and m.model = v.model group by all order by n desc, m.type"""
    assert recording.query(sql).to_pylist() == [
        {"type": "Linear", "n": 8},
        {"type": "Conv2d", "n": 5},
        {"type": "Net", "n": 4},
        {"type": "ReLU", "n": 4},
    ]


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('/etc/passwd')",
        "select * from read_text('{secret}')",
        "select * from '{secret}'",
        "select * from glob('/etc/*')",
        "select * from local_variable",
        "copy (select 1) to '{secret}'",
        "copy (select 1) to '{own}'",
        "explain analyze copy (select 1) to '{own}'",
        "attach '{secret}.db'",
        "set enable_external_access = true",
        "install httpfs",
        "load httpfs",
        "create table t as select 1",
        "drop view values",
        "select 1; select 2",
        "pragma database_list",
        "select getenv('PATH')",
        "",
        "not sql",
        "select nothing from values",
    ],
)
def test_nothing_else_is_reached(recording: Recording, tmp_path: Path, sql: str) -> None:
    local_variable = pa.table({"secret": [1]})
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    own = tmp_path / "own"
    if recording.path is not None:
        own = recording.path / "rank-00000" / "values-00000.parquet"
    before = own.read_bytes() if own.exists() else b""
    with pytest.raises(RecordingError):
        recording.query(sql.format(secret=secret, own=str(own).replace("'", "''")))
    assert secret.read_text() == "a\n1\n" and (own.read_bytes() if own.exists() else b"") == before
    assert local_variable.num_rows == 1


PLACES = {
    "whole": [(rank, [4 * rank, 0], 12, {}) for rank in range(4)],
    "copies": [(rank, [8 * (rank % 2), 0], 24, {"nan_count": rank % 2}) for rank in range(4)],
    "missing": [(rank, [4 * rank, 0], 12, {}) for rank in (0, 2, 3)],
    "empty": [(0, [0, 0], 48, {}), *((rank, [0, 0], 0, {}) for rank in (1, 2, 3))],
    "nothing": [(rank, [0, 0], 0, {"shape": [0, 3]}) for rank in range(2)],
    "unsketched": [(rank, [4 * rank, 0], 12, {"sketch": None, "note": "rows of columns"}) for rank in range(4)],
    "unmeasured": [(rank, [4 * rank, 0], None, dict.fromkeys((*STATISTICS, "sketch", "digest"))) for rank in range(4)],
    "not-finite": [(rank, [4 * rank, 0], 12, {"posinf_count": 12} if rank else {}) for rank in range(4)],
    "own": [(rank, None, 48, {}) for rank in range(2)],
}
ALONE = ("min", "max", "mean", "std", "rms", "absmax")


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
def test_shards_are_merged_in_sql_as_the_method_does(tmp_path: Path, disk: bool) -> None:
    chance = np.random.default_rng(0)
    rows: dict[int, list[dict[str, object]]] = {rank: [] for rank in range(4)}
    for step, (path, parts) in enumerate((path, parts) for path, parts in PLACES.items() for _ in range(2)):
        of_shard: dict[str, dict[str, object]] = {}
        for rank, shard, numel, fields in parts:
            numbers = {name: float(number) for name, number in zip(ALONE, chance.normal(size=6) ** 2, strict=True)}
            numbers["mean"] += 1e4  # of which a naive variance would lose the rest
            numbers["rms"] = (numbers["mean"] ** 2 + numbers["std"] ** 2) ** 0.5
            if not numel or fields.get("posinf_count") == numel:
                numbers = dict.fromkeys(ALONE)
            same = of_shard.setdefault(
                str(shard) if shard else str(rank), {**numbers, "sketch": chance.normal(size=64)}
            )
            content = {
                **same,
                "shape": [16, 3],
                "shard": shard,
                "numel": numel,
                "zero_count": 0,
                "kind": "param",
                **fields,
            }
            content["sketch"] = None if content["sketch"] is None or not numel else list(content["sketch"])
            rows[rank].append(value(len(rows[rank]), 0, step, path, **content))
    if disk:
        for rank in range(4):
            sink = DiskSink(tmp_path / "a.thk", Manifest(world=4, rank=rank), rank=rank)
            sink.write_values(values_batch(*rows[rank]))
            sink.close(Manifest(world=4, rank=rank), modules_table())
        recording = open_recording(tmp_path / "a.thk")
    else:
        memory = MemorySink()
        memory.write_values(values_batch(*rows[0]))
        recording = Recording(memory)
    expected = recording.merged().sort_by([("step", "ascending")]).to_pylist()
    found = recording.query("select * from merged order by step, ranks").to_pylist()
    expected.sort(key=lambda row: (row["step"], row["ranks"]))
    assert len(found) == len(expected) > 10 and found[0].keys() == expected[0].keys()
    for ours, theirs in zip(found, expected, strict=True):
        for name, wanted in theirs.items():
            near = isinstance(wanted, float) or (name == "sketch" and wanted is not None)
            assert ours[name] == (pytest.approx(wanted, rel=1e-6, abs=1e-6) if near else wanted), (ours["path"], name)
