"""``tenterhook record`` of a script that was killed and goes on from its own checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenterhook.recording import open_recording
from tests.cli.recorded import record

TRAINING = """
import os, signal, sys, time, torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Sequential): pass
model = Net(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
begin = 0
if os.path.exists("net.pt"):
    saved = torch.load("net.pt")
    model.load_state_dict(saved["model"])
    begin = saved["step"]
for step in range(begin, 8):
    optimizer.zero_grad()
    model(torch.full((5, 4), float(step))).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "step": step + 1}, "net.pt")
    if begin == 0 and step == 2:
        time.sleep(2.5)  # rows wait a second to be written
    if begin == 0 and step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
print("done from", begin)
"""


@pytest.fixture
def killed(folder: Path) -> Path:
    """A recording of which the process was killed in step 5, with the checkpoint that says so."""
    (folder / "training.py").write_text(TRAINING)
    assert record(folder, "-o", "a.thk", "training.py").returncode == -9
    return folder / "a.thk"


def test_a_killed_run_is_gone_on_with_from_its_checkpoint(folder: Path, killed: Path) -> None:
    recording = open_recording(killed)
    reached = min(max(recording.table(table)["step"].to_pylist()) for table in ("calls", "values"))
    whole = max(reached, json.loads((killed / "rank-00000" / "claim.json").read_text())["steps"])
    files = {path: path.read_bytes() for path in killed.rglob("*") if path.is_file()}
    again = record(folder, "-o", "a.thk", "training.py")
    assert again.returncode == 2
    said = " ".join(again.stderr.split())
    assert f"a.thk is unfinished, it was killed in step {whole} or soon after" in said
    assert "'tenterhook show" in said and "--resume STEP" in said and "--overwrite" not in said
    assert {path: path.read_bytes() for path in killed.rglob("*") if path.is_file()} == files

    done = record(folder, "-o", "a.thk", "--resume", "5", "training.py")
    assert (done.returncode, done.stdout) == (0, "done from 5\n")
    recording = open_recording(killed)
    kept = list(range(whole))  # how far the kill let the last of them come is not known
    assert recording.steps == [*kept, 5, 6, 7]
    manifest = recording.manifest
    assert (manifest.complete, manifest.resumed, manifest.gaps) == (True, [5], [(whole, 5)] if whole < 5 else [])
    assert (manifest.steps, manifest.steps_recorded) == (8, len(kept) + 3)
    calls = [(call.step, call.phase) for call in recording.order() if call.path == "2"]
    assert sorted(calls) == [(step, phase) for step in recording.steps for phase in ("backward", "forward")]
    rows = {row["path"]: row["calls"] for row in recording.table("modules").to_pylist()}
    assert rows["2"] == len(recording.steps)
    assert f"{len(kept) + 3} of 8 steps" in done.stderr and "gone on with at step 5" in " ".join(done.stderr.split())


def test_a_step_that_was_recorded_is_done_again(folder: Path, killed: Path) -> None:
    done = record(folder, "-o", "a.thk", "--resume", "1", "training.py")
    assert done.returncode == 0
    assert open_recording(killed).steps == [
        0,
        1,
        2,
        3,
    ]  # the script does three steps, which are 1 to 3 by its user's word


@pytest.mark.parametrize("args", [["--resume", "3"], ["--resume", "3", "-o", "a.thk", "--overwrite"]])
def test_it_needs_a_recording_that_stays(folder: Path, args: list[str]) -> None:
    done = record(folder, *args, "train.py")
    assert done.returncode == 2 and "--resume goes on with a recording that is there" in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["-1", "train.py"],
        ["train.py"],
        ["train.py", "5"],
        ["train.py", "--ckpt", "5.pt"],
        ["train.py", "--ckpt=5.pt", "-x"],
        ["--every", "5", "train.py"],
    ],
    ids=" ".join,
)
def test_it_needs_the_number_of_a_step(folder: Path, args: list[str]) -> None:
    done = record(folder, "-o", "a.thk", "--resume", *args)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"tenterhook: --resume needs the number of the step that the script does first, not '{args[0]}'"
    )


def test_an_option_that_is_not_there_is_named_also_where_a_script_has_resume(folder: Path) -> None:
    done = record(folder, "--ckpt", "train.py", "--resume", "last")
    assert done.returncode == 2 and "--ckpt" in done.stderr and "number of the step" not in done.stderr
    done = record(folder, "-o", "a.thk", "--resume", "5", "--ckpt", "train.py", "--resume", "last")
    assert done.returncode == 2 and "--ckpt" in done.stderr and "number of the step" not in done.stderr


def test_a_run_that_an_exception_ended_is_not_offered_for_deletion(folder: Path) -> None:
    (folder / "fails.py").write_text(
        TRAINING.replace("os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('bad')")
    )
    assert record(folder, "-o", "a.thk", "fails.py").returncode == 1
    said = " ".join(record(folder, "-o", "a.thk", "fails.py").stderr.split())
    assert "a.thk ended early, by ValueError: bad" in said and "--resume STEP" in said and "--overwrite" not in said
    assert record(folder, "-o", "a.thk", "--resume", "5", "fails.py").returncode == 0
    assert open_recording(folder / "a.thk").manifest.error is None


TWO_MODELS = """
import os, signal, sys, time, torch
from torch import nn
class Encoder(nn.Sequential): pass
class Head(nn.Sequential): pass
encoder, head = Encoder(nn.Linear(4, 4), nn.ReLU()), Head(nn.Linear(4, 2), nn.Linear(2, 1))
begin = int(sys.argv[1])
with torch.no_grad():
    for step in range(begin, begin + 4):
        if step < 4:
            encoder(torch.ones(2, 4))
        head(torch.ones(2, 4))
    if {killed}:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("killed", [True, False])
