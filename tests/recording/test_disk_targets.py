"""Where a recording may be written: what is refused, what is replaced, and what is never touched."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tenterhook.errors import RecordingError, TargetError
from tenterhook.recording import DiskSink, Manifest, open_recording
from tests.recording.synthetic import modules_table
from tests.recording.writing import in_process, names, recorded, write_steps


def test_an_existing_target_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path / "a.thk")
    before = names(tmp_path)
    with pytest.raises(TargetError, match="exists; choose another name, or allow it to be replaced"):
        DiskSink(tmp_path / "a.thk", Manifest())
    assert names(tmp_path) == before


def test_overwriting_replaces_a_recording_and_leaves_what_is_not_ours(tmp_path: Path) -> None:
    recorded(tmp_path / "a.thk", steps=3)
    (tmp_path / "a.thk" / "notes.txt").write_text("mine")
    recorded(tmp_path / "a.thk", steps=1, overwrite=True)
    assert open_recording(tmp_path / "a.thk").steps == [0]
    assert (tmp_path / "a.thk" / "notes.txt").read_text() == "mine"


def test_overwriting_never_touches_what_is_not_a_recording(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "calls-00000.parquet").write_text("mine")
    with pytest.raises(TargetError, match="is not a recording, so it is not overwritten"):
        DiskSink(tmp_path / "data", Manifest(), overwrite=True)
    recorded(tmp_path / "a.thk")
    (tmp_path / "a.thk" / "rank-00000" / "model.pt").write_text("mine")
    with pytest.raises(TargetError, match="holds files that are not a recording's"):
        DiskSink(tmp_path / "a.thk", Manifest(), overwrite=True)
    assert (tmp_path / "data" / "calls-00000.parquet").read_text() == "mine"
    assert (tmp_path / "a.thk" / "rank-00000" / "model.pt").read_text() == "mine"


def test_a_link_in_a_recording_is_removed_and_not_followed(tmp_path: Path) -> None:
    recorded(tmp_path / "a.thk")
    (tmp_path / "precious").write_text("mine")
    link = tmp_path / "a.thk" / "rank-00000" / "values-00007.parquet"
    link.symlink_to(tmp_path / "precious")
    with pytest.raises(RecordingError, match="not a plain file"):
        open_recording(tmp_path / "a.thk")
    recorded(tmp_path / "a.thk", overwrite=True)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("where", ["file", "file/below.thk", "file/far/below.thk"])
def test_a_target_that_cannot_be_is_refused_at_once(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TargetError, match=r"is not a directory|[Nn]ot a directory"):
        DiskSink(tmp_path / where, Manifest())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_target_that_may_not_be_written_is_refused_at_once(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        place = Path("/proc/self/a.thk")  # root may write wherever a kernel lets anybody
    else:
        (tmp_path / "locked").mkdir(mode=0o555)
        place = tmp_path / "locked" / "a.thk"
    with pytest.raises(TargetError, match="cannot be written"):
        DiskSink(place, Manifest())


def test_what_could_not_be_begun_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TargetError, match="cannot be written: No space left on device"):
        DiskSink(tmp_path / "below" / "a.thk", Manifest())
    assert names(tmp_path) == [] and not (tmp_path / "below" / "a.thk").exists()


def test_two_processes_cannot_write_the_same_target(tmp_path: Path) -> None:
    sink = DiskSink(tmp_path / "a.thk", Manifest())
    code = """
import sys
from tenterhook.errors import TargetError
from tenterhook.recording import DiskSink, Manifest, Pace
try:
    DiskSink(sys.argv[1], Manifest(), overwrite=sys.argv[2] == "overwrite")
except TargetError as error:
    print(error)
"""
    for way in ("keep", "overwrite"):
        assert f"is being written by process {os.getpid()}" in in_process(code, tmp_path / "a.thk", way).stdout
    write_steps(sink, range(2))
    sink.close(Manifest(), modules_table())
    assert open_recording(tmp_path / "a.thk").steps == [0, 1]


def test_of_many_that_claim_at_once_one_writes(tmp_path: Path) -> None:
    sinks: list[DiskSink] = []
    refused: list[TargetError] = []
    start = threading.Barrier(8)

    def claim() -> None:
        start.wait()
        try:
            sinks.append(DiskSink(tmp_path / "a.thk", Manifest()))
        except TargetError as error:
            refused.append(error)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sinks) == 1 and len(refused) == 7
    sinks[0].close(Manifest(), modules_table())
