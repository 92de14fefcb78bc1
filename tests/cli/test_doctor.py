"""What ``tenterhook doctor`` finds."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path

import pytest

from tenterhook import __version__
from tests.cli.commands import tenterhook
from tests.cli.recordings import write_net


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report() -> dict:
    result = tenterhook("doctor", "--json")
    assert result.code == 0
    return json.loads(result.out)["data"]


def test_versions_are_those_that_are_installed() -> None:
    found = report()
    for name in ("numpy", "pyarrow", "duckdb", "click", "rich", "msgspec"):
        assert found["versions"][name] == version(name)
    assert found["frameworks"]["torch"] == version("torch")
    assert found["system"]["tenterhook"].startswith(__version__)
    assert found["system"]["python"].startswith(platform.python_version())


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    from tenterhook.cli import run_doctor

    def nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(run_doctor, "version", nothing)
    found = report()
    assert set(found["frameworks"].values()) == {None}
    assert any("neither torch nor mindspore is installed" in line for line in found["limits"])
    assert "MISSING" in tenterhook("doctor").out


def test_variables_in_force_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENTERHOOK_DIR", "elsewhere")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    found = report()["environment"]
    assert found["TENTERHOOK_DIR"] == "elsewhere"
    assert found["WORLD_SIZE"] == "8"
    assert "hush" not in found.values()


def test_newest_recordings_with_their_state(here: Path) -> None:
    write_net(here / "runs" / "whole.thk")
    write_net(here / "cut.thk", close=False)
    (here / "broken.thk").mkdir()
    (here / "broken.thk" / "recording.json").write_text("{}")
    states = dict(report()["recordings"])
    assert states["runs/whole.thk"] == "complete, 2 steps"
    assert states["cut.thk"].startswith("unfinished")
    assert states["broken.thk"].startswith("cannot be read")


@pytest.mark.parametrize("width", [80, 120])
def test_text_fits_the_terminal(width: int) -> None:
    out = tenterhook("doctor", width=width).out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= width
    for title in ("frameworks", "packages", "cannot be hooked here", "environment", "newest recordings"):
        assert f"\n{title}\n" in out
