"""The MindSpore examples run on real digits, and say what they promise to say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import tenterhook as th

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: str, cwd: Path) -> str:
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


def test_the_jobs_for_hooks(tmp_path: Path) -> None:
    lines = [line.strip() for line in run(str(EXAMPLES / "mindspore_hooks.py"), cwd=tmp_path).splitlines()]
    assert lines[1:5] == [
        "fc1    gives (64, 32)", "relu   gives (64, 32)", "fc2    gives (64, 10)", "(root) gives (64, 10)",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[5:7]] == ["fc2", "fc1"]
    assert len(re.findall(r"0\.\d{5}", lines[7])) == 5
    assert lines[9].endswith("at most 0.01: True")
    assert [line.split()[-1] for line in lines[11:15]] == ["True", "False", "True", "False"]
    assert lines[16:] == [
        "missing: ['fc2.weight']  not asked for: ['head.weight']",
        "load_param_into_net returns: ['fc2.weight'] []",
        "hooks left on the model: 0",
    ]


def test_an_unmodified_training_script_is_recorded_and_learns(tmp_path: Path) -> None:
    out = run(
        "-m", "tenterhook", "record", "-q", "--to", "run.thk", str(EXAMPLES / "mindspore_digits.py"), "--epochs", "1",
        cwd=tmp_path,
    )  # fmt: skip
    (right,) = re.findall(r"epoch 0: loss \d\.\d+, (\d+\.\d)% of held-out digits right", out)
    assert float(right) > 30  # one in ten by chance
    rec = th.open(tmp_path / "run.thk")
    assert [model.name for model in rec.manifest.models] == ["Net", "CrossEntropyLoss"]
    assert rec.steps == list(range(22))
    assert rec.coverage.complete
    losses = rec.query(
        "select step, mean from values where model = 'CrossEntropyLoss' and kind = 'output' order by step"
    ).to_pylist()
    assert losses[-1]["mean"] < losses[0]["mean"]
