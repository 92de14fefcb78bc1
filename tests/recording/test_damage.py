"""Damaged, foreign and hostile recordings: one clear sentence, or what is whole of them, and never anything else.

For an hour of it: HYPOTHESIS_PROFILE is not needed, TENTERHOOK_FUZZ=100000 sets the number of examples.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenterhook.errors import RecordingError
from tenterhook.recording import Manifest, open_recording
from tests.recording.damaging import copy_of, files_of, read_all, refused_or_read, write

EXAMPLES = int(os.environ.get("TENTERHOOK_FUZZ", "60"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="CI" in os.environ,  # CI asks the same each time; fuzzing is done by hand
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module", params=["closed", "killed"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write(folder / "a.thk", close=request.param == "closed")
    return folder / ("a.thk" if request.param == "closed" else "killed.thk")


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
