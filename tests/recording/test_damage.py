"""Damaged, foreign and hostile recordings: one clear sentence, or what is whole of them, and never anything else.

For an hour of it: HYPOTHESIS_PROFILE is not needed, TENTERHOOK_FUZZ=100000 sets the number of examples.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenterhook.errors import NotRecordedError, RecordingError
from tenterhook.recording import DiskSink, Manifest, open_recording, query
from tenterhook.recording.dump import dump
from tenterhook.recording.schema import CALLS, MODULES, VALUES
from tenterhook.recording.tensors import INDEX
from tests.recording.synthetic import modules_table, step_of_rows

EXAMPLES = int(os.environ.get("TENTERHOOK_FUZZ", "60"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="CI" in os.environ,  # CI asks the same each time; fuzzing is done by hand
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def write(path: Path, *, close: bool) -> None:
    sink = DiskSink(path, Manifest(argv=["train.py"]))
    for step in range(3):
        calls, values = step_of_rows(step)
        sink.write_calls(calls)
        sink.write_values(values)
        sink.write_tensor(f"t{step}", np.full((4, 5), step, np.float32))
        sink.flush()
    if close:
        sink.close(Manifest(argv=["train.py"]), modules_table())
    else:
        shutil.copytree(path, path.with_name("killed.thk"))
        sink.close(Manifest(), modules_table())


@pytest.fixture(scope="module", params=["closed", "killed"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write(folder / "a.thk", close=request.param == "closed")
    return folder / ("a.thk" if request.param == "closed" else "killed.thk")


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed")
    write(folder / "a.thk", close=True)
    return folder / "a.thk"


def read_all(path: Path) -> None:
    recording = open_recording(path)
    for table in ("calls", "values", "modules"):
        recording.table(table).validate(full=True)
    recording.query("select count(*), max(mean), sum(nan_count), max(len(sketch)), max(path) from values")
    for call in recording.order():
        repr(call)
        [repr(value) for value in call.values]
    for key in ("t0", "t1", "t2"):
        try:
            recording.tensor(key).sum()
        except NotRecordedError:
            pass
    repr(recording.first_nonfinite())
    str(recording.coverage)
    repr(recording)


def files_of(path: Path) -> list[Path]:
    return sorted(entry for entry in path.rglob("*") if entry.is_file() and entry.name != ".reserve")


def copy_of(whole: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    return folder


def refused_or_read(path: Path) -> None:
    try:
        read_all(path)
    except RecordingError as error:
        message = str(error)
        assert message and "\n" not in message.partition(" failed: ")[0] and len(message) < 3000
    for _ in range(1):
        try:
            list(dump(path))
        except RecordingError:
            return


@fuzz
@given(data=st.data())
def test_truncated_files(whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = copy_of(whole, tmp_path_factory.getbasetemp() / "fuzzed.thk")
    victim = data.draw(st.sampled_from(files_of(path)))
    victim.write_bytes(victim.read_bytes()[: data.draw(st.integers(0, victim.stat().st_size - 1))])
    refused_or_read(path)


@fuzz
@given(data=st.data())
def test_flipped_bits(whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = copy_of(whole, tmp_path_factory.getbasetemp() / "fuzzed.thk")
    victim = data.draw(st.sampled_from(files_of(path)))
    content = bytearray(victim.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    victim.write_bytes(content)
    refused_or_read(path)


@fuzz
@given(data=st.data())
def test_foreign_content(whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = copy_of(whole, tmp_path_factory.getbasetemp() / "fuzzed.thk")
    files = files_of(path)
    victim = data.draw(st.sampled_from(files))
    other = data.draw(st.sampled_from(files)).read_bytes()
    victim.write_bytes(data.draw(st.one_of(st.binary(max_size=300), st.just(other), st.just(b"\0" * 5000))))
    refused_or_read(path)


@fuzz
@given(
    json_text=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*Manifest.__struct_fields__, "x"]), inner),
        max_leaves=20,
    ).map(json.dumps)
)
def test_any_json_as_the_manifest(closed: Path, tmp_path_factory: pytest.TempPathFactory, json_text: str) -> None:
    path = copy_of(closed, tmp_path_factory.getbasetemp() / "fuzzed.thk")
    (path / "recording.json").write_text(json_text)
    refused_or_read(path)


# one sentence for each


def no_such(path: Path) -> None:
    shutil.rmtree(path)


def a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x")


def another_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def damaged_json(path: Path) -> None:
    (path / "recording.json").write_text('{"format_version": "1.0", ')


def newer_major(path: Path) -> None:
    text = (path / "recording.json").read_text()
    (path / "recording.json").write_text(text.replace('"1.0"', '"2.3"').replace('"argv": [', '"argv": 7, "x": ['))


def deep_json(path: Path) -> None:
    (path / "recording.json").write_text('{"format_version": "1.0", "x": ' + "[" * 200_000 + "]" * 200_000 + "}")


def no_version(path: Path) -> None:
    (path / "recording.json").write_text('{"format_version": "one"}')


def huge_json(path: Path) -> None:
    with (path / "recording.json").open("wb") as file:
        file.truncate(1 << 40)


def cut_parquet(path: Path) -> None:
    file = path / "rank-00000" / "values-00000.parquet"
    file.write_bytes(file.read_bytes()[:-100])


def a_pipe(path: Path) -> None:
    file = path / "rank-00000" / "values-00000.parquet"
    file.unlink()
    os.mkfifo(file)


def a_link_out(path: Path) -> None:
    file = path / "recording.json"
    file.rename(path.with_name("elsewhere.json"))
    file.symlink_to(path.with_name("elsewhere.json"))


def foreign_columns(path: Path) -> None:
    pq.write_table(
        pa.table({"seq": ["text"] * 3, "step": [1, 2, 3]}), str(path / "rank-00000" / "values-00000.parquet")
    )


CASES: dict[Callable[[Path], None], str] = {
    no_such: "there is no recording at .*no such directory",
    a_file: "is a file; a recording is a directory",
    another_folder: "is not a recording: it has no recording.json",
    damaged_json: "is damaged",
    newer_major: r"was written by format 2\.3, this tenterhook reads 1\.x; upgrade tenterhook",
    deep_json: "is damaged",
    no_version: "format_version is 'one', not a version",
    huge_json: "bytes long, which no recording of ours is",
    cut_parquet: "values-00000.parquet is truncated",
    a_pipe: "is not a plain file",
    a_link_out: "is not a plain file",
    foreign_columns: "values-00000.parquet is damaged or not a recording's",
}


@pytest.mark.parametrize("spoil", CASES, ids=lambda spoil: spoil.__name__)
def test_each_damage_has_its_sentence(closed: Path, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = copy_of(closed, tmp_path / "a.thk")
    spoil(path)
    with pytest.raises(RecordingError, match=CASES[spoil]) as caught:
        read_all(path)
    assert "\n" not in str(caught.value)


def test_a_query_names_a_damaged_table_of_contents(closed: Path, tmp_path: Path) -> None:
    path = copy_of(closed, tmp_path / "a.thk")
    file = path / "rank-00000" / "calls-00000.parquet"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[-8:-4], "little")
    content[-8 - length : -8] = b"\xff" * length
    file.write_bytes(content)
    with pytest.raises(RecordingError, match="a file of the table calls is damaged"):
        open_recording(path).query("select 1")


def test_a_newer_minor_with_new_fields_is_read(closed: Path, tmp_path: Path) -> None:
    path = copy_of(closed, tmp_path / "a.thk")
    text = (path / "recording.json").read_text()
    (path / "recording.json").write_text(text.replace('"1.0",', '"1.9", "brand_new": {"a": [1]},'))
    file = path / "rank-00000" / "values-00000.parquet"
    table = pq.read_table(str(file))
    pq.write_table(table.append_column("later", pa.nulls(len(table), pa.int64())), str(file))
    recording = open_recording(path)
    assert recording.table("values").num_rows == 15 and "later" not in recording.table("values").column_names
    assert recording.query("select count(*) n from values").to_pylist() == [{"n": 15}]


# hostile tensors


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
