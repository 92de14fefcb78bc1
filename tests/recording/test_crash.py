"""Killing a process that records, at any moment: what is on the disk afterwards.

The full number of 200 kills: TENTERHOOK_KILLS=200 pytest tests/recording/test_crash.py
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenterhook.recording import Recording, open_recording
from tests.recording.synthetic import step_of_rows

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("TENTERHOOK_KILLS", "8"))
INTERVAL = 0.1
# A process that is killed may have been kept from the processor just then; the machine's own delays are no loss of ours.
GRACE = 0.4


def start(target: Path, roll_bytes: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.recording.killed_writer", str(target), str(INTERVAL), str(roll_bytes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


def kill_after(process: subprocess.Popen[str], seconds: float) -> tuple[float, dict[int, float]]:
    """Kill it this long after its first step; gives the time of the kill, and when each step was handed over."""
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    time.sleep(seconds)
    killed = time.time()
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    handed = [line.split() for line in lines if line.endswith("\n")]
    return killed, {int(step): float(when) for step, when in handed}


def assert_whole(recording: Recording, killed: float, handed: dict[int, float]) -> None:
    assert not recording.manifest.complete
    for table, batch in (("calls", 0), ("values", 1)):
        steps = recording.table(table)["step"].to_pylist()
        last = max(steps, default=-1)
        assert sorted(steps) == sorted([*range(last + 1)] * 5), "rows were lost, doubled or torn"
        due = [step for step, when in handed.items() if when < killed - INTERVAL - GRACE]
        assert last >= max(due, default=-1), "more was lost than the last interval"
        if last >= 0:
            written = step_of_rows(last)[batch].to_pylist()
            read = [row for row in recording.table(table).drop_columns(["rank"]).to_pylist() if row["step"] == last]
            assert read == written
        assert recording.query(f"select count(*) n from {table}").to_pylist() == [{"n": len(steps)}]
    kept = 0
    while recording._source.has_tensor(f"t{kept}", 0):
        assert recording.tensor(f"t{kept}").tolist() == [kept] * 100
        kept += 1
    assert kept > max((step for step, when in handed.items() if when < killed - INTERVAL - GRACE), default=-1)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS))
def test_a_kill_loses_no_more_than_the_last_interval(tmp_path: Path, number: int) -> None:
    chance = random.Random(number)
    process = start(tmp_path / "a.thk", chance.choice([20_000, 200_000, 100 << 20]))
    killed, handed = kill_after(process, chance.uniform(0, 2.0))
    assert_whole(open_recording(tmp_path / "a.thk"), killed, handed)


@pytest.mark.slow
def test_a_recording_is_read_while_it_is_written(tmp_path: Path) -> None:
    process = start(tmp_path / "a.thk", 300_000)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        seen = [-1]
        deadline = time.monotonic() + 60
        steps: list[int] = []
        while len(seen) < 12 and time.monotonic() < deadline:
            recording = open_recording(tmp_path / "a.thk")
            for _ in range(3):  # parts are compacted while one recording is read again and again
                steps = recording.table("values")["step"].to_pylist()
                assert sorted(steps) == sorted([*range(max(steps, default=-1) + 1)] * 5)
                counted = recording.query("select count(*) n from values").to_pylist()[0]["n"]
                assert counted >= len(steps) and counted % 5 == 0
            if (last := max(steps, default=-1)) > seen[-1]:
                seen.append(last)
            time.sleep(0.05)
        assert len(seen) == 12
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("table", ["calls", "values"])
def test_a_part_that_a_listing_misses_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    kill_after(start(tmp_path / "a.thk", 20_000), 1.5)
    whole = len(open_recording(tmp_path / "a.thk").table(table))
    listed = Path.iterdir
    missed: list[Path] = []

    def listing(folder: Path) -> Iterator[Path]:
        paths = sorted(listed(folder))
        last = max((path for path in paths if path.name.startswith(table)), default=None)
        if last is not None and not missed:  # it goes from a stream to Parquet just now: neither name was met
            missed.append(last)
            paths.remove(last)
        return iter(paths)

    monkeypatch.setattr(Path, "iterdir", listing)
    assert len(open_recording(tmp_path / "a.thk").table(table)) == whole > 0
    assert missed
