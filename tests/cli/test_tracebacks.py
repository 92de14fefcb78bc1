"""Tracebacks of a recorded script are those of the bare script, to the letter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.programs import environment

pytest.importorskip("torch")

NET = """
import torch
from torch import nn

class Inner(nn.Module):
    def forward(self, x):
        return x @ torch.ones(7, 7)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.seq = nn.Sequential(nn.Linear(3, 3), Inner())

    def forward(self, x, safe=False):
        try:
            return self.seq(x)
        except RuntimeError as error:
            if safe:
                return x
            raise ValueError("wrapped") from error

net = Net()
x = torch.ones(2, 3)
"""

PROGRAMS = {
    "inside two modules, chained": "net(x)",
    "in a backward pass": "y = nn.Linear(3, 1)(x).sum(); y.backward(); y.backward()",
    "in the user's own hook": "net.seq[0].register_forward_hook(lambda *a: 1 / 0); net(x)",
    "under the user's own hook": "net.register_forward_hook(lambda *a: None); net(x)",
    "under a backward hook": "net.seq.register_full_backward_hook(lambda *a: None); net(x)",
    "after one that was caught": "net(x, safe=True); {}['missing']",
    "while another is handled": "try:\n    {}['missing']\nexcept KeyError:\n    net(x)",
    "in a loss": "nn.CrossEntropyLoss()(x, torch.tensor([9, 9]))",
    "by an interrupt": "class Stop(nn.Module):\n    def forward(self, x): raise KeyboardInterrupt\nnn.Sequential(Stop())(x)",
}


def both_ways(folder: Path, program: str) -> list[tuple[int, str, str]]:
    """Run a program bare and recorded; gives the exit code and both streams of each."""
    (folder / "train.py").write_text(NET + program + "\n")
    ends = []
    for command in ([], ["-m", "tenterhook", "record", "-q", "--to", str(folder / "run.thk")]):
        done = subprocess.run(
            [sys.executable, *command, "train.py"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
        )
        ends.append((done.returncode, done.stdout, done.stderr))
    return ends


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_traceback_is_that_of_the_bare_script(program: str, tmp_path: Path) -> None:
    bare, recorded = both_ways(tmp_path, program)
    assert bare[0] != 0
    assert recorded == bare


def test_traceback_of_a_thread_is_that_of_the_bare_script(tmp_path: Path) -> None:
    bare, recorded = both_ways(
        tmp_path,
        "import threading\n"
        "for run in (lambda: net(x), lambda: {}['missing']):\n"
        "    thread = threading.Thread(target=run, name='T')\n"
        "    thread.start()\n"
        "    thread.join()",
    )
    assert bare[0] == 0
    assert bare[2].count("Exception in thread T") == 2
    assert recorded == bare