def test_a_model_that_is_not_called_again_is_listed(folder: Path, killed: bool) -> None:
    for begin in (0, 8, 12):
        (folder / "two.py").write_text(TWO_MODELS.format(killed=killed and begin < 12))
        resume = ["--resume", str(begin)] if begin else []
        done = record(folder, "-o", "a.thk", "--kinds", "output", *resume, "two.py", str(begin))
        assert done.returncode == (-9 if killed and begin < 12 else 0), done.stderr
        recording = open_recording(folder / "a.thk")
        assert recording.models == ["Encoder", "Head"] and recording.manifest.framework == "torch"
        assert {(model.name, model.parameters) for model in recording.manifest.models} == {
            ("Encoder", 20),
            ("Head", 13),
        }
    rows = {(row["model"], row["path"]): row for row in recording.table("modules").to_pylist()}
    assert list(rows) == [
        ("Head", ""), ("Head", "0"), ("Head", "1"), ("Encoder", ""), ("Encoder", "0"), ("Encoder", "1"),
    ]  # fmt: skip
    made = {place: row["calls"] for place, row in rows.items()}
    seen = recording.query("select model, path, count(*) n from calls group by all").to_pylist()
    assert made == {(row["model"], row["path"]): row["n"] for row in seen}
    encoder = rows["Encoder", "0"]
    assert (encoder["type"], encoder["selected"], encoder["reason"]) == ("Linear", True, None)
    assert encoder["parameters"] == (None if killed else 20)
    assert recording.coverage.complete and len(recording.coverage.fired) == 6
    assert recording["Encoder/0"].calls[0].step == 0


def test_what_is_taken_out_altogether_is_not_listed(folder: Path) -> None:
    """Gone back behind the first call of a model."""
    (folder / "two.py").write_text(TWO_MODELS.format(killed=False).replace("step < 4", "2 <= step < 4"))
    assert record(folder, "-o", "a.thk", "two.py", "0").returncode == 0
    assert open_recording(folder / "a.thk").models == ["Encoder", "Head"]
    (folder / "two.py").write_text(TWO_MODELS.format(killed=False).replace("step < 4", "False"))
    assert record(folder, "-o", "a.thk", "--resume", "1", "two.py", "1").returncode == 0
    recording = open_recording(folder / "a.thk")
    assert recording.models == ["Head"] and [model.name for model in recording.manifest.models] == ["Head"]
