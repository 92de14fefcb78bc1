"""A loop that was killed goes on where it stopped: nothing twice, nothing left out."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import tenterhook as th
from tenterhook.errors import TargetError, TenterhookError
from tenterhook.recording import DiskSink, Manifest, Pace, resume
from tenterhook.recording.rows import RowWriter
from tests.recording.resumed_program import batch, net
from tests.recording.synthetic import call, calls_batch, modules_table, value, values_batch

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("resumed_program.py")
KILLS = int(os.environ.get("TENTERHOOK_KILLS", "8"))
INTERVAL, GRACE = 1.0, 0.5  # GRACE: a process may have been kept from the processor just before it was killed


def collect(
    model: nn.Module, target: Path, numbers: range, stop_at: int | None = None, **options: object
) -> th.Recorder:
    options = {"kinds": ["output"], "tensors": True, "stats": None, "resume": True, **options}
    with th.record(model, ["0"], to=target, **options) as rec, torch.no_grad():  # type: ignore[arg-type]
        for number in numbers:
            if number >= rec.resumed_from:
                if number == stop_at:
                    raise KeyboardInterrupt
                model(batch(number))
    return rec


def expected(batches: int) -> list[list[list[float]]]:
    layer = net()[0]
    with torch.no_grad():
        return [layer(batch(number)).tolist() for number in range(batches)]


def assert_whole(target: Path, batches: int) -> None:
    recording = th.open(target)
    outputs = recording["0"].outputs
    assert outputs.steps == list(range(batches))
    assert [np.asarray(output).tolist() for output in outputs] == expected(batches)
    calls = [call for call in recording.order() if call.path == "0"]
    assert [call.step for call in calls] == list(range(batches))
    assert len({call.seq for call in recording.order()}) == len(recording.order())
    starts = [call.start_ns for call in recording.order()]
    assert starts == sorted(starts)
    keys = []
    for shard in target.rglob("*.safetensors"):
        with safe_open(shard, "numpy") as stored:
            keys += stored.keys()
    named = recording.table("values")["tensor"].drop_null().to_pylist()
    assert sorted(named) == sorted(keys), "tensors are lost, doubled, or stored and named by no row"
    if recording.manifest.complete:
        rows = {row["path"]: row["calls"] for row in recording.table("modules").to_pylist()}
        assert rows["0"] == batches


def test_after_an_exception_the_loop_goes_on_from_the_step_it_was_in(tmp_path: Path) -> None:
    model, target = net(), tmp_path / "a.thk"
    with pytest.raises(KeyboardInterrupt):
        collect(model, target, range(10), stop_at=4)
    assert th.open(target).manifest.error == "KeyboardInterrupt"
    rec = collect(model, target, range(10))
    assert rec.resumed_from == 3  # how far the exception let step 3 come is not known, so it is done again
    assert_whole(target, 10)
    manifest = th.open(target).manifest
    assert manifest.complete and manifest.error is None and manifest.resumed == [3]


def left(folder: Path, batches: int) -> Path:
    """Leave a recording as a process does that is killed."""
    target, model = folder / "whole.thk", net()
    options = {"kinds": ["output"], "tensors": True, "stats": None}
    with th.record(model, ["0"], to=target, **options) as rec, torch.no_grad():  # type: ignore[arg-type]
        for number in range(batches):
            model(batch(number))
        rec._hand_over()
        rec._sink.flush()
        copy = shutil.copytree(target, folder / "killed.thk")
        (copy / "rank-00000" / "claim.json").unlink()  # its process is this one, which lives
    return copy


@pytest.mark.parametrize("stop", ["_cut_rows", "_trim_shards", "_count_calls"])
def test_going_on_can_be_interrupted_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str) -> None:
    target, model = left(tmp_path, 6), net()
    done = getattr(resume, stop)
    with monkeypatch.context() as patch:

        def interrupted(*arguments: object) -> object:
            done(*arguments)
            raise KeyboardInterrupt

        patch.setattr(resume, stop, interrupted)
        with pytest.raises(KeyboardInterrupt):
            collect(model, target, range(9))
    (target / "rank-00000" / "claim.json").unlink()
    assert not th.open(target).manifest.complete
    rec = collect(model, target, range(9))
    assert 0 < rec.resumed_from <= 5
    assert_whole(target, 9)


@pytest.mark.parametrize("orphans", [1, 4, 5, 11, 14])
def test_tensors_that_no_row_names_are_taken_away(tmp_path: Path, orphans: int) -> None:
    """Shards of four small tensors, of which the last have no row yet: the process was killed just then."""
    manifest = Manifest(select="**", kinds=["output"])
    sink = DiskSink(tmp_path / "a.thk", manifest, pace=Pace(shard_bytes=67_000))  # the room for a header, and a little
    for step in range(15):
        calls, values = (
            calls_batch(call(step * 2, step)),
            values_batch(value(step * 2 + 1, step * 2, step, tensor=f"{step}")),
        )
        sink.write_tensor(f"{step}", np.full(100, step, np.float32))
        if step < 15 - orphans:
            sink.write_calls(calls)
            sink.write_values(values)
        sink.flush()
    target = shutil.copytree(tmp_path / "a.thk", tmp_path / "killed.thk")
    sink.close(manifest, modules_table())
    (target / "rank-00000" / "claim.json").unlink()
    again = DiskSink(target, Manifest(select="**", kinds=["output"]), resume=True)
    assert again.resumed is not None and again.resumed.step == 14 - orphans
    kept = [f"{step}" for step in range(14 - orphans)]  # and the last step that has rows is done again
    keys = []
    for shard in sorted(target.rglob("*.safetensors")):
        with safe_open(shard, "numpy") as stored:
            keys += stored.keys()
            assert all((stored.get_tensor(key) == int(key)).all() for key in stored.keys())
    assert sorted(keys, key=int) == kept and not list(target.rglob("*.part")) and not list(target.rglob("*.tmp"))
    again.write_tensor("99", np.ones(3))
    again.close(Manifest(), modules_table())
    assert th.open(target).tensor("99").sum() == 3


def test_what_was_finished_is_added_to(tmp_path: Path) -> None:
    model, target = net(), tmp_path / "a.thk"
    assert collect(model, target, range(5)).resumed_from == 0
    assert collect(model, target, range(5)).resumed_from == 5
    assert_whole(target, 5)
    assert collect(model, target, range(8)).resumed_from == 5
    assert_whole(target, 8)


def test_each_time_that_it_had_ended_early_is_told_and_no_other(tmp_path: Path) -> None:
    """Killed twice, gone on with to the end, and added to: the second kill comes before anything was closed."""
    target, model = left(tmp_path, 4), net()
    options = {"kinds": ["output"], "tensors": True, "stats": None}
    with th.record(model, ["0"], to=target, resume=True, **options) as rec, torch.no_grad():  # type: ignore[arg-type]
        for number in range(3, 6):
            model(batch(number))
        rec._hand_over()
        rec._sink.flush()
        again = shutil.copytree(target, tmp_path / "again.thk")
        (again / "rank-00000" / "claim.json").unlink()
    assert collect(model, again, range(8)).resumed_from == 5
    assert collect(model, again, range(10)).resumed_from == 8
    assert th.open(again).manifest.resumed == [3, 5]
    assert_whole(again, 10)


def test_the_steps_that_are_recorded_are_counted_and_not_those_that_were_wanted(tmp_path: Path) -> None:
    model, target = net(), tmp_path / "a.thk"
    for resume_ in (False, True):
        with th.record(model, ["0"], kinds=["output"], to=target, resume=resume_) as rec:
            for number in range(4):
                if number == 2:
                    rec.pause()  # nothing of this step is recorded
                model(batch(number))
                rec.step()
                rec.resume()
    assert rec.recording.steps == [0, 1, 3, 4, 5, 7]
    assert (rec.recording.manifest.steps, rec.recording.manifest.steps_recorded) == (8, 6)


def test_what_a_full_disk_kept_out_is_recorded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, model = tmp_path / "a.thk", net()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch, th.record(model, ["0"], kinds=["output"], to=target) as rec, torch.no_grad():
        for number in range(8):
            model(batch(number))
            if number == 3:
                rec._hand_over()
                rec._sink.flush()
                patch.setattr(RowWriter, "append", full)
    assert rec.recording.manifest.partial == "writing stopped: No space left on device"
    with th.record(model, ["0"], kinds=["output"], to=target, resume=True) as rec, torch.no_grad():
        assert rec.resumed_from == 3
        for number in range(rec.resumed_from, 8):
            model(batch(number))
    manifest = th.open(target).manifest
    assert manifest.complete and manifest.partial is None and manifest.lost_rows == 0
    assert th.open(target).table("values")["step"].to_pylist() == list(range(8))


def test_resuming_needs_the_same_question(tmp_path: Path) -> None:
    model = net()
    collect(model, tmp_path / "a.thk", range(2))
    with pytest.raises(TargetError, match=r"recorded with kinds=\['output'\], and now kinds=\['input'\]"):
        collect(model, tmp_path / "a.thk", range(2), kinds=["input"])
    with pytest.raises(TenterhookError, match="give to="):
        th.record(model, resume=True)
    assert_whole(tmp_path / "a.thk", 2)


OTHERWISE: dict[str, dict[str, object]] = {
    "stats": {"stats": "basic"},
    "sketch": {"sketch": False},
    "every": {"every": 2},
    "steps": {"steps": "0:10"},
    "ops": {"ops": True},
    "recompute": {"recompute": True},
    "tensors_dtype": {"tensors_dtype": "float16"},
    "fused": {"fused": "keep"},
    "kinds": {"kinds": ["input"]},
    "tensors": {"tensors": False},
}


@pytest.mark.parametrize("field", OTHERWISE)
@pytest.mark.parametrize("killed", [True, False])
def test_what_was_asked_for_otherwise_is_named(tmp_path: Path, field: str, killed: bool) -> None:
    model, target = net(), tmp_path / "a.thk"
    target = left(tmp_path, 2) if killed else target
    if not killed:
        collect(model, target, range(2))
    with pytest.raises(TargetError, match=f"cannot be resumed: it was recorded with {field}="):
        collect(model, target, range(2), **OTHERWISE[field])
    assert collect(model, target, range(2)).resumed_from > 0  # note=, budget= and on_error= are free
    assert_whole(target, 2)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (nn.Sequential(nn.Linear(4, 6), nn.ReLU()), "model.modules=4, and now model.modules=3"),
        (type("Net", (nn.Sequential,), {})(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), "model.name=Sequential"),
        (type("Sequential", (nn.Sequential,), {"__module__": "mine"})(nn.Linear(4, 6)), "model.type=torch"),
    ],
    ids=["modules", "name", "type"],
)
def test_another_model_is_named(tmp_path: Path, other: nn.Module, field: str) -> None:
    target = left(tmp_path, 2)
    with pytest.raises(TargetError, match=f"cannot be resumed: it was recorded with {field}"):
        collect(other, target, range(2))


def test_who_writes_there_is_not_disturbed(tmp_path: Path) -> None:
    model = net()
    with th.record(model, "0", to=tmp_path / "a.thk"), pytest.raises(TargetError, match="is being written by process"):
        th.record(model, "0", to=tmp_path / "a.thk", resume=True).start()


def start(target: Path, batches: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(target), str(batches)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(max(1, KILLS // 4)))
def test_killed_four_times_and_gone_on_with(tmp_path: Path, number: int) -> None:
    chance, target, batches = random.Random(number), tmp_path / "a.thk", 100_000
    done = -1
    for _ in range(4):
        process = start(target, batches)
        assert process.stdout is not None
        word, resumed, _ = process.stdout.readline().split()
        assert word == "from" and int(resumed) >= done
        time.sleep(chance.uniform(0.1, 2.5))
        killed = time.time()
        process.send_signal(signal.SIGKILL)
        lines = [line.split() for line in process.stdout.readlines() if line.endswith("\n")]
        process.wait()
        process.stdout.close()
        due = [int(step) for step, when in lines if float(when) < killed - INTERVAL - GRACE]
        done = max(due, default=-1)
        recorded = [step for table in ("calls", "values") for step in th.open(target).table(table)["step"].to_pylist()]
        assert max(recorded, default=-1) >= done, "more was lost than the last interval"
    last = th.open(target).query("select max(step) s from calls").to_pylist()[0]["s"] or 0
    process = start(target, last + 20)
    process.communicate()
    assert process.returncode == 0
    assert_whole(target, last + 20)
