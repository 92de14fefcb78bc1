"""SQL over a recording sees the recording and nothing else, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tenterhook.errors import RecordingError
from tenterhook.recording import DiskSink, Manifest, MemorySink, Recording, open_recording
from tests.recording.synthetic import call, calls_batch, modules_table, step_of_rows, value, values_batch


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
