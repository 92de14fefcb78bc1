"""A training of two processes that is killed, one or both, goes on from its checkpoint, and each rank's recording with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import tenterhook as th
from tests.recording.resumed_ranks import REST_AFTER

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("resumed_ranks.py")
KILLED_AT, STEPS = 6, 9

pytestmark = pytest.mark.slow


def train(target: Path, how: str, *, steps: int, killed: str = "", resume: int | None = None) -> str:
    """Train until a step, and have ranks killed there."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [] if resume is None else ["--resume", str(resume)]
    kinds = ["--kinds", "output,grad_output"]
    us = ["-m", "tenterhook", "record", "--to", str(target), *options, *kinds] if how == "script" else []
    arguments = [how, str(target), str(target.with_suffix(".pt")), str(steps), killed]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *us, str(PROGRAM), *arguments],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode != 0) == bool(killed), done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], int]:
    target = tmp_path_factory.mktemp("whole") / "a.thk"
    train(target, "session", steps=STEPS)
    return digests(th.open(target))


def digests(recording: th.Recording) -> dict[tuple[Any, ...], int]:
    """What each rank saw in each step; each once."""
    names = ["rank", "step", "path", "kind", "slot", "call"]
    rows = recording.table("values").to_pylist()
    found = {tuple(row[name] for name in names): row["digest"] for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize(("how", "killed"), [("session", "1"), ("session", "0,1"), ("script", "1"), ("script", "0,1")])
def test_it_goes_on_in_every_rank(
    tmp_path: Path, uninterrupted: dict[tuple[Any, ...], int], how: str, killed: str
) -> None:
    target = tmp_path / "a.thk"
    train(target, how, steps=KILLED_AT, killed=killed)
    before = digests(th.open(target))
    assert not th.open(target).manifest.complete
    assert {(rank, step) for rank, step, *_ in before} >= {
        (rank, step) for rank in (0, 1) for step in range(REST_AFTER)
    }

    train(target, how, steps=STEPS, resume=KILLED_AT)
    recording = th.open(target)
    assert recording.manifest.complete and recording.manifest.steps == STEPS
    now = digests(recording)
    for rank in (0, 1):
        gaps = th.open(target, ranks=[rank]).manifest.gaps
        missing = {step for begin, end in gaps for step in range(begin, end)}
        assert missing <= set(range(REST_AFTER, KILLED_AT))
        wanted = {
            place: digest for place, digest in uninterrupted.items() if place[0] == rank and place[1] not in missing
        }
        assert {place: digest for place, digest in now.items() if place[0] == rank} == wanted
        calls = [(row["step"], row["path"], row["phase"], row["call"]) for row in recording.query(
            f"select step, path, phase, call from calls where rank = {rank}").to_pylist()]  # fmt: skip
        assert len(set(calls)) == len(calls) == 6 * (STEPS - len(missing))
        modules = th.open(target, ranks=[rank]).table("modules").to_pylist()
        assert {row["path"]: row["calls"] for row in modules}[""] == STEPS - len(missing)
        assert_tensors(
            target / f"rank-{rank:05d}", [row for row in recording.table("values").to_pylist() if row["rank"] == rank]
        )
        for begin, end in gaps:
            told = f"steps {begin} to {end - 1} are missing" if end - begin > 1 else f"step {begin} is missing"
            assert told in str(recording.coverage)


def assert_tensors(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Each tensor that a row names is stored, and no other."""
    stored: dict[str, np.ndarray] = {}
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "numpy") as file:
            for key in file.keys():
                assert key not in stored
                stored[key] = file.get_tensor(key)
    assert sorted(stored) == sorted(row["tensor"] for row in rows if row["tensor"] is not None)


def test_true_has_each_rank_go_on_where_it_was(tmp_path: Path) -> None:
    """Two loops that take in data of their own, of which one was killed later than the other."""
    target = tmp_path / "a.thk"
    program = tmp_path / "collect.py"
    program.write_text(
        "import os, signal, sys, time, torch\n"
        "from torch import nn\n"
        "import tenterhook as th\n"
        "rank, end = int(os.environ['RANK']), int(sys.argv[2])\n"
        "torch.manual_seed(0)\n"
        "net = nn.Sequential(nn.Linear(3, 2))\n"
        "with th.record(net, kinds=['output'], to=sys.argv[1], resume=True) as rec, torch.no_grad():\n"
        "    print('from', rank, rec.resumed_from, flush=True)\n"
        "    for step in range(rec.resumed_from, end + rank):\n"
        "        net(torch.full((2, 3), float(step + 100 * rank)))\n"
        "    if end < 20:\n"
        "        time.sleep(2.5)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "WORLD_SIZE": "2"}
    printed = []
    for end in (6, 20):
        started = [
            subprocess.Popen(
                [sys.executable, str(program), str(target), str(end)],
                stdout=subprocess.PIPE, text=True, env={**environment, "RANK": str(rank)},
            )
            for rank in (0, 1)
        ]  # fmt: skip
        printed += [process.communicate(timeout=120)[0] for process in started]
    assert printed == ["from 0 0\n", "from 1 0\n", "from 0 5\n", "from 1 6\n"]
    recording = th.open(target)
    assert recording.manifest.complete and recording.manifest.gaps == []
    found = recording.query("select rank, step from values where path = '0' order by all").to_pylist()
    assert [(row["rank"], row["step"]) for row in found] == [
        (rank, step) for rank in (0, 1) for step in range(20 + rank)
    ]
