"""Whoever has the page on the format can read a recording: a reader that knows nothing else reads what we read."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import jsonschema
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.recording import DiskSink, Manifest, Pace
from tests.recording import plain_reader
from tests.recording.synthetic import modules_table, step_of_rows

SCHEMA = Path(__file__).parents[2] / "docs" / "recording.schema.json"


def test_the_reader_knows_nothing_of_ours() -> None:
    tree = ast.parse(Path(plain_reader.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} == {
        "__future__",
        "json",
        "re",
        "pathlib",
        "typing",
        "numpy",
        "pyarrow",
    }


@pytest.fixture(params=["closed", "killed", "resumed"])
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Several parts and shards, and tensors of odd dtypes."""
    manifest = Manifest(argv=["train.py"])
    sink = DiskSink(tmp_path / "a.thk", manifest, pace=Pace(roll_bytes=40_000, shard_bytes=70_000))
    for step in range(60):
        calls, values = step_of_rows(step)
        sink.write_calls(calls)
        sink.write_values(values)
        sink.write_tensor(f"{step}", np.full((3, 5), step, np.float32))
        sink.write_tensor(f"c{step}", np.full(3, step * 1j, np.complex64))
        sink.write_tensor(f"b{step}", np.full(3, step, ml_dtypes.bfloat16))
        sink.flush()
    if request.param == "closed":
        sink.close(manifest, modules_table())
        return tmp_path / "a.thk"
    killed = tmp_path / "a.thk"
    sink._finalizer()  # what becomes of one that is forgotten: the thread ends, nothing is closed
    stream = sorted((killed / "rank-00000").glob("values-*.arrows"))[-1]
    stream.write_bytes(stream.read_bytes()[:-11])
    if request.param == "resumed":
        (killed / "rank-00000" / "claim.json").unlink()
        manifest = Manifest(argv=["train.py"])
        DiskSink(killed, manifest, resume=True).close(manifest, modules_table())
    return killed


def test_it_reads_what_we_read(recorded: Path) -> None:
    ours = th.open(recorded)
    assert plain_reader.manifest(recorded)["complete"] == ours.manifest.complete
    for table in ("calls", "values"):
        rows = plain_reader.rows(recorded, table)
        assert rows and rows == ours.table(table).select(list(rows[0])).to_pylist()
    tensors = plain_reader.tensors(recorded / "rank-00000")
    assert len(tensors) in (180, 0)
    for key, tensor in tensors.items():
        assert tensor.tobytes() == ours.tensor(key).tobytes()
        assert tensor.shape == ours.tensor(key).shape or key[0] == "b"


def test_it_reads_a_real_recording_of_two_ranks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    for rank in range(2):
        with th.record(model, tensors=True) as rec:
            model(torch.randn(2, 4)).sum().backward()
        rec.recording.manifest.world, rec.recording.manifest.rank = 2, rank
        manifest = rec.recording.manifest
        sink = DiskSink(tmp_path / "a.thk", manifest, rank=rank)
        for table, write in (("calls", sink.write_calls), ("values", sink.write_values)):
            for batch in rec.table(table).drop_columns(["rank"]).combine_chunks().to_batches():
                write(batch)
        sink.close(manifest, rec.table("modules"))
    assert plain_reader.manifest(tmp_path / "a.thk")["complete"]
    ours = th.open(tmp_path / "a.thk")
    for table in ("calls", "values"):
        rows = plain_reader.rows(tmp_path / "a.thk", table)
        assert {row["rank"] for row in rows} == {0, 1} and rows == ours.table(table).select(list(rows[0])).to_pylist()
    shutil.rmtree(tmp_path / "a.thk" / "rank-00001")
    assert not plain_reader.manifest(tmp_path / "a.thk")["complete"]


def test_a_newer_major_is_refused(recorded: Path) -> None:
    found = json.loads((recorded / "recording.json").read_text())
    (recorded / "recording.json").write_text(json.dumps({**found, "format_version": "2.0"}))
    with pytest.raises(ValueError, match="format 2"):
        plain_reader.manifest(recorded)


@pytest.mark.parametrize("error", [None, ValueError("bad")])
def test_what_is_written_is_as_the_schema_says(tmp_path: Path, error: Exception | None) -> None:
    schema = json.loads(SCHEMA.read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    path = tmp_path / "a.thk" / "recording.json"
    try:
        with th.record(model, to=tmp_path / "a.thk", tensors=True, budget=10, every={"**": 2, "0": 1}, note="a note"):
            jsonschema.validate(json.loads(path.read_bytes()), schema)
            with th.edit(model) as edit:
                edit.output("0", th.edits.scale(0.5))
                for _ in range(3):
                    model(torch.ones(2, 4)).sum().backward()
            if error is not None:
                raise error
    except ValueError as raised:
        assert raised is error
    found = json.loads(path.read_bytes())
    jsonschema.validate(found, schema)
    assert (
        found["complete"]
        and found["edits"]
        and found["tensors_stopped"]
        and (error is None) == (found["error"] is None)
    )
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**found, "steps": "many"}, schema)
