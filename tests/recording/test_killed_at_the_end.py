"""A process that dies while it finishes a recording, or goes on with one, at any point: nothing whole is lost, each row is there once."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tenterhook as th
from tenterhook.recording import DiskSink, Manifest, Pace
from tenterhook.recording.dump import dump
from tests.cli.commands import tenterhook
from tests.recording.synthetic import call, calls_batch, modules_table, value, values_batch

ROOT = Path(__file__).parents[2]
STEPS, BACK_TO = 30, 18  # amid a part, and amid a shard, which holds four tensors
CASES = [(when, times) for when in ("before", "after") for times in (1, 3)]
POINTS = [
    "rows.compact",
    "rows.pq.ParquetWriter",
    "rows.RowWriter.close",
    "shards._header",
    "shards._write_all",
    "shards.ShardWriter.close",
    "writer.write_index",
    "writer.write_modules",
    "target.sign_off",
    "target.write_manifest",
    "target.publish",
    "target.os.fsync",
    "pathlib.Path.replace",
    "pathlib.Path.rename",
    "pathlib.Path.unlink",
]


def die_at(point: str, when: str, times: int) -> None:
    """Have this process die at a point: before it, or when it is done, for the so many-th time."""
    *names, last = point.split(".")
    if names[0] == "pathlib":
        owner: Any = Path
    else:
        owner = importlib.import_module(f"tenterhook.recording.{names[0]}")
        for name in names[1:]:
            owner = getattr(owner, name)
    done, left = getattr(owner, last), [times]

    def dies(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if when == "before" and not left[0]:
            os._exit(9)
        result = done(*arguments, **options)
        if when == "after" and not left[0]:
            os._exit(9)
        return result

    setattr(owner, last, dies)


def rows_of(step: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    first = step * 100
    values = [value(first + number, first, step, slot=f"[{number}]", tensor=f"t{step}") for number in (1, 2)]
    return calls_batch(call(first, step)), values_batch(*values)


def main() -> None:
    """Do each job in a child, to its death or its end; say how each ended."""
    for target, *job in json.loads(sys.argv[1]):
        child = os.fork()
        if not child:
            work(target, *job)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def work(target: str, doing: str, point: str, when: str, times: int) -> None:
    manifest = Manifest(select="**", kinds=["output"])
    if doing == "goes on":
        die_at(point, when, times)
        DiskSink(target, manifest, resume=BACK_TO)
        return
    sink = DiskSink(target, manifest, pace=Pace(roll_bytes=40_000, shard_bytes=67_000))
    for step in range(STEPS):
        calls, values = rows_of(step)
        sink.write_tensor(f"t{step}", np.full(100, step, np.float32))
        sink.write_calls(calls)
        sink.write_values(values)
        sink.flush()
    if doing == "records":
        os._exit(9)
    manifest.steps = STEPS
    die_at(point, when, times)
    sink.close(manifest, modules_table())


Job = tuple[Path, str, str, str, int]


def died(jobs: list[Job]) -> list[bool]:
    """Say which of the processes died; the others ended well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-m", "tests.recording.test_killed_at_the_end", json.dumps(jobs, default=str)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    codes = [int(code) for code in done.stdout.split()]
    assert len(codes) == len(jobs) and set(codes) <= {0, 9}, done.stderr
    return [code == 9 for code in codes]


def assert_all_is_there(recording: th.Recording, steps: int) -> None:
    for table, batch in (("calls", 0), ("values", 1)):
        rows = recording.table(table).drop_columns(["rank"]).to_pylist()
        assert rows == [row for step in range(steps) for row in rows_of(step)[batch].to_pylist()]
        assert recording.query(f"select count(*) n from {table}").to_pylist() == [{"n": len(rows)}]
    for step in range(steps):
        assert recording.tensor(f"t{step}").tolist() == [step] * 100


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_wherever_it_dies(tmp_path: Path, point: str) -> None:
    jobs: list[Job] = [(tmp_path / f"{when}{times}.thk", "closes", point, when, times) for when, times in CASES]
    deaths = died(jobs)
    assert any(deaths)
    for (target, *_), dead in zip(jobs, deaths, strict=True):
        recording = th.open(target)
        assert_all_is_there(recording, STEPS)
        assert dead or recording.manifest.complete
        assert tenterhook("show", str(target), "--json").code == 0
        list(dump(target))
        again = Manifest(select="**", kinds=["output"])
        sink = DiskSink(target, again, resume=True)
        assert sink.resumed is not None
        assert sink.resumed.step == (STEPS if recording.manifest.complete else STEPS - 1)
        sink.close(again, modules_table())
        assert th.open(target).manifest.complete
        assert_all_is_there(th.open(target), sink.resumed.step)


GOING_ON = [
    "target.publish",
    "target.os.fsync",
    "resume.pq.write_table",
    "resume._cut_rows",
    "resume._trim_shards",
    "resume.finish_shard",
    "resume.trim_shard",
    "shards._write_all",
    "pathlib.Path.replace",
    "pathlib.Path.unlink",
    "pathlib.Path.write_bytes",
]


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("point", GOING_ON)
def test_wherever_it_dies_while_it_goes_on(tmp_path: Path, point: str, closed: bool) -> None:
    """It is to go back twelve steps, through several parts and shards."""
    written = tmp_path / "written.thk"
    died([(written, "closes" if closed else "records", "pathlib.Path.unlink", "before", 999)])
    jobs: list[Job] = [(tmp_path / f"{when}{times}.thk", "goes on", point, when, times) for when, times in CASES]
    for target, *_ in jobs:
        shutil.copytree(written, target)
    assert any(died(jobs)) or (point == "resume.finish_shard" and closed)  # no shard is growing there
    for target, *_ in jobs:
        left = th.open(target)
        steps = left.table("values")["step"].to_pylist()
        assert all(steps.count(step) == 2 for step in range(BACK_TO)), "whole steps were lost or doubled"
        assert all(left.tensor(f"t{step}").tolist() == [step] * 100 for step in range(BACK_TO))
        list(dump(target))
        again = Manifest(select="**", kinds=["output"])
        sink = DiskSink(target, again, resume=True)
        assert sink.resumed is not None and sink.resumed.step >= BACK_TO
        sink.close(again, modules_table())
        assert_all_is_there(th.open(target), sink.resumed.step)


if __name__ == "__main__":
    main()
