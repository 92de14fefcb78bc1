"""What the tests of the command line start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.recorded import SCRIPT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a training script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path
