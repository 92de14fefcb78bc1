"""Of several ranks, those that were killed and those that are not there are named."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tenterhook as th
from tenterhook.errors import RecordingError
from tenterhook.recording import DiskSink, Manifest
from tenterhook.recording.rank_ends import missing, named
from tests.cli.commands import tenterhook
from tests.recording.synthetic import call, calls_batch, modules_table, value, values_batch

GLOO = "RuntimeError: connection closed by peer"


@pytest.fixture(scope="module")
def nobody() -> int:
    """A process that has ended."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return gone.pid


def write_rank(path: Path, rank: int, world: int, steps: int, *, error: str | None = None) -> DiskSink:
    manifest = Manifest(rank=rank, world=world, error=error, steps=steps)
    sink = DiskSink(path, manifest, rank=rank, budget=None)
    for step in range(steps):
        sink.write_calls(calls_batch(call(step * 2, step)))
        sink.write_values(values_batch(value(step * 2 + 1, step * 2, step)))
    sink.flush()
    return sink


def kill(sink: DiskSink, rank: int, pid: int, *, signed: int = 0, host: str | None = None) -> None:
    """Leave a rank as a kill does: open, its process gone. (The sink of this process is let go.)"""
    claim = sink.path / f"rank-{rank:05d}" / "claim.json"
    claim.write_text(json.dumps({"host": host or socket.gethostname(), "pid": pid, "steps": signed}))


def close(sink: DiskSink, rank: int, world: int, error: str | None = None) -> None:
    sink.close(Manifest(rank=rank, world=world, error=error), modules_table())


def words(text: str) -> str:
    """Put lines that were broken for width together."""
    return " ".join(text.split())


def test_a_killed_rank_is_named_with_its_step(tmp_path: Path, nobody: int) -> None:
    path = tmp_path / "a.thk"
    close(write_rank(path, 0, 2, 4), 0, 2, GLOO)
    dead = write_rank(path, 1, 2, 3)
    kill(dead, 1, nobody)
    sentence = "rank 1 was never closed: killed in step 2 or soon after"
    recording = th.open(path)
    assert recording.unclosed == {1: "was never closed: killed in step 2 or soon after"}
    assert sentence in str(recording) and sentence in str(recording.coverage).splitlines()
    assert recording.manifest.partial is None
    shown = words(tenterhook("show", str(path)).out.partition("step 0")[0])
    assert f"UNFINISHED why {sentence} ended rank 0 by {GLOO}" in shown
    own = words(tenterhook("show", str(path), "--rank", "1").out.partition("step 0")[0])
    assert f"why {sentence} " in own and GLOO not in own
    data = json.loads(tenterhook("show", str(path), "--json").out)["data"]
    assert data["unclosed"] == {"1": recording.unclosed[1]} and data["ends"] == {"0": GLOO}
    assert th.open(path, ranks=[0]).unclosed == {} and list(th.open(path, ranks=[1]).unclosed) == [1]
    close(dead, 1, 2)


def test_what_was_signed_for_tells_more_than_the_rows(tmp_path: Path, nobody: int) -> None:
    path = tmp_path / "a.thk"
    dead = [write_rank(path, rank, 3, steps) for rank, steps in enumerate((3, 3, 0))]
    kill(dead[0], 0, nobody, signed=40)
    kill(dead[1], 1, nobody, signed=40, host="node7")
    kill(dead[2], 2, nobody)
    assert th.open(path).unclosed == {
        0: "was never closed: killed in step 40 or soon after",
        1: "was never closed: killed in step 40 or soon after, if it does not go on on node7",
        2: "was never closed and has no rows: killed before the first were written",
    }
    for rank, sink in enumerate(dead):
        close(sink, rank, 3)
    assert th.open(path).unclosed == {}


def test_a_rank_without_rows_has_a_page(tmp_path: Path, nobody: int) -> None:
    path = tmp_path / "a.thk"
    close(write_rank(path, 0, 2, 4), 0, 2, GLOO)
    dead = write_rank(path, 1, 2, 0)
    kill(dead, 1, nobody)
    found = tenterhook("show", str(path), "--rank", "1")
    assert found.code == 0 and "rank 1 was never closed and has no rows" in words(found.out)
    assert GLOO not in found.out
    close(dead, 1, 2)


def test_a_rank_that_goes_on_was_not_killed(tmp_path: Path) -> None:
    path = tmp_path / "a.thk"
    sinks = [write_rank(path, rank, 2, 2) for rank in range(2)]  # by this process, which is alive
    assert th.open(path).unclosed == {}
    shown = words(tenterhook("show", str(path)).out)
    assert f"process {os.getpid()}, {os.getpid()} is writing it" in shown and "never closed" not in shown
    for rank, sink in enumerate(sinks):
        close(sink, rank, 2)


