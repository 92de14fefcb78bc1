"""A training that was killed goes on from its checkpoint, and its recording with the numbers of its own steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import tenterhook as th
from tenterhook.errors import TargetError, TenterhookError
from tenterhook.recording import DiskSink, Manifest, resume
from tests.recording.resumed_training import REST_AFTER, train, training
from tests.recording.synthetic import modules_table

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("resumed_training.py")
NEVER = -1


def launch(target: Path, *, steps: int, save_every: int, every: int, hold_at: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    numbers = [str(number) for number in (steps, save_every, every, hold_at)]
    command = [sys.executable, str(PROGRAM), str(target), str(target.with_suffix(".pt")), *numbers]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


def signed(target: Path) -> int:
    """The step up to which the process has said that all is whole."""
    return json.loads((target / "rank-00000" / "claim.json").read_text())["steps"]


def killed_at(target: Path, step: int, *, save_every: int, every: int = 1, whole: int = 0) -> None:
    """Train until a step, and be killed in it, once the steps before another are on the disk."""
    with launch(target, steps=step + 1, save_every=save_every, every=every, hold_at=step) as process:
        assert process.stdout is not None and process.stdout.readline() == "holds\n"
        deadline = time.monotonic() + 30
        while signed(target) < whole and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)


def whole_until(target: Path) -> int:
    """The first step of which it is not known that it is whole: the last that has rows, or what the process has signed."""
    recording = th.open(target)
    reached = min(max(recording.table(table)["step"].to_pylist(), default=0) for table in ("calls", "values"))
    return max(reached, signed(target))


def finished(target: Path, steps: int, *, save_every: int, every: int = 1) -> th.Recording:
    with launch(target, steps=steps, save_every=save_every, every=every, hold_at=NEVER) as process:
        process.communicate()
        assert process.returncode == 0
    return th.open(target)


def uninterrupted(steps: int) -> list[list[list[float]]]:
    """The outputs of the first layer at each step."""
    model, optimizer = training()
    outputs: list[list[list[float]]] = []
    model[0].register_forward_hook(lambda module, args, output: outputs.append(output.tolist()))
    for step in range(steps):
        train(model, optimizer, step)
    return outputs


def assert_of_the_training(recording: th.Recording, steps: list[int]) -> None:
    """Each step that is recorded has what the training did at that very step, once."""
    outputs = recording["0"].outputs
    assert outputs.steps == recording.steps == steps
    expected = uninterrupted(steps[-1] + 1)
    assert [np.asarray(output).tolist() for output in outputs] == [expected[step] for step in steps]
    calls = [(call.step, call.phase) for call in recording.order() if call.path == "0"]
    assert sorted(calls) == [(step, phase) for step in steps for phase in ("backward", "forward")]
    numbers = [call.seq for call in recording.order()]
    assert len(set(numbers)) == len(numbers)
    keys: list[str] = []
    for shard in recording.path.rglob("*.safetensors"):
        with safe_open(shard, "numpy") as stored:
            keys += stored.keys()
    assert sorted(recording.table("values")["tensor"].drop_null().to_pylist()) == sorted(keys)
    assert {row["path"]: row["calls"] for row in recording.table("modules").to_pylist()}["0"] == len(steps)


@pytest.mark.parametrize("every", [1, 5])
def test_a_checkpoint_later_than_the_rows_leaves_a_gap_that_is_told(tmp_path: Path, every: int) -> None:
    """The last second of rows went with the process; the checkpoint of each step is on the disk."""
    target = tmp_path / "a.thk"
    killed_at(target, 31, save_every=1, every=every)
    whole = whole_until(target)
    assert whole >= REST_AFTER  # which were there when it rested
    recording = finished(target, 40, save_every=1, every=every)
    manifest = recording.manifest
    assert manifest.complete and manifest.resumed == [31] and manifest.steps == 40
    ((begin, end),) = manifest.gaps
    assert (begin, end) == (whole, 31)  # how far the kill let the last of them come is not known
    steps = [step for step in (*range(begin), *range(31, 40)) if step % every == 0]
    assert manifest.steps_recorded == len(steps)
    assert_of_the_training(recording, steps)
    assert f"steps {begin} to 30 are missing: the recording was gone on with at step 31" in str(recording.coverage)


@pytest.mark.parametrize("step", [32, 35])
def test_a_kill_between_samples_costs_no_sample(tmp_path: Path, step: int) -> None:
    """That the sample's step has ended is on the disk, though no row has come since."""
    target = tmp_path / "a.thk"
    killed_at(target, step, save_every=1, every=5, whole=34 if step == 35 else step)
    assert th.open(target).steps == list(range(0, step, 5))
    recording = finished(target, 42, save_every=1, every=5)
    # What is evaluated before step 35, which is recorded, would go with the one that has just ended.
    assert recording.manifest.gaps == ([(34, 35)] if step == 35 else [])
    assert_of_the_training(recording, [0, 5, 10, 15, 20, 25, 30, 35, 40])


