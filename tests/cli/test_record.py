"""``tenterhook record`` on real training scripts."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tenterhook.recording import find_recordings, open_recording
from tests.cli.programs import environment
from tests.cli.recorded import SCRIPT, record

WAIT = "import time; time.sleep(2.5)  # longer than rows wait to be written"


def test_the_way_from_a_script_to_its_order(folder: Path) -> None:
    done = record(folder, "train.py", "--lr", "3")
    assert (done.returncode, done.stdout) == (0, "done --lr 3\n")
    [path] = find_recordings(folder / "runs")
    assert path.name.startswith("train-")
    lines = done.stderr.splitlines()
    [verdict] = [line for line in lines if line.startswith("VERDICT")]
    assert f"writing runs/{path.name}" in lines
    assert verdict.startswith("VERDICT  recorded 4 steps, 5 modules, 40 calls, 40 values")
    assert verdict.endswith("complete")
    assert "5 of 6 selected modules fired; not seen, or not whole: aux (never called)" in " ".join(done.stderr.split())
    assert lines[-1] == f" next    tenterhook show runs/{path.name}"

    shown = subprocess.run(
        [sys.executable, "-m", "tenterhook", "show", "@0", "--json"],
        cwd=folder,
        capture_output=True,
        check=True,
        env=environment(),
    )
    data = json.loads(shown.stdout)["data"]
    assert [(row["phase"], row["path"]) for row in data["rows"]] == [
        *(("forward", path) for path in ("", "features", "features.0", "features.1", "head")),
        *(("backward", path) for path in ("", "head", "features", "features.1", "features.0")),
    ]
    assert data["manifest"]["argv"] == ["train.py", "--lr", "3"]


def test_options_reach_the_recorder(folder: Path) -> None:
    args = [
        "-o",
        "a.thk",
        "--select",
        "features.*",
        "--select",
        "!features.1",
        "--kinds",
        "output,input",
        "--stats",
        "none",
    ]
    done = record(
        folder,
        *args,
        "--no-sketch",
        "--every",
        "2",
        "--note",
        "two of four",
        "--tensors",
        "--log",
        "events.txt",
        "train.py",
    )
    assert done.returncode == 0, done.stderr
    found = open_recording(folder / "a.thk")
    values = found.table("values").to_pylist()
    assert {(row["path"], row["kind"]) for row in values} == {("features.0", "input"), ("features.0", "output")}
    assert {row["step"] for row in values} == {0, 2}
    assert "VERDICT  recorded 2 of 4 steps, 1 module" in done.stderr
    assert {row["mean"] for row in values} == {None}
    assert {row["sketch"] for row in values} == {None}
    assert found["features.0"].outputs[0].shape == (5, 8)
    assert found.manifest.note == "two of four"
    assert "features.0" in (folder / "events.txt").read_text()


def test_functions_and_rates_of_their_own(folder: Path) -> None:
    (folder / "train.py").write_text(
        SCRIPT.replace("self.head(self.features(x))", "self.head(self.features(x).tanh())")
    )
    args = ["--every", "3", "--every", "features.*=1", "--every", "nothing=2"]
    done = record(folder, "-o", "a.thk", "--ops", *args, "train.py")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    found = open_recording(folder / "a.thk")
    steps: dict[str, set[int]] = {}
    for row in found.table("calls").to_pylist():
        if row["phase"] == "forward":
            steps.setdefault(row["path"], set()).add(row["step"])
    third = {path: {0, 3} for path in ("", "features", "head", "(root)/tanh")}
    assert steps == {"features.0": {0, 1, 2, 3}, "features.1": {0, 1, 2, 3}, **third}
    assert "nothing (matches nothing; " in " ".join(done.stderr.split())


def test_a_step_with_many_forwards_is_told(folder: Path) -> None:
    (folder / "train.py").write_text(
        SCRIPT + "with torch.no_grad():\n    for _ in range(20):\n        model(torch.ones(5, 4))\n"
    )
    done = record(folder, "-o", "a.thk", "train.py")
    assert " steps   step 3 holds 21 forwards of Net: a step ends when an optimizer steps" in done.stderr


@pytest.mark.parametrize(
    ("start", "ending", "told"),
    [
        ("", "", True),
        ("", "sys.exit(2)", True),
        ("# --every", "", False),
        ("# --every", "sys.exit(2)", True),
        ("# --every", "sys.exit(1)", False),
    ],
    ids=["unknown", "unknown-refused", "known", "refused", "fails"],
)
def test_an_option_of_ours_after_the_script_is_the_scripts(folder: Path, start: str, ending: str, told: bool) -> None:
    (folder / "train.py").write_text(f"import sys\nprint(sys.argv[1:]) {start}\n{ending}\n")
    done = record(folder, "train.py", "--every=3", "--help")
    assert done.stdout == "['--every=3', '--help']\n"
    note = "note: --every after train.py is the script's own; options of tenterhook go before train.py\n"
    assert done.stderr.count("note:") == told
    assert (note in done.stderr) == told


def test_a_model_that_two_threads_call_first_is_one_model(folder: Path) -> None:
    (folder / "train.py").write_text(
        SCRIPT.partition("optimizer")[0]
        + """
