"""The page on the format says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest

from tenterhook.recording import DiskSink, Manifest, open_recording
from tenterhook.recording.schema import CALLS, FORMAT_VERSION, MODULES, VALUES
from tests.recording.synthetic import modules_table, value, values_batch

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text("utf-8")


def section(title: str) -> str:
    return re.split(r"^#+ ", PAGE.partition(f"# {title}\n")[2], maxsplit=1, flags=re.M)[0]


@pytest.mark.parametrize(("title", "schema"), [("calls", CALLS), ("values", VALUES), ("modules", MODULES)])
def test_every_column_is_told(title: str, schema: object) -> None:
    told = set(re.findall(r"`(\w+)`", section(title)))
    assert set(schema.names) <= told  # type: ignore[attr-defined]


def test_every_field_of_the_manifest_is_told() -> None:
    told = set(re.findall(r"`(\w+)`", section("The manifest")))
    assert set(Manifest.__struct_fields__) <= told
    assert f"now `{FORMAT_VERSION}`" in PAGE


def test_the_readers_on_the_page_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = DiskSink(tmp_path / "run.thk", Manifest())
    sink.write_values(values_batch(value(1, 0), value(3, 2, 7, "fc", nan_count=5)))
    sink.close(Manifest(), modules_table())
    monkeypatch.chdir(tmp_path)
    python, sql = (re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)[-1] for language in ("python", "sql"))
    exec(compile(python, "format.md", "exec"), {})
    assert capsys.readouterr().out.startswith(
        "rank-00000 [{'step': 7, 'path': 'fc', 'kind': 'output', 'nan_count': 5}]"
    )
    assert duckdb.connect().sql(sql).fetchall() == [(7, "fc", "output")]


def test_the_page_merges_shards_as_the_reader_does(tmp_path: Path) -> None:
    for rank in range(4):
        sink = DiskSink(tmp_path / "run.thk", Manifest(rank=rank, world=4), rank=rank)
        part = {
            "shape": [8, 3],
            "shard": [rank % 2 * 4, 0],
            "numel": 12,
            "kind": "param",
            "min": -float(rank % 2),
            "rms": 1.25**0.5,
        }
        sink.write_values(values_batch(value(1, 0, nan_count=rank % 2, **part)))  # two copies of each part
        sink.close(Manifest(rank=rank, world=4), modules_table())
    recording = open_recording(tmp_path / "run.thk")
    sql = re.findall(r"```sql\n(.*?)```", PAGE, re.S)[0]
    (row,) = recording.query(sql).to_pylist()
    (merged,) = recording.merged().to_pylist()
    assert {name: row[name] for name in ("numel", "min", "max", "nan_count")} == {
        "numel": 24, "min": -1.0, "max": 2.25, "nan_count": 1,
    }  # fmt: skip
    assert {name: merged[name] for name in row if name != "norm"} == {name: row[name] for name in row if name != "norm"}
    assert row["norm"] == pytest.approx(merged["rms"] * (24 - 1) ** 0.5)
    assert merged["ranks"] == [0, 1, 2, 3] and merged["sketch"] == [2.0] * 64


def test_the_page_asks_many_ranks(tmp_path: Path) -> None:
    for rank in range(4):
        sink = DiskSink(tmp_path / "run.thk", Manifest(rank=rank, world=4), rank=rank)
        rows = []
        for step in range(3):
            seq = step * 10
            odd = rank == 2 and step > 0
            rows.append(value(seq, seq, step, "conv1", rms=3.0, numel=6))
            rows.append(
                value(seq + 1, seq, step, "fc", rms=4.0, numel=6, nan_count=2 if rank == 3 and step == 2 else 0)
            )
            rows.append(value(seq + 2, seq, step, "fc", kind="param", slot="weight", digest=7 if odd else step))
            rows.append(value(seq + 3, seq, step, "fc", kind="param", slot="bias", digest=step))
            rows.append(value(seq + 4, seq, step, "conv1", kind="param", slot="weight", digest=rank, shard=[rank, 0]))
        sink.write_values(values_batch(*rows))
        sink.close(Manifest(rank=rank, world=4), modules_table())
    recording = open_recording(tmp_path / "run.thk")
    first, norms, differing = re.findall(r"```sql\n(.*?)```", section("Questions to many ranks"), re.S)
    assert recording.query(first).to_pylist() == [{"rank": 3, "step": 2, "path": "fc", "kind": "output"}]
    found = recording.query(norms).to_pylist()
    assert [(row["step"], row["path"]) for row in found] == [
        (step, path) for step in range(3) for path in ("conv1", "fc")
    ]
    assert [row["norm"] ** 2 for row in found] == pytest.approx([9 * 24, 16 * 24, 9 * 24, 16 * 24, 9 * 24, 16 * 22])
    assert recording.query(differing).to_pylist() == [
        {"step": step, "path": "fc", "slot": "weight", "rank": 2} for step in (1, 2)
    ]