def test_true_goes_on_behind_the_last_step_that_ended_and_not_at_the_last_sample(tmp_path: Path) -> None:
    target = tmp_path / "a.thk"
    killed_at(target, 34, save_every=100, every=5, whole=34)
    model, optimizer = training()
    options = {"tensors": "0", "kinds": ["output", "grad_output"], "every": 5, "resume": True}
    with th.record(model, "**", to=target, **options) as rec:  # type: ignore[arg-type]
        assert rec.resumed_from == 34
        for step in range(34, 37):
            train(model, optimizer, step)
    assert (rec.recording.steps, rec.recording.manifest.gaps) == ([0, 5, 10, 15, 20, 25, 30, 35], [])


def test_a_checkpoint_earlier_than_the_rows_has_their_steps_recorded_again(tmp_path: Path) -> None:
    target = tmp_path / "a.thk"
    killed_at(target, REST_AFTER + 1, save_every=8)
    assert th.open(target).steps == list(range(REST_AFTER + 1))
    recording = finished(target, 14, save_every=8)
    manifest = recording.manifest
    assert (manifest.resumed, manifest.gaps, manifest.steps, manifest.steps_recorded) == ([8], [], 14, 14)
    assert_of_the_training(recording, list(range(14)))


def test_killed_again_and_again_no_whole_step_is_lost(tmp_path: Path) -> None:
    """Killed before a row was written since: what was whole when it was gone on with stays."""
    target = tmp_path / "a.thk"
    killed_at(target, 31, save_every=1)
    begin = whole_until(target)
    for step in (32, 33):
        killed_at(target, step, save_every=1)
    recording = finished(target, 36, save_every=1)
    assert recording.manifest.resumed == [31, 32, 33]
    assert recording.manifest.gaps[0][0] == begin
    gap = {step for first, end in recording.manifest.gaps for step in range(first, end)}
    assert_of_the_training(recording, [step for step in range(36) if step not in gap])


def recorded(target: Path, begin: int, end: int, resume_: object, **options: object) -> th.Recorder:
    model, optimizer = training()
    with th.record(model, "0", to=target, tensors=True, resume=resume_, **options) as rec:  # type: ignore[arg-type]
        for step in range(begin, end):
            train(model, optimizer, step)
    return rec


def test_the_number_rules_whatever_is_there(tmp_path: Path) -> None:
    target = tmp_path / "a.thk"
    seen = []
    for begin, end in ((3, 5), (5, 7), (9, 10), (6, 7), (0, 2), (2, 3)):
        rec = recorded(target, begin, end, begin)
        assert rec.resumed_from == begin
        manifest = rec.recording.manifest
        seen.append((rec.recording.steps, manifest.gaps, manifest.steps, manifest.steps_recorded))
    assert seen == [
        ([3, 4], [(0, 3)], 5, 2),
        ([3, 4, 5, 6], [(0, 3)], 7, 4),
        ([3, 4, 5, 6, 9], [(0, 3), (7, 9)], 10, 5),
        ([3, 4, 5, 6], [(0, 3)], 7, 4),
        ([0, 1], [], 2, 2),
        ([0, 1, 2], [], 3, 3),
    ]
    assert th.open(target).manifest.resumed == [9, 6, 0]  # what followed on what was whole is no break


def test_true_closes_a_gap_since_which_nothing_has_come(tmp_path: Path) -> None:
    target = tmp_path / "a.thk"
    recorded(target, 0, 3, True)
    recorded(target, 6, 6, 6)
    assert th.open(target).manifest.gaps == [(3, 6)]
    rec = recorded(target, 3, 5, True)
    assert (rec.resumed_from, rec.recording.steps, rec.recording.manifest.gaps) == (3, [0, 1, 2, 3, 4], [])


