"""Files that are whole and say what cannot be (headers, indexes, text, words), streams that are cut: refused, or told."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tenterhook.errors import NotRecordedError, RecordingError
from tenterhook.recording import DiskSink, Manifest, open_recording, query
from tenterhook.recording.schema import CALLS, MODULES, VALUES
from tenterhook.recording.tensors import INDEX
from tests.recording.damaging import copy_of, refused_or_read, write
from tests.recording.synthetic import modules_table


def shard_with(path: Path, header: bytes, declared: int | None = None) -> None:
    length = len(header) if declared is None else declared
    (path / "rank-00000" / "tensors.parquet").unlink()
    shard = path / "rank-00000" / "tensors-00000.safetensors"
    shard.write_bytes(struct.pack("<Q", length) + header + b"\0" * 64)


@pytest.mark.parametrize(
    "header",
    [
        {"t0": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 64]}},
        {"t0": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 2**82]}},
        {"t0": {"dtype": "F32", "shape": [-4, -4], "data_offsets": [0, 64]}},
        {"t0": {"dtype": "F32", "shape": [16], "data_offsets": [-64, 0]}},
        {"t0": {"dtype": "F32", "shape": [16], "data_offsets": [64, 128]}},
        {"t0": {"dtype": "O", "shape": [8], "data_offsets": [0, 64]}},
        {"t0": {"dtype": "U8", "shape": [8, 8], "data_offsets": [0, 64]}, "__metadata__": {"t0": "object"}},
        {"t0": {"dtype": "U8", "shape": [], "data_offsets": [0, 64]}, "__metadata__": {"t0": "M8[ns]"}},
        {
            "t0": {"dtype": "U8", "shape": [], "data_offsets": [0, 64]},
            "__metadata__": {"t0": "08,f4"},
        },  # met by atheris
        {"t0": {"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]}},
        {"t0": "text"},
        [1, 2],
    ],
    ids=lambda header: json.dumps(header)[:60],
)
def test_a_hostile_header_is_refused(closed: Path, tmp_path: Path, header: object) -> None:
    path = copy_of(closed, tmp_path / "a.thk")
    shard_with(path, json.dumps(header).encode())
    with pytest.raises(RecordingError, match=r"tensors-00000\.safetensors is damaged"):
        open_recording(path).tensor("t0")


@pytest.mark.parametrize("declared", [2**63, 2**40, 500, 0, 1])
def test_an_absurd_header_length_is_refused(closed: Path, tmp_path: Path, declared: int) -> None:
    path = copy_of(closed, tmp_path / "a.thk")
    shard_with(path, b"{}", declared)
    with pytest.raises(RecordingError, match="declares a header of"):
        open_recording(path).tensor("t0")


def test_an_index_can_name_no_file_outside(closed: Path, tmp_path: Path) -> None:
    path = copy_of(closed, tmp_path / "a.thk")
    index = path / "rank-00000" / "tensors.parquet"
    rows = pq.read_table(str(index)).to_pylist()
    pq.write_table(pa.Table.from_pylist([{**row, "shard": -1} for row in rows], pq.read_schema(str(index))), str(index))
    with pytest.raises(RecordingError, match="names shard -1, which is not there"):
        open_recording(path).tensor("t0")


def test_a_key_that_climbs_is_only_a_key(tmp_path: Path) -> None:
    sink = DiskSink(tmp_path / "a.thk", Manifest())
    sink.write_tensor("../../../etc/passwd", np.ones(3))
    sink.close(Manifest(), modules_table())
    assert open_recording(tmp_path / "a.thk").tensor("../../../etc/passwd").tolist() == [1, 1, 1]
    with pytest.raises(NotRecordedError):
        open_recording(tmp_path / "a.thk").tensor("recording.json")


def test_the_cut_off_end_of_a_stream_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.thk", close=False)
    stream = tmp_path / "killed.thk" / "rank-00000" / "values-00000.arrows"
    stream.write_bytes(stream.read_bytes()[:-10])
    recording = open_recording(tmp_path / "killed.thk")
    assert recording.table("values").num_rows == 10
    assert len(recording.notes) == 1 and recording.notes[0].startswith("values-00000.arrows: its last ")


TABLES = {"calls-00000": CALLS, "values-00000": VALUES, "modules": MODULES, "tensors": INDEX}


TEXTS = [
    (file, field.name)
    for file, schema in TABLES.items()
    for field in schema
    if any(word in str(field.type) for word in ("string", "dictionary"))
]


@pytest.mark.parametrize(("file", "column"), TEXTS)
def test_text_that_is_no_text_is_refused(closed: Path, tmp_path: Path, file: str, column: str) -> None:
    path = copy_of(closed, tmp_path / "a.thk")
    part = path / "rank-00000" / f"{file}.parquet"
    rows = pq.read_table(part)
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    ).take(pa.array([0] * len(rows)))
    kind = rows.schema.field(column).type
    if pa.types.is_dictionary(kind):
        bad = pa.DictionaryArray.from_arrays(pa.array([0] * len(rows), pa.int32()), bad, safe=False)
    elif pa.types.is_list(kind):
        bad = pa.ListArray.from_arrays(pa.array(range(len(rows) + 1), pa.int32()), bad)
    pq.write_table(rows.set_column(rows.schema.get_field_index(column), rows.schema.field(column), bad), part)
    with pytest.raises(RecordingError, match=rf"{file}\.parquet is damaged"):
        open_recording(path).table(file.partition("-")[0]) if file != "tensors" else open_recording(path).tensor("t0")
    if file != "tensors":
        with pytest.raises(RecordingError):
            open_recording(path).query(f'select "{column}" from {file.partition("-")[0]}')
    refused_or_read(path)


WORDS = [(file, column) for file, column in TEXTS if pa.types.is_dictionary(TABLES[file].field(column).type)]


@pytest.mark.parametrize("number", [1, 2**31 - 1, -1])
@pytest.mark.parametrize(("file", "column"), WORDS)
def test_a_word_that_is_in_no_dictionary_is_refused(
    closed: Path, tmp_path: Path, file: str, column: str, number: int
) -> None:
    path = copy_of(closed, tmp_path / "a.thk")
    stream = (
        path / "rank-00000" / f"{file[:-5]}00007.arrows"
    )  # a further part: Parquet's writer would look such words up
    rows = pq.read_table(path / "rank-00000" / f"{file}.parquet", schema=TABLES[file]).combine_chunks()
    codes = pa.array([0] * (len(rows) - 1) + [number], pa.int32())
    bad = pa.DictionaryArray.from_arrays(codes, pa.array(["word"]), safe=False)
    batch = rows.set_column(rows.schema.get_field_index(column), rows.schema.field(column), bad).to_batches()[0]
    with pa.OSFile(str(stream), "wb") as sink, pa.ipc.new_stream(sink, TABLES[file]) as writer:
        writer.write_batch(batch)
    recording = open_recording(path)
    name = file.partition("-")[0]
    assert recording.table(name).num_rows == len(rows) and len(recording.notes) == 1  # what is whole, and what is not
    assert recording.query(f"select count(*) n from {name}").to_pylist() == [{"n": len(rows)}]
    refused_or_read(path)


def test_a_part_with_a_word_that_is_in_no_dictionary_is_refused(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Parquet's reader gave it for a file with two bits flipped."""
    bad = pa.DictionaryArray.from_arrays(pa.array([0, 228], pa.int32()), pa.array(["word"]), safe=False)
    read = ds.FileSystemDataset.to_table

    def damaged(self: ds.Dataset, **options: object) -> pa.Table:
        rows = read(self, **options).slice(0, 2)
        return rows.set_column(rows.schema.get_field_index("path"), rows.schema.field("path"), bad)

    whole = ds.dataset
    monkeypatch.setattr(ds, "dataset", lambda *args, **options: Damaged(whole(*args, **options), damaged))
    with pytest.raises(RecordingError, match=r"calls-00000\.parquet is damaged .*out of bounds: 228"):
        open_recording(closed).table("calls")


class Damaged:
    """A data set whose rows are spoilt on the way."""

    def __init__(self, whole: ds.Dataset, spoil: Callable[..., pa.Table]) -> None:
        self.whole, self.spoil = whole, spoil
        self.get_fragments = whole.get_fragments

    def to_table(self, **options: object) -> pa.Table:
        return self.spoil(self.whole, **options)


@pytest.mark.parametrize("nested", [False, True])
def test_an_answer_with_text_that_is_no_text_is_refused(nested: bool) -> None:
    """DuckDB hands on what it finds, where a flipped bit led it to other bytes of a file than those that it checked."""
    buffers = [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    text = pa.Array.from_buffers(pa.string(), 1, buffers)
    connection = query.new_connection()
    connection.register(
        "rows", pa.table({"text": pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), text) if nested else text})
    )
    with pytest.raises(RecordingError, match=r"the query (met a damaged file|failed): "):
        query.run(connection, "select * from rows")