def test_ranks_that_share_an_end_are_told_together(tmp_path: Path, nobody: int) -> None:
    path = tmp_path / "a.thk"
    sinks = [write_rank(path, rank, 6, 1) for rank in range(5)]
    for rank, sink in enumerate(sinks):
        kill(sink, rank, nobody, signed=9 if rank == 3 else 7)
    told = str(th.open(path).coverage).splitlines()
    assert "ranks 0 to 2, 4 were never closed: killed in step 7 or soon after" in told
    assert "rank 3 was never closed: killed in step 9 or soon after" in told
    assert "rank 5 of 6 is missing" in words(tenterhook("show", str(path)).out)
    for rank, sink in enumerate(sinks):
        close(sink, rank, 6)


def test_the_own_end_of_a_rank_is_told_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.thk"
    for rank, error in enumerate([GLOO, "ValueError: odd", None]):
        close(write_rank(path, rank, 3, 1), rank, 3, error)
    pages = [words(tenterhook("show", str(path), "--rank", str(rank)).out) for rank in range(3)]
    ends = [page[page.index("ended rank") : page.index(" run ")] for page in pages]
    assert ends == [
        f"ended rank 0 by {GLOO}; 1 other rank ended early",
        "ended rank 1 by ValueError: odd; 1 other rank ended early",
        "ended rank 2 came to its end; 2 other ranks ended early",
    ]


def test_ranks_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.thk"
    close(write_rank(path, 0, 2, 1), 0, 2)
    recording = th.open(path)
    assert recording.manifest.partial == "rank 1 of 2 is missing" and not recording.manifest.complete
    assert "partial: rank 1 of 2 is missing" in str(recording)
    assert "UNFINISHED why rank 1 of 2 is missing" in words(tenterhook("show", str(path)).out)
    assert tenterhook("show", str(path), "--rank", "1").err.splitlines() == [
        "tenterhook: rank 1 was not recorded",
        "  rank 0 was",
    ]


@pytest.mark.parametrize(
    ("world", "there", "expected"),
    [
        (2, [0, 1], None),
        (2, [1], "rank 0 of 2 is missing"),
        (4, [0, 3], "ranks 1, 2 of 4 are missing"),
        (16, [0, 1, 2, 4, 5, 6, 10, 11, 12, 13, 14, 15], "ranks 3, 7 to 9 of 16 are missing"),
        (4, [0, 1, 9], "ranks 2, 3 of 4 are missing"),
        (2**60, [0], f"ranks 1 to {2**60 - 1} of {2**60} are missing"),
        (20, range(0, 20, 2), "ranks 1, 3, 5, 7, 9, 11 and 4 more of 20 are missing"),
    ],
)
def test_missing(world: int, there: list[int], expected: str | None) -> None:
    assert missing(world, there) == expected


def test_named() -> None:
    assert named([3]) == "rank 3" and named([9, 8, 7, 3]) == "ranks 3, 7 to 9" and named([0, 1]) == "ranks 0, 1"


def test_one_rank_is_asked_for_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.thk"
    for rank in range(2):
        close(write_rank(path, rank, 2, 1), rank, 2)
    assert [th.open(path, ranks=one).ranks for one in (1, np.int64(1), [0, 1], range(2))] == [[1], [1], [0, 1], [0, 1]]
    for odd in ("1", ["1"], 1.0, [None]):
        with pytest.raises(RecordingError, match="are no numbers of ranks; ranks=\\[0, 3\\] reads these only"):
            th.open(path, ranks=odd)  # type: ignore[arg-type]
    for empty in ([], (), range(0), ""):
        with pytest.raises(RecordingError, match="asks for no rank"):
            th.open(path, ranks=empty)  # type: ignore[arg-type]


def test_a_value_of_several_ranks_is_printed_with_its_own(tmp_path: Path) -> None:
    for name, world in (("a.thk", 2), ("b.thk", 1)):
        rank = world - 1
        sink = DiskSink(tmp_path / name, Manifest(rank=rank, world=world), rank=rank, budget=None)
        sink.write_values(values_batch(value(1, 0, nan_count=3)))
        close(sink, rank, world)
    first = th.open(tmp_path / "a.thk").first_nonfinite()
    assert first is not None and repr(first).startswith(f"{first.address} of rank 1 ")
    assert repr(first) in str(th.open(tmp_path / "a.thk"))
    assert " of rank " not in repr(th.open(tmp_path / "b.thk").first_nonfinite())


def test_of_a_recording_without_an_end_the_steps_that_ran_are_told(tmp_path: Path, nobody: int) -> None:
    path = tmp_path / "a.thk"
    sink = write_rank(path, 0, 1, 3)
    assert "VERDICT 3 steps" in words(tenterhook("show", str(path)).out)
    kill(sink, 0, os.getpid(), signed=14)
    assert "VERDICT 3 of 14 steps" in words(tenterhook("show", str(path)).out)
    recording = th.open(path)
    assert "3 of 14 steps" in str(recording)
    kill(sink, 0, nobody, signed=20)
    recording.refresh()
    assert recording.manifest.steps == 20 and "3 of 20 steps" in words(tenterhook("show", str(path)).out)
    close(sink, 0, 1)