def test_an_exception_between_samples_costs_no_sample(tmp_path: Path) -> None:
    target = tmp_path / "a.thk"
    model, optimizer = training()
    with pytest.raises(ValueError, match="bad batch"), th.record(model, "0", to=target, every=4):
        for step in range(7):
            train(model, optimizer, step)
        raise ValueError("bad batch")
    with th.record(model, "0", to=target, every=4, resume=6) as rec:
        for step in range(6, 9):
            train(model, optimizer, step)
    assert rec.recording.steps == [0, 4, 8] and rec.recording.manifest.gaps == []


def test_steps_that_are_asked_for_are_those_of_the_training(tmp_path: Path) -> None:
    target = tmp_path / "a.thk"
    recorded(target, 0, 4, 0, steps="1,3,8:10")
    rec = recorded(target, 7, 12, 7, steps="1,3,8:10")
    assert rec.recording.steps == [1, 3, 8, 9]
    assert np.array_equal(rec.recording["0"].outputs.steps, [1, 3, 8, 9])


@pytest.mark.parametrize("stop", ["_cut_rows", "_trim_shards", "_count_calls"])
def test_going_back_can_be_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str) -> None:
    """What is left then has no step that is not whole in the middle, and can be gone on with either way."""
    target = tmp_path / "a.thk"
    for begin in (0, 5, 10):  # three parts
        recorded(target, begin, begin + 5, begin)
    done = getattr(resume, stop)

    def interrupted(*arguments: object) -> object:
        done(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(resume, stop, interrupted)
        with pytest.raises(KeyboardInterrupt):
            recorded(target, 3, 4, 3)
    (target / "rank-00000" / "claim.json").unlink()  # of a process that is gone
    going_on = recorded(target, 3, 6, True)
    assert going_on.resumed_from == going_on.recording.steps[-1] - 2 >= 3
    assert going_on.recording.steps == list(range(going_on.resumed_from + 3))
    assert recorded(target, 3, 4, 3).recording.steps == [0, 1, 2, 3]


def test_each_rank_goes_on_at_the_number(tmp_path: Path) -> None:
    """Also a rank that had not begun."""
    target = tmp_path / "a.thk"
    for rank in (0, 1):
        manifest = Manifest(select="**", kinds=["output"], rank=rank, world=2)
        sink = DiskSink(target, manifest, rank=rank)
        if rank == 0:
            sink.close(manifest, modules_table())
        else:
            sink.abandon()
    for rank in (0, 1):
        manifest = Manifest(select="**", kinds=["output"], rank=rank, world=2)
        sink = DiskSink(target, manifest, rank=rank, resume=4)
        assert sink.resumed is not None and sink.resumed.step == 4
        assert manifest.gaps == [(0, 4)]
        sink.close(manifest, modules_table())
    assert th.open(target).manifest.complete


@pytest.mark.parametrize("step", [-1, "31", 31.0, None, np.bool_(True)])
def test_what_is_no_step_is_refused(tmp_path: Path, step: object) -> None:
    with pytest.raises(TenterhookError, match="resume="):
        th.record(training()[0], to=tmp_path / "a.thk", resume=step)  # type: ignore[arg-type]
    assert not (tmp_path / "a.thk").exists()


@pytest.mark.parametrize("options", [{}, {"to": "a.thk", "overwrite": True}], ids=["memory", "overwrite"])
@pytest.mark.parametrize("step", [0, 31, np.int64(3), torch.tensor(3)])
def test_a_number_needs_a_recording_on_disk_that_stays(step: object, options: dict[str, object]) -> None:
    with pytest.raises(TenterhookError, match="goes on with a recording on disk"):
        th.record(training()[0], resume=step, **options)  # type: ignore[arg-type]


def test_another_question_is_refused_with_a_number_too(tmp_path: Path) -> None:
    target = tmp_path / "a.thk"
    recorded(target, 0, 3, 0)
    with pytest.raises(TargetError, match="recorded with every=1, and now every=2"):
        recorded(target, 1, 2, 1, every=2)
    assert th.open(target).steps == [0, 1, 2]
