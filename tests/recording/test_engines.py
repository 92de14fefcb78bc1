"""Engines that run on many machines read the files as they are, and answer as we do."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tenterhook.recording import DiskSink, Manifest, open_recording
from tests.recording.synthetic import call, calls_batch, modules_table, step_of_rows, value, values_batch

EXAMPLE = Path(__file__).parents[2] / "examples" / "dask_ranks.py"


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    for rank in range(3):
        manifest = Manifest(rank=rank, world=3)
        sink = DiskSink(tmp_path / "a.thk", manifest, rank=rank)
        for step in range(4):
            calls, values = step_of_rows(step)
            sink.write_calls(calls)
            sink.write_values(values)
        sink.write_calls(calls_batch(call(900, 9 - rank)))
        sink.write_values(values_batch(value(901, 900, 9 - rank, posinf_count=rank)))
        sink.close(manifest, modules_table())
    return tmp_path / "a.thk"


def test_dask_answers_as_duckdb_does(
    ranks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(EXAMPLE))
    rows = example["values"](ranks)
    recording = open_recording(ranks)
    first = recording.query(
        "select step, seq, rank, path, kind from values where posinf_count > 0 order by step, seq, rank limit 1"
    )
    assert (
        example["first_non_finite"](rows).to_dict("records")
        == first.to_pylist()
        == [{"step": 7, "seq": 901, "rank": 2, "path": "conv1", "kind": "output"}]
    )
    norms = recording.query(
        "select step, path, sqrt(sum(rms * rms * numel)) as norm from values group by all order by step, path"
    ).to_pylist()
    assert example["norms"](rows).to_dict() == pytest.approx({(row["step"], row["path"]): row["norm"] for row in norms})
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(ranks)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "conv1 output" in capsys.readouterr().out
