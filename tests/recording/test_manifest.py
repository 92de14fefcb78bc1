"""`recording.json`, and what is gathered for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tenterhook.errors import MissingExtraError, RecordingError
from tenterhook.recording import Cost, Git, Manifest, Model, converters
from tenterhook.recording.environment import git_state, start_manifest, versions


def test_a_manifest_comes_back_as_it_was() -> None:
    manifest = Manifest(
        framework="torch",
        models=[Model(name="Net", type="nets.Net", parameters=12, modules=3)],
        git=Git(commit="a" * 40, branch="main", dirty=True),
        seeds={"torch": 2**63},
        cost=Cost(hook_seconds=0.5, wall_seconds=2.0),
        note="ünïcode",
    )
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert json.loads(manifest.to_json())["git"]["dirty"] is True


def test_the_schema_says_what_the_fields_are() -> None:
    schema = Manifest.json_schema()
    fields = schema["$defs"]["Manifest"]["properties"]
    assert set(fields) == set(json.loads(Manifest().to_json()))
    assert fields["complete"]["type"] == "boolean"


def test_an_old_minor_without_some_fields_is_read() -> None:
    assert Manifest.from_json(b'{"format_version": "1.0"}') == Manifest()


def test_a_field_of_the_wrong_type_is_named() -> None:
    with pytest.raises(RecordingError, match=r"x.json is damaged: .*steps"):
        Manifest.from_json(b'{"format_version": "1.0", "steps": "many"}', where="x.json")


def test_the_start_says_what_is_run_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "3"])
    manifest = start_manifest(note="mine")
    assert (manifest.rank, manifest.world, manifest.argv, manifest.note) == (3, 8, ["train.py", "--lr", "3"], "mine")
    assert b"secret" not in manifest.to_json()
    assert manifest.started is not None and manifest.versions["numpy"]
    assert "python" in versions()


def test_git_is_asked_quietly(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    assert git_state(tmp_path / "nowhere") is None
    run = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*run, "init", "-q", "-b", "trunk"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*run, "add", "file"], check=True)
    subprocess.run([*run, "commit", "-q", "-m", "first"], check=True)
    state = git_state(tmp_path)
    assert state is not None and len(state.commit) == 40 and (state.branch, state.dirty) == ("trunk", False)
    (tmp_path / "file").write_text("2")
    changed = git_state(tmp_path)
    assert changed is not None and changed.dirty


def test_many_sessions_ask_git_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    programs = tmp_path / "programs"
    programs.mkdir()
    git = programs / "git"
    git.write_text(f'#!/bin/sh\necho "$@" >> {asked}\necho {"a" * 40}\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    found = [start_manifest() for _ in range(20)]
    assert {manifest.git for manifest in found} == {Git(commit="a" * 40, branch="a" * 40, dirty=True)}
    calls = asked.read_text().splitlines()
    assert len(calls) in (3, 6)  # a minute may end meanwhile
    found[0].versions["numpy"] = "mine"
    assert found[1].versions["numpy"] != "mine" and start_manifest().versions["numpy"] != "mine"


def test_a_git_that_cannot_say_what_has_changed_is_not_said_to_be_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = tmp_path / "git"
    git.write_text(f'#!/bin/sh\ncase "$*" in *status*) exit 128;; esac\necho {"a" * 40}\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = git_state(tmp_path)
    assert found == Git(commit="a" * 40, branch="a" * 40, dirty=None)
    manifest = Manifest(git=found)
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_where_the_directory_is_gone_nothing_is_said_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert start_manifest().git is None


def test_a_framework_that_is_not_there_is_named() -> None:
    with pytest.raises(MissingExtraError, match="no converter to jax is registered"):
        converters.converter("jax")
    converters.register("absent", "no_such_package_at_all:CONVERTER")
    try:
        with pytest.raises(MissingExtraError, match=r"absent is not installed here.*tenterhook\[absent\]"):
            converters.converter("absent")
    finally:
        converters._converters.pop("absent")


def test_reading_a_recording_imports_no_framework() -> None:
    code = "import sys, tenterhook.recording; print({'torch', 'mindspore'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_schema_beside_the_page_is_that_of_the_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "recording.schema.json"
    schema = json.loads(page.read_bytes())
    assert schema == Manifest.json_schema()
    described = schema["$defs"]["Manifest"]["properties"]
    assert all(field["description"] for field in described.values())
    assert schema["$defs"]["Manifest"]["required"] == ["format_version"]
