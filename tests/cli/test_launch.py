"""``tenterhook record -- torchrun ...``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tenterhook.cli import launch
from tenterhook.cli.record import command as record_command
from tenterhook.recording import open_recording
from tests.cli.commands import tenterhook
from tests.cli.programs import environment

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    model(torch.ones(5, 4)).square().mean().backward()
    optimizer.step()
sys.stdout.write(f"rank {dist.get_rank()} {sys.argv[1:]}\\n")
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["train.py"], ["-m", "tenterhook", "record", "-q", "train.py"]),
        (
            ["--standalone", "--nproc-per-node", "2", "train.py", "-m", "x", "other.py"],
            [
                "--standalone",
                "--nproc-per-node",
                "2",
                "-m",
                "tenterhook",
                "record",
                "-q",
                "train.py",
                "-m",
                "x",
                "other.py",
            ],
        ),
        (
            ["--nproc-per-node=2", "-m", "package.train", "--lr", "3"],
            ["--nproc-per-node=2", "-m", "tenterhook", "record", "-q", "-m", "package.train", "--lr", "3"],
        ),
    ],
    ids=["script", "options", "module"],
)
def test_we_stand_between_the_launcher_and_the_script(
    monkeypatch: pytest.MonkeyPatch, command: list[str], expected: list[str]
) -> None:
    monkeypatch.setattr(launch.shutil, "which", lambda name: name)
    assert launch.with_us_between(["torchrun", *command], ["-q"]) == ["torchrun", *expected]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--", "torchrun"], "no script is named for torchrun"),
        (["--", "torchrun", "--nproc-per-node", "2"], "no script is named for torchrun"),
        (["--", "torchrun", "nothing.py"], "there is no script 'nothing.py'"),
        (["--", "torchrun", "--no-python", "train.py"], "with --no-python torchrun starts no script"),
        (["--", "torchrun", "--nnodes", "2", "train.py"], "each of several nodes would find a name of its own"),
        (["torchrun", "train.py"], "there is no script 'torchrun'"),
        (["--", "mpirun", "python", "train.py"], "'mpirun' is a command"),
        (["--", sys.executable, "-m", "torch.distributed.run", "train.py"], f"'{sys.executable}' is a command"),
        ([sys.executable, "train.py"], f"'{sys.executable}' is a command"),
    ],
)
def test_what_cannot_be_launched(monkeypatch: pytest.MonkeyPatch, args: list[str], words: str) -> None:
    monkeypatch.setattr(launch.shutil, "which", lambda name: name)
    result = tenterhook("record", *args)
    assert result.code == 2
    assert result.err.startswith(f"tenterhook: {words}")
    assert len(result.err.splitlines()) <= 3
    if "is a command" in words:
        assert (
            "tenterhook record SCRIPT ARGS" in result.err and "tenterhook record -- torchrun ARGS SCRIPT" in result.err
        )


def test_a_launcher_that_is_not_installed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(here / "python"))
    assert "there is no command 'torchrun' here" in tenterhook("record", "--", "torchrun", "train.py").err


def test_a_launcher_beside_the_interpreter_is_found(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "torchrun").write_text("#!/bin/sh\n")
    (here / "torchrun").chmod(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(here / "python"))
    assert launch.with_us_between(["torchrun", "train.py"], [])[0] == str(here / "torchrun")


def test_the_first_rank_tells_of_the_numbers_of_all(here: Path) -> None:
    (here / "train.py").write_text(
        SCRIPT.replace("torch.ones(5, 4)", "torch.full((5, 4), float('inf') if dist.get_rank() and step == 2 else 1.0)")
    )
    (here / "torchrun").write_text(f"#!{sys.executable}\nfrom torch.distributed.run import main\nmain()\n")
    (here / "torchrun").chmod(0o755)
    ours = [sys.executable, "-m", "tenterhook", "record", "--to", "a.thk", "--"]
    done = subprocess.run(
        [*ours, str(here / "torchrun"), "--standalone", "--nproc-per-node", "2", "train.py"],
        capture_output=True, text=True, check=True, env=environment(COLUMNS="300"), timeout=240,
    )  # fmt: skip
    [verdict] = [line for line in done.stderr.splitlines() if line.startswith("VERDICT")]
    first = next(line for line in done.stderr.splitlines() if " first ! " in line)
    assert "; in all ranks " in verdict and " of them not finite" in verdict
    assert " of rank 1 has " in first and "@2 " in first


def test_the_place_is_found_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.shutil, "which", lambda name: name)
    found = record_command.main(["--every", "2", "--", "torchrun", "train.py"], standalone_mode=False)
    words = found.options["command"]
    assert words[:7] == ["torchrun", "-m", "tenterhook", "record", "--every", "2", "--to"]
    assert words[7].startswith("runs/train-")
    assert words[8:] == ["train.py"]


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("sys.exit(3)", 1)], ids=["ends", "fails"])
def test_all_processes_are_recorded_and_one_speaks(here: Path, ending: str, code: int) -> None:
    pytest.importorskip("torch")
    (here / "train.py").write_text(SCRIPT + ending)
    (here / "torchrun").write_text(f"#!{sys.executable}\nfrom torch.distributed.run import main\nmain()\n")
    (here / "torchrun").chmod(0o755)
    ours = [sys.executable, "-m", "tenterhook", "record", "--to", "a.thk", "--every", "2", "--"]
    done = subprocess.run(
        [*ours, str(here / "torchrun"), "--standalone", "--nproc-per-node", "2", "train.py", "--lr", "3"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=240,
    )
    assert done.returncode == code, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 ['--lr', '3']", "rank 1 ['--lr', '3']"]
    assert done.stderr.count("writing a.thk") == done.stderr.count("VERDICT  recorded 2 of 4 steps") == 1
    assert "tenterhook, rank 0 of 2 ---" in done.stderr
    assert " ranks   2 write into this recording" in done.stderr
    told = [" ".join(line.split()) for line in done.stderr.splitlines() if line.startswith("tenterhook, rank 1")]
    failed = (
        "tenterhook, rank 1 of 2: train.py ended by SystemExit: 3, its own; until then: tenterhook show a.thk --rank 1"
    )
    assert told in ([failed], [])  # torchrun ends the others as soon as one has failed
    assert (failed in told or "SystemExit: 3, the script's own" in done.stderr) == bool(code)
    assert ('torchrun writes "tenterhook FAILED" of that' in " ".join(done.stderr.split())) == bool(code)
    found = open_recording(here / "a.thk")
    assert found.ranks == [0, 1]
    assert found.steps == [0, 2]
    assert found.manifest.argv == ["train.py", "--lr", "3"]
