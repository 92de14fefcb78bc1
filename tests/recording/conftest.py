"""A recording that tests damage copies of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recording.damaging import write


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed")
    write(folder / "a.thk", close=True)
    return folder / "a.thk"
