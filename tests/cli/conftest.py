"""What the tests of the command line start from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.recorded import SCRIPT


@pytest.fixture(autouse=True)
def this_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is run in this process cannot put another program in its place, which would end the tests as if they had passed."""

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"would have become {arguments}")

    for name in ("execv", "execve", "execvp", "execvpe"):
        monkeypatch.setattr(os, name, refuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a training script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path
