"""The examples run, and say what they promise to say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

pytest.importorskip("torch")

MODULES = ["(root)", "conv1", "conv2", "dropout1", "fc1", "dropout2", "fc2"]
BACKWARD = ["(root)", "fc2", "dropout2", "fc1", "dropout1", "conv2", "conv1"]


def _run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_alexnet_shows_inputs_outputs_and_gradients_of_chosen_layers(tmp_path: Path) -> None:
    lines = _run(str(EXAMPLES / "alexnet_hooks.py"), cwd=tmp_path).splitlines()
    assert lines[:3] == [
        "features.11  in (2, 256, 13, 13)  out (2, 256, 13, 13)  gradient (2, 256, 13, 13)",
        "features.12  in (2, 256, 13, 13)  out (2, 256, 6, 6)  gradient (2, 256, 6, 6)",
        "features     in (2, 3, 224, 224)  out (2, 256, 6, 6)  gradient (2, 256, 6, 6)",
    ]
    assert lines[3].endswith("True") and lines[4].endswith("True")
    assert lines[5] == "gradients came in the order ['features', 'features.12', 'features.11']"
    assert lines[6] == "the monitor saw [(2, 256, 13, 13), (2, 256, 6, 6), (2, 256, 6, 6)]"
    assert lines[7].endswith("True")
    assert lines[8].startswith("gradient of y: 0.8243")  # d sqrt(exp(y)) / dy at 1
    assert lines[9] == "gradient of x, ten times what it was: tensor([16.4872])"


def test_mnist_runs_in_the_order_of_its_layers_and_back(tmp_path: Path) -> None:
    lines = _run(str(EXAMPLES / "mnist_order.py"), cwd=tmp_path).splitlines()
    order = [re.match(r"\[(\w+)\] (\S+)", line).groups() for line in lines[:-1]]  # type: ignore[union-attr]
    assert order == [*(("forward", name) for name in MODULES), *(("backward", name) for name in BACKWARD)]
    assert lines[-1] == "... and the same in each of 3 steps"


def test_mnist_order_in_the_log_file_of_an_unmodified_script(tmp_path: Path) -> None:
    log = tmp_path / "order.log"
    options = ["--to", "mnist.thk", "--log", str(log), "-q"]
    out = _run("-m", "tenterhook", "record", *options, str(EXAMPLES / "mnist_order.py"), "--plain", cwd=tmp_path)
    assert out == ""
    events = [line.split() for line in log.read_text().splitlines()]
    for step in range(3):
        mine = [event for event in events if event[1] == str(step)]
        starts = [event[4] for event in mine if event[3] == "start"]
        gradients = [event[4] for event in mine if event[2] == "backward"]
        assert starts == [f"Net/{name}#0" for name in MODULES]
        assert gradients == [f"Net/{name}:grad_output#0" for name in BACKWARD]


def test_digits_is_recorded_as_it_stands(tmp_path: Path) -> None:
    script = str(EXAMPLES / "digits.py")
    bare = _run(script, "--epochs", "1", cwd=tmp_path)
    recorded = _run("-m", "tenterhook", "record", "--to", "digits.thk", script, "--epochs", "1", cwd=tmp_path)
    assert recorded == bare
    shown = _run("-m", "tenterhook", "show", "digits.thk", cwd=tmp_path)
    assert "23 steps" in shown and "all finite" in shown and "complete" in shown
    for name in ("features Sequential", "1 ReLU", "dropout Dropout", "NLLLoss"):
        assert name in shown


def test_features_are_stored_once_and_trained_on(tmp_path: Path) -> None:
    lines = _run(str(EXAMPLES / "features_to_disk.py"), "features.thk", cwd=tmp_path).splitlines()
    assert lines[:1] == ["storing from batch 0 on"]
    assert lines[1].startswith("1797 features of fc1 in ")
    assert float(re.search(r"gets ([\d.]+)%", lines[2])[1]) > 80  # type: ignore[index]
    again = _run(str(EXAMPLES / "features_to_disk.py"), "features.thk", cwd=tmp_path).splitlines()
    assert again == ["storing from batch 29 on", *lines[1:]]


def test_clipping_rescues_a_run_that_diverges(tmp_path: Path) -> None:
    lines = _run(str(EXAMPLES / "clip_gradients.py"), "--epochs", "3", cwd=tmp_path).splitlines()
    assert re.fullmatch(r"no clipping +last loss +nan  accuracy 0\.0\d+", lines[0])
    found = re.fullmatch(r"clip_norm\(0\.1\) +last loss +[\d.]+  accuracy (0\.\d+)", lines[1])
    assert found and float(found[1]) > 0.5
    assert [line.split()[-1] for line in lines[4:]] == ["90"] * 6


@pytest.mark.slow
def test_patching_shows_where_the_answer_travels(tmp_path: Path) -> None:
    lines = _run(str(EXAMPLES / "patch_transformer.py"), cwd=tmp_path).splitlines()
    found = {line[:30].strip(): float(line.split()[-3]) for line in lines[:7]}  # accuracies
    assert found.pop("as trained") > 0.99
    both = found.pop("block 1 without head 0 and 1")
    assert both < 0.9 and min(found.values()) > 0.99  # either head of block 1 does for both, neither does not
    exact = lines[7:12]
    assert exact[0].split() == ["012345678"]
    assert exact[1].endswith("100% at 4")  # the digit that differs
    assert exact[3].endswith("100% at 8")  # where it is read
    assert lines[-1].startswith("estimated by gradient; metric: corrupt -")
