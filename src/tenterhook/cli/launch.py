"""Recording what ``torchrun`` starts: it is made to start our module in each process, and that runs the script."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

__all__ = ["LAUNCHERS", "is_launcher", "label_of", "run", "with_us_between"]

LAUNCHERS = ("torchrun",)
_MODULE = ("-m", "--module")
_NO_SCRIPT = ("--no-python", "--no_python", "--run-path", "--run_path")


def is_launcher(command: str) -> bool:
    """Whether a command is one that starts a script in several processes, and that we know how to talk to."""
    return Path(command).name in LAUNCHERS


def with_us_between(command: Sequence[str], ours: Sequence[str]) -> list[str]:
    """Put ``-m tenterhook record OURS`` between a launcher's own options and the script that it starts.

    Args:
        command: the launcher, its options, the script or module, and that one's arguments.
        ours: our own options.

    Raises:
        click.UsageError: the launcher is not installed, or starts no script that can be recorded.
    """
    launcher = _found(command[0])
    if launcher is None:
        raise click.UsageError(f"there is no command {command[0]!r} here\nit comes with torch: pip install torch")
    place, module = _target(command)
    between = ["-m", "tenterhook", "record", *ours, *(["-m"] if module else [])]
    options = command[: place - 1] if module else command[:place]
    return [launcher, *options[1:], *between, *command[place:]]


def _found(command: str) -> str | None:
    """Find a launcher on the PATH, or beside the interpreter, whose environment need not be activated."""
    if shutil.which(command) is not None:
        return command
    beside = Path(sys.executable).parent
    return shutil.which(command, path=str(beside)) if Path(command).name == command else None


def label_of(command: Sequence[str]) -> str:
    """A short name for what is started: ``train`` for ``torchrun src/train.py``."""
    place, module = _target(command)
    return command[place] if module else Path(command[place]).stem


def _target(command: Sequence[str]) -> tuple[int, bool]:
    """Find what is started: its place, and whether it is a module. The launcher's options may have any values before."""
    for place, word in enumerate(command):
        if word in _NO_SCRIPT:
            raise click.UsageError(
                f"with {word} {command[0]} starts no script that could be recorded\nleave {word} out"
            )
        if word in _MODULE and place + 1 < len(command) and not command[place + 1].startswith("-"):
            return place + 1, True
        if word.endswith(".py") and not word.startswith("-"):
            if not Path(word).is_file():
                raise click.UsageError(f"there is no script {word!r}")
            return place, False
    raise click.UsageError(
        f"no script is named for {command[0]}\nname one that ends in .py, or a module right behind -m: "
        f"tenterhook record -- {command[0]} OPTIONS train.py ARGS"
    )


def run(*, command: Sequence[str]) -> NoReturn:
    """Become the launcher, so that its exit code and the signals it gets are its own."""
    os.execvp(command[0], list(command))