import threading, time
class Slow(dict):  # to be looked through takes long, so that the other thread comes while it is
    def items(self):
        time.sleep(0.3)
        return super().items()
model._modules = Slow(model._modules)
ready = threading.Barrier(2)
threads = [threading.Thread(target=lambda: (ready.wait(), model(torch.ones(1, 4)))) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    )
    done = record(folder, "-o", "a.thk", "train.py")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    found = open_recording(folder / "a.thk")
    assert found.models == ["Net"]
    [roots] = found.query("select count(*) n, count(distinct thread) threads from calls where path = ''").to_pylist()
    assert roots == {"n": 2, "threads": 2}


def test_steps(folder: Path) -> None:
    done = record(folder, "-o", "a.thk", "--steps", "1:3", "train.py")
    assert "| steps 1:3 |" in " ".join(done.stderr.split())
    assert "every step" not in done.stderr
    assert open_recording(folder / "a.thk").steps == [1, 2]


def test_records_a_module(folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(SCRIPT)
    done = record(folder, "-m", "package.train", "-o", "x")
    assert (done.returncode, done.stdout) == (0, "done -o x\n")
    assert find_recordings(folder / "runs")[0].name.startswith("package.train-")


@pytest.mark.parametrize(
    ("ending", "code", "error"),
    [
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("sys.exit(3)", 3, "SystemExit: 3"),
        ("model(torch.ones(5, 3))", 1, "RuntimeError: mat1 and mat2 shapes"),
    ],
    ids=["raises", "exits", "in-model"],
)
def test_what_was_recorded_before_the_end_is_kept(folder: Path, ending: str, code: int, error: str) -> None:
    (folder / "train.py").write_text(SCRIPT + ending)
    done = record(folder, "-o", "a.thk", "train.py")
    assert done.returncode == code
    found = open_recording(folder / "a.thk")
    assert found.manifest.complete
    assert len(found.table("calls")) >= 32
    [verdict] = [line for line in done.stderr.splitlines() if line.startswith("VERDICT  recorded")]
    assert verdict.endswith("STOPPED")
    assert f" ended   by {error}" in done.stderr
    assert "the script's own" in " ".join(done.stderr.split())
    assert found.manifest.error is not None
    assert found.manifest.error.startswith(error)
    assert "tenterhook/cli" not in done.stderr


def test_an_error_in_a_model_is_told_by_show(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT + "model(torch.ones(5, 3))")
    record(folder, "-o", "a.thk", "train.py")
    shown = subprocess.run(
        [sys.executable, "-m", "tenterhook", "show", "a.thk"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    assert " raised  features.0#0@4: RuntimeError" in shown.stdout


def test_a_disk_that_fills_does_not_end_the_training(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT + WAIT + SCRIPT.replace("range(4)", "range(600)"))
    done = record(folder, "-o", "a.thk", "train.py", fsize=200_000)
    assert (done.returncode, done.stdout) == (0, "done\ndone\n")
    assert "PARTIAL" in done.stderr
    found = open_recording(folder / "a.thk")
    assert "File too large" in (found.manifest.partial or "")
    assert {0, 1, 2, 3} <= set(found.steps)


def test_quiet_says_nothing_when_all_is_well(folder: Path) -> None:
    done = record(folder, "-q", "train.py")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_summary_tells_of_numbers_that_are_not_finite(folder: Path) -> None:
    (folder / "train.py").write_text(
        SCRIPT.replace("torch.ones(5, 4)", "torch.full((5, 4), float('nan' if step == 3 else 1))")
    )
    done = record(folder, "-o", "a.thk", "train.py", COLUMNS="200")
    lines = done.stderr.splitlines()
    [verdict] = [line for line in lines if line.startswith("VERDICT")]
    assert " 40 values, 10 of them not finite " in verdict
    assert any(line.startswith(" first ! features.0:output#0@3 has 40 nan; ") for line in lines)
    assert " next    tenterhook show a.thk --step 3 --site features.0" in lines
    quiet = record(folder, "-q", "-o", "b.thk", "train.py").stderr.splitlines()
    assert quiet[0].startswith("tenterhook: first ! features.0:output#0@3 has 40 nan; ")
    assert quiet[1:] == ["  next tenterhook show b.thk --step 3 --site features.0"]


def test_the_summary_names_what_is_stuck_and_a_module_beside_the_script_is_not_taken_for_ours(folder: Path) -> None:
    (folder / "duckdb.py").write_text("print('imported')\n")
    (folder / "train.py").write_text(SCRIPT.replace("torch.ones(5, 4)", "torch.ones(5, 4)", 1).replace(
        "optimizer =", "nn.init.constant_(model.features[0].bias, -100)\noptimizer ="))  # fmt: skip
    done = record(folder, "-o", "a.thk", "train.py", COLUMNS="200")
    assert done.stdout == "done\n"
    assert " stuck ! 1 activation gives only zeros, in every call: features.1 (ReLU)" in done.stderr.splitlines()
    [verdict] = [line for line in done.stderr.splitlines() if line.startswith("VERDICT")]
    assert ", all finite" in verdict


def test_a_script_that_changes_directory_is_recorded_where_it_was_asked_for(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "train.py").write_text("import os\nos.chdir('elsewhere')\n" + SCRIPT)
    done = record(folder, "-o", "a.thk", "train.py")
    assert open_recording(folder / "a.thk").manifest.complete
    assert done.stderr.splitlines()[-1] == " next    tenterhook show a.thk"


def test_a_script_that_cannot_be_read(folder: Path) -> None:
    (folder / "train.py").write_bytes(b"\x7fELF\0\0")
    done = record(folder, "train.py")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "tenterhook: train.py is not a Python program")


def test_a_summary_that_nobody_reads_changes_nothing(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT + "sys.stdout.flush()\nimport os\nos.close(2)\n")
    done = record(folder, "-o", "a.thk", "train.py")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert open_recording(folder / "a.thk").manifest.complete


def test_steps_of_a_script_without_an_optimizer(folder: Path) -> None:
    (folder / "infer.py").write_text(
        SCRIPT.partition("optimizer")[0] + "for _ in range(4):\n    model(torch.ones(5, 4))\n"
    )
    record(folder, "-o", "a.thk", "--steps", "1:3", "infer.py")
    assert open_recording(folder / "a.thk").steps == [1, 2]


def test_a_file_beside_the_script_that_comes_too_late_is_told(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (folder / "random.py").write_text("")
    (folder / "mine.py").write_text("")
    command = (
        tmp_path_factory.mktemp("bin") / "tenterhook"
    )  # as installed: python -m would look in the folder first itself
    command.write_text("from tenterhook.cli import main\nmain()\n")
    done = subprocess.run(
        [sys.executable, str(command), "record", "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.stdout == "done\n"
    assert "note: random.py is beside the script" in done.stderr
    assert done.stderr.count("note:") == 1


def test_edits_that_a_script_makes_are_in_its_recording(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import torch, tenterhook as th
from torch import nn
def run():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for _ in range(3):
        with th.edit(net) as edit:
            edit.output("0", th.edits.scale(0.5), call=0)
            edit.output("0", th.edits.scale(0.5), call=0)
            net(torch.ones(1, 2))
run()  # the model is gone when the script ends
""")
    done = record(tmp_path, "-q", "--to", "run.thk", "train.py")
    assert done.returncode == 0, done.stderr
    one = {"kind": "output", "select": "0", "value": "scale(0.5)", "ran": 3, "call": [0]}
    assert open_recording(tmp_path / "run.thk").manifest.edits == [one, one]


def test_a_script_that_makes_its_model_into_a_torchscript_at_the_end(folder: Path) -> None:
    """The saved script is byte for byte that of a bare run, and nothing is said of it."""
    end = """
import warnings
warnings.simplefilter("ignore")
scripted = torch.jit.script(model)
torch.jit.save(scripted, sys.argv[1])
print(scripted(torch.ones(1, 4)).tolist() == model(torch.ones(1, 4)).tolist())
"""
    (folder / "export.py").write_text(SCRIPT + end)
    bare = subprocess.run(
        [sys.executable, "export.py", "bare.pt"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env=environment(PYTHONHASHSEED="0"),  # torch writes the names of a set in its order
    )
    done = record(folder, "export.py", "recorded.pt", PYTHONHASHSEED="0")
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, bare.stdout.splitlines()[1:])
    assert done.stdout.splitlines()[1:] == ["True"]
    with zipfile.ZipFile(folder / "bare.pt") as one, zipfile.ZipFile(folder / "recorded.pt") as other:
        for name in one.namelist():
            assert other.read(name.replace("bare", "recorded")) == one.read(name)
    [path] = find_recordings(folder / "runs")
    recording = open_recording(path)
    assert recording.manifest.partial is None
    assert len([call for call in recording.order() if call.path == "" and call.phase == "forward"]) == 5
