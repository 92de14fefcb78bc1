"""A recorded script behaves as it does under plain Python: same output, same traceback, same exit."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tenterhook.recording import open_recording
from tests.cli.programs import PROGRAMS, environment, run_bare, run_recorded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "work"
    place.mkdir()
    return place


@pytest.mark.parametrize("name", PROGRAMS)
def test_behaves_as_under_python(folder: Path, name: str) -> None:
    program = PROGRAMS[name]
    for path, text in program.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")

    bare = run_bare(folder, program.command, program.stdin)
    recorded = run_recorded(folder, program.command, program.stdin)

    assert bare.returncode == program.code, "the program itself no longer does what it was written for"
    assert _without_addresses(recorded.stdout) == _without_addresses(bare.stdout)
    err, empty = _without_our_line(recorded.stderr)
    assert _without_addresses(err) == _without_addresses(bare.stderr)
    assert recorded.returncode == (4 if empty and not bare.returncode else bare.returncode)
    assert empty == (not name.startswith(("trains", *ENDS_AT_ONCE)))


ENDS_AT_ONCE = ("exits-at-once", "aborts")
"""Programs that leave no time to say anything."""

EMPTY = "tenterhook: nothing recorded: no module was called\n"


def test_runs_a_zip_file_with_a_main(folder: Path) -> None:
    with zipfile.ZipFile(folder / "app.zip", "w") as archive:
        archive.writestr(
            "__main__.py", "import sys; print(sys.argv, sys.path[0], __file__, __spec__.name); import inner; 1/0"
        )
        archive.writestr("inner.py", "print('inner')")
    bare = run_bare(folder, ["app.zip", "a"])
    recorded = run_recorded(folder, ["app.zip", "a"])
    assert (recorded.stdout, _without_our_line(recorded.stderr)[0]) == (bare.stdout, bare.stderr)
    assert recorded.returncode == bare.returncode == 1
    assert "inner" in bare.stdout


def test_interpreter_options_reach_the_script(folder: Path) -> None:
    (folder / "options.py").write_text(
        "import sys; print(sys.orig_argv, sys.warnoptions, sys.flags.optimize, sys.path[0])"
    )
    bare = run_bare(folder, ["options.py", "x"], options=["-W", "error", "-O"])
    recorded = run_recorded(folder, ["options.py", "x"], options=["-W", "error", "-O"])
    assert recorded.stdout == bare.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name)
def test_dies_by_the_signal_that_ends_it(folder: Path, number: signal.Signals) -> None:
    (folder / "wait.py").write_text("import time; print('ready', flush=True); time.sleep(60)")
    process = start(folder, ["-q", "-o", "r.thk", "wait.py"])
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -number
    assert err == ("" if number == signal.SIGKILL else EMPTY)
    assert open_recording(folder / "r.thk").manifest.complete == (number != signal.SIGKILL)


def test_a_signal_that_the_script_handles_is_the_scripts(folder: Path) -> None:
    (folder / "own.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = start(folder, ["-q", "-o", "r.thk", "own.py"])
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 7
    assert open_recording(folder / "r.thk").manifest.complete


def test_control_c_closes_the_recording_and_dies_by_the_signal(folder: Path) -> None:
    (folder / "wait.py").write_text("import time; print('ready', flush=True); time.sleep(60)")
    process = start(folder, ["-o", "r.thk", "wait.py"])
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt\n" in err
    assert err.index("KeyboardInterrupt") < err.index("VERDICT")
    assert open_recording(folder / "r.thk").manifest.complete


def test_a_forked_child_does_not_close_the_recording(folder: Path) -> None:
    (folder / "fork.py").write_text(
        "import os, sys\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    result = run_recorded(folder, ["fork.py"], ours=["-o", "r.thk"], quiet=False)
    assert result.stdout == "5\n"
    assert result.stderr.count("VERDICT") == 1
    assert open_recording(folder / "r.thk").manifest.complete


def test_summary_comes_after_the_traceback_and_the_last_thread(folder: Path) -> None:
    (folder / "late.py").write_text(
        "import sys, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('late', file=sys.stderr))).start()\n"
        "raise ValueError('bad')\n"
    )
    result = run_recorded(folder, ["late.py"], ours=["-o", "r.thk"], quiet=False)
    assert result.returncode == 1
    order = [result.stderr.index(word) for word in ("ValueError: bad", "late\n", "VERDICT")]
    assert order == sorted(order)


def _without_our_line(text: str) -> tuple[str, bool]:
    """Take out what is ours: the line where nothing was recorded, and what ``-q`` says where random numbers got stuck."""
    return re.sub(r"^tenterhook: stuck ! .*\n", "", text.replace(EMPTY, "", 1), flags=re.MULTILINE), EMPTY in text


def _without_addresses(text: str) -> str:
    return re.sub(r"\b0x[0-9a-f]+", "0x", text)


def start(folder: Path, args: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tenterhook", "record", *args]
    return subprocess.Popen(
        command, cwd=folder, text=True, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
