"""Exit codes, messages, help, and how little is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from syrupy.assertion import SnapshotAssertion

from tenterhook import __version__, errors
from tenterhook.cli import COMMANDS, EXIT_CODES
from tests.cli.commands import tenterhook
from tests.cli.programs import environment
from tests.cli.recordings import write_net

HEAVY = ("torch", "mindspore", "duckdb", "tenterhook.script_recorder")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SelectionError, 4),
        (errors.NotRecordedError, 4),
        (errors.TargetError, 2),
        (errors.RecordingError, 3),
        (errors.NotComparableError, 3),
        (errors.AmbiguousError, 2),
        (errors.HookError, 2),
        (errors.UnsupportedError, 2),
        (errors.EditError, 2),
        (errors.MissingExtraError, 2),
        (errors.TenterhookError, 2),
        (click.UsageError, 2),
        (KeyboardInterrupt, 130),
    ],
)
def test_exit_code_of_each_error(error: type[BaseException], code: int) -> None:
    assert next(number for kind, number in EXIT_CODES if issubclass(error, kind)) == code


def test_every_error_of_ours_has_an_exit_code() -> None:
    ours = [error for name in errors.__all__ if issubclass(error := getattr(errors, name), errors.TenterhookError)]
    assert ours
    assert all(any(issubclass(error, kind) for kind, _ in EXIT_CODES) for error in ours)


SITUATIONS = {
    "no-such-command": (["recrod"], 2),
    "no-such-option": (["show", "@0", "--setp", "3"], 2),
    "no-recording-named": (["show"], 3),
    "step-x": (["show", "--step", "x"], 2),
    "limit-minus": (["show", "--limit", "-3"], 2),
    "no-recording-here": (["show", "@0"], 3),
    "no-such-recording": (["show", "nothing.thk"], 3),
    "not-a-recording": (["show", "plain"], 3),
    "a-file": (["show", "train.py"], 3),
    "no-target": (["record"], 2),
    "no-such-script": (["record", "trian.py"], 2),
    "no-such-folder": (["record", "there/train.py"], 2),
    "empty-folder": (["record", "plain"], 2),
    "no-such-module": (["record", "-m", "trian"], 2),
    "script-as-module": (["record", "-m", "train.py"], 2),
    "python-named": (["record", "python", "train.py"], 2),
    "standard-input": (["record", "-"], 2),
    "a-command": (["record", "--", "mpirun", "python", "train.py"], 2),
    "every-a": (["record", "--every", "a", "train.py"], 2),
    "every-twice": (["record", "--every", "2", "--every", "3", "train.py"], 2),
    "every-pattern": (["record", "--every", "re:(=3", "train.py"], 2),
    "select-regex": (["record", "--select", "re:(", "train.py"], 2),
    "select-empty": (["record", "--select", "", "train.py"], 2),
    "select-item": (["record", "--select", "a,,b", "train.py"], 2),
    "select-type": (["record", "--select", "type:", "train.py"], 2),
    "select-bracket": (["record", "--select", "a[", "train.py"], 2),
    "site-kind": (["show", "--site", "fc:ouput", "plain"], 2),
    "site-regex": (["show", "--site", "re:(", "plain"], 2),
    "site-empty": (["show", "--site", "", "plain"], 2),
    "to-here": (["record", "--to", ".", "train.py"], 2),
    "every-0": (["record", "--every", "0", "train.py"], 2),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_bad_input_is_told_in_at_most_three_lines(here: Path, snapshot: SnapshotAssertion, name: str) -> None:
    (here / "train.py").write_text("print('must not run')")
    (here / "plain").mkdir()
    args, code = SITUATIONS[name]
    result = tenterhook(*args)
    assert result.code == code
    assert result.out == ""
    lines = result.err.splitlines()
    assert lines[0].startswith("tenterhook: ")
    assert all(line.startswith("  ") for line in lines[1:])
    assert len(lines) <= 3
    assert result.err.replace(str(here), "HERE") == snapshot


def test_what_does_not_match_gives_4_and_the_nearest(here: Path) -> None:
    write_net(here / "a.thk")
    result = tenterhook("show", "a", "--site", "featuers.*")
    assert result.code == 4
    assert "features" in result.err


def test_a_step_that_was_not_recorded(here: Path) -> None:
    write_net(here / "a.thk")
    result = tenterhook("show", "a", "--step", "7")
    assert (result.code, result.err) == (4, "tenterhook: step 7 was not recorded\n  the recorded ones are 0, 1\n")


def test_a_damaged_recording(here: Path) -> None:
    write_net(here / "a.thk")
    (here / "a.thk" / "recording.json").write_text("{")
    result = tenterhook("show", "a")
    assert result.code == 3
    assert "Traceback" not in result.err


@pytest.mark.parametrize("args", [["-v", "show", "no.thk"], ["show", "-v", "no.thk"]])
def test_verbose_shows_the_traceback(args: list[str]) -> None:
    result = tenterhook(*args)
    assert result.code == 3
    assert "Traceback" in result.err
    assert result.err.endswith("tenterhook: there is no recording no.thk\n  make one: tenterhook record SCRIPT\n")


def test_a_fault_of_ours_has_a_code_of_its_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**options: object) -> int:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("tenterhook.cli.run_show.run", broken)
    result = tenterhook("show", "@0")
    assert result.code == 70
    assert "ZeroDivisionError: oh" in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in tenterhook("-v", "show", "@0").err


def test_version() -> None:
    assert tenterhook("--version").out == f"tenterhook {__version__}\n"


@pytest.mark.parametrize("args", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help(snapshot: SnapshotAssertion, args: list[str]) -> None:
    result = tenterhook(*args)
    assert result.code == 0
    assert result.out == snapshot


@pytest.mark.parametrize(
    "args", [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS), ["record", "no.py"]], ids=" ".join
)
def test_help_and_mistakes_import_nothing_heavy(args: list[str]) -> None:
    assert imported(args) == set()


@pytest.mark.parametrize(
    "args", [["show", "a.thk"], ["show", "a.thk", "--json"], ["doctor"], ["doctor", "--json"]], ids=" ".join
)
def test_reading_imports_no_framework(here: Path, args: list[str]) -> None:
    write_net(here / "a.thk")
    assert imported(args) & {"torch", "mindspore"} == set()


def imported(args: list[str]) -> set[str]:
    """Which of the heavy packages are imported by a command."""
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print([name for name in {HEAVY!r} if name in sys.modules], file=sys.__stderr__))\n"
        f"from tenterhook.cli import main\nmain({args!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True, env=environment())
    return set(json.loads(done.stderr.splitlines()[-1].replace("'", '"')))


def test_runs_as_a_module(here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tenterhook", "--version"],
        capture_output=True,
        check=False,
        text=True,
        env=environment(),
    )
    assert done.stdout == f"tenterhook {__version__}\n"
