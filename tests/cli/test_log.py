"""The text log of a run: a line per event, there as it happens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cli.programs import environment
from tests.cli.recorded import record

ABORTS = """
import os, torch
from torch import nn
class Bad(nn.Module):
    def forward(self, x):
        os.abort()
class Net(nn.Sequential):
    pass
Net(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), Bad()))(torch.ones(1, 2))
"""
SLOW = """
import sys, time, torch
from torch import nn
class Net(nn.Sequential):
    pass
net = Net(nn.Linear(2, 3))
for step in range(2):
    net(torch.ones(1, 2)).sum().backward()
    if len(sys.argv) > 1:
        print(step, flush=True)
        sys.stdin.readline()
"""


def words(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()]


def test_the_last_line_says_where_a_process_died(folder: Path) -> None:
    (folder / "aborts.py").write_text(ABORTS)
    assert record(folder, "-o", "a.thk", "--log", "events.txt", "aborts.py").returncode == -6
    lines = words(folder / "events.txt")
    assert lines[-1] == ["step", "0", "forward", "start", "Net/1.1#0", "Bad"]
    ended = [line[4] for line in lines if line[3] == "end"]
    assert ended == ["Net/0#0", "Net/1.0#0"]
    assert ["step", "0", "forward", "value", "Net/0:output#0", "(1,", "3)", "float32"] in lines


def test_a_line_is_there_as_soon_as_it_happens(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "tenterhook", "record", "-o", "a.thk", "--log", "events.txt", "slow.py", "ask"]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for step in range(2):
            assert process.stdout.readline() == f"{step}\n"
            lines = words(folder / "events.txt")
            gradients = [line[1] for line in lines if line[2:5] == ["backward", "value", "Net/0:grad_output#0"]]
            assert gradients == [str(number) for number in range(step + 1)]
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0


def test_each_of_several_processes_has_its_own(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "tenterhook", "record", "-o", "a.thk", "--log", "logs/events.txt", "slow.py"]
    started = [
        subprocess.Popen(
            command, cwd=folder, env=environment(RANK=str(rank), WORLD_SIZE="2"), stderr=subprocess.DEVNULL
        )
        for rank in (0, 1)
    ]
    assert [process.wait(120) for process in started] == [0, 0]
    logs = sorted((folder / "logs").iterdir())
    assert [path.name for path in logs] == ["events-rank-00000.txt", "events-rank-00001.txt"]
    first, second = map(words, logs)
    assert first == second and [line[3] for line in first].count("start") == 4


def test_what_goes_on_adds_to_it(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW)
    options = ["-o", "a.thk", "--log", "events.txt"]
    assert record(folder, *options, "slow.py").returncode == 0
    before = words(folder / "events.txt")
    assert record(folder, *options, "--resume", "1", "slow.py").returncode == 0
    after = words(folder / "events.txt")
    assert after[: len(before)] == before
    assert [int(line[1]) for line in after[len(before) :]] == [int(line[1]) + 1 for line in before]


def test_what_torchrun_starts_again_does_not_overwrite_it(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW)
    options = ["-o", "a.thk", "--log", "events.txt"]
    assert record(folder, *options, "slow.py").returncode == 0
    before = (folder / "events.txt").read_text()
    assert record(folder, *options, "slow.py", TORCHELASTIC_RESTART_COUNT="1").returncode == 0
    assert (folder / "events.txt").read_text() == before == (folder / "events-restart1.txt").read_text()
