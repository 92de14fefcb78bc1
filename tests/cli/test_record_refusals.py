"""What ``tenterhook record`` refuses before a script starts, and says of selections that match nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenterhook.recording import find_recordings
from tests.cli.recorded import SCRIPT, record


def test_a_target_that_exists_is_refused_before_the_script_starts(folder: Path) -> None:
    assert record(folder, "-q", "-o", "a.thk", "train.py").returncode == 0
    before = (folder / "a.thk" / "recording.json").read_bytes()
    done = record(folder, "-o", "a.thk", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "a.thk exists\n  choose another name, or allow it to be replaced (--overwrite" in done.stderr
    assert (folder / "a.thk" / "recording.json").read_bytes() == before
    assert record(folder, "-q", "-o", "a.thk", "--overwrite", "train.py").returncode == 0


def test_a_target_that_cannot_be_written_is_refused_before_the_script_starts(folder: Path) -> None:
    (folder / "file").write_text("in the way")
    done = record(folder, "-o", "file/a.thk", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_a_log_that_cannot_be_written_is_refused_before_the_script_starts(folder: Path) -> None:
    (folder / "file").write_text("in the way")
    done = record(folder, "--log", "file/log.txt", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "file/log.txt" in done.stderr
    assert len(done.stderr.splitlines()) <= 3


@pytest.mark.parametrize(
    "args", [["--kinds", "ouptut"], ["--steps", "a:b"], ["--stats", "all"], ["--on-error", "x"]], ids=" ".join
)
def test_options_are_checked_before_the_script_starts(folder: Path, args: list[str]) -> None:
    done = record(folder, *args, "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tenterhook: ")
    assert len(done.stderr.splitlines()) <= 3
    assert not find_recordings(folder)
    assert not (folder / "runs").exists()


def test_a_select_that_matches_nothing_names_the_nearest(folder: Path) -> None:
    done = record(folder, "--select", "featuers.*", "train.py")
    assert (done.returncode, done.stdout) == (4, "done\n")
    assert "the selection matches no module" in done.stderr
    told = "note: tenterhook: featuers.* matches nothing; nearest: 'features.*' (2 modules)"
    assert told in done.stderr


def test_a_select_that_matches_nothing_is_told_after_the_first_step(folder: Path) -> None:
    (folder / "train.py").write_text(
        SCRIPT.replace("    optimizer.step()\n", "    optimizer.step()\n    print('stepped', step, file=sys.stderr)\n")
    )
    done = record(folder, "--select", "featuers.*", "--select", "head", "train.py")
    lines = done.stderr.splitlines()
    told = [
        place for place, line in enumerate(lines) if line.startswith("note: tenterhook: featuers.* matches nothing")
    ]
    assert told == [lines.index("stepped 0") - 1]
    assert done.returncode == 0


def test_a_failing_script_wins_over_a_select_that_matches_nothing(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT + "sys.exit(7)")
    assert record(folder, "--select", "featuers.*", "train.py").returncode == 7


def test_no_module_called(folder: Path) -> None:
    (folder / "train.py").write_text("print('only this')")
    done = record(folder, "train.py")
    assert (done.returncode, done.stdout) == (4, "only this\n")
    assert "VERDICT  nothing recorded: no module was called" in done.stderr
