"""Several real processes, started by torchrun: each writes its own folder, and they are read as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tenterhook as th
from tenterhook.stats import STATISTICS, describe

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("rank_program.py")
EXACT = ("numel", "min", "max", "absmax", "nan_count", "posinf_count", "neginf_count", "zero_count")

pytestmark = pytest.mark.slow


def torchrun(world: int, *arguments: str, fails: bool = False) -> str:
    """Run a program in so many processes; gives what they printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("world", [2, 4])
def test_shards_merge_to_what_the_whole_tensor_would_have(tmp_path: Path, world: int) -> None:
    torchrun(world, str(PROGRAM), "sharded", str(tmp_path))
    for name in ("fsdp", "hsdp") if world == 4 else ("fsdp",):
        recording = th.open(tmp_path / f"{name}.thk")
        assert recording.ranks == list(range(world)) and recording.manifest.complete
        rows = {f"{row['kind']} {row['path']}.{row['slot']}": row for row in recording.merged().to_pylist()}
        with np.load(tmp_path / f"{name}.npz") as wholes:
            assert set(rows) == set(wholes)
            for key, tensor in wholes.items():
                assert_describes(rows[key], tensor)
                assert rows[key]["ranks"] == list(range(world)) and rows[key]["note"] is None


def assert_describes(row: dict[str, object], tensor: np.ndarray) -> None:
    expected = describe(tensor)
    assert row["shape"] == list(tensor.shape)
    assert {name: row[name] for name in EXACT} == {name: expected[name] for name in EXACT}
    for name in STATISTICS:
        assert row[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9), name
    assert row["sketch"] == pytest.approx(expected["sketch"], rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    torchrun(2, str(PROGRAM), "sharded", str(folder))
    return folder


def test_each_rank_keeps_its_own_part(shards: Path) -> None:
    recording = th.open(shards / "fsdp.thk")
    with np.load(shards / "fsdp.npz") as wholes:
        rows = recording.query("select * from values where path = 'fc' and slot = 'weight' order by rank").to_pylist()
        for row in rows:
            first = row["shard"][0]
            part = recording.tensor(row["tensor"], row["rank"])
            assert part.shape == ((4, 9) if row["rank"] == 0 else (3, 9)) and row["shape"] == [7, 9]
            assert part == pytest.approx(wholes[f"{row['kind']} fc.weight"][first : first + len(part)])
        assert [row["shard"] for row in rows if row["kind"] == "param"] == [[0, 0], [4, 0]]


def test_what_is_missing_of_a_whole_is_told(shards: Path) -> None:
    (row,) = th.open(shards / "fsdp.thk", ranks=[1]).merged("head", kind="update").slice(0, 1).to_pylist()
    assert row["sketch"] is None and row["ranks"] == [1] and row["numel"] == 14
    assert row["note"] == "14 of 35 elements: the shards of other ranks are missing"


def test_parts_that_are_no_range_of_the_whole_have_statistics_and_no_sketch(shards: Path) -> None:
    recording = th.open(shards / "columns.thk")
    (row,) = recording.merged(kind="param").to_pylist()
    with np.load(shards / "columns.npz") as wholes:
        expected = describe(wholes["param weight"])
    assert {name: row[name] for name in EXACT} == {name: expected[name] for name in EXACT}
    assert row["sketch"] is None and "not contiguous" in row["note"]
    # each rank has a summand of the output only, which is no part of it
    outputs = recording.merged(kind="output").to_pylist()
    assert [row["ranks"] for row in outputs] == [[0], [1]] and "summand" in outputs[0]["note"]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_write_to_one_target_and_are_read_as_one(tmp_path: Path, world: int) -> None:
    torchrun(world, str(PROGRAM), "ddp", str(tmp_path))
    recording = th.open(tmp_path / "ddp.thk")
    assert recording.manifest.complete and recording.manifest.world == world
    rows = recording.query("select rank, step, count(*) n from calls group by all order by all").to_pylist()
    assert [(row["rank"], row["step"]) for row in rows] == [(rank, step) for rank in range(world) for step in range(4)]
    assert len({row["n"] for row in rows}) == 1
    # each rank has a batch of its own, and the same parameters
    outputs = recording.query("select digest from values where path = 'fc' and kind = 'output' and step = 0")
    assert len(set(outputs["digest"].to_pylist())) == world


def test_the_command_records_all_ranks(tmp_path: Path) -> None:
    target = tmp_path / "run.thk"
    torchrun(2, "-m", "tenterhook", "record", "--to", str(target), str(PROGRAM), "plain", str(tmp_path))
    recording = th.open(target)
    assert recording.manifest.complete and recording.ranks == [0, 1] and recording.steps == [0, 1, 2]
    shown = [
        json.loads(
            subprocess.run(
                [sys.executable, "-m", "tenterhook", "show", str(target), "--rank", str(rank), "--json"],
                capture_output=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            ).stdout
        )
        for rank in (0, 1)
    ]  # fmt: skip
    only = [sys.executable, "-m", "tenterhook", "show", str(target), "--ranks", "1", "--json"]
    done = subprocess.run(only, capture_output=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    assert json.loads(done.stdout)["data"]["ranks"] == [1]
    rows = [json.dumps(one).count('"fc"') for one in shown]
    assert rows[0] == rows[1] > 0 and shown[0] != shown[1]


def test_a_rank_that_is_killed_leaves_the_data_of_the_others_whole(tmp_path: Path) -> None:
    torchrun(2, str(PROGRAM), "killed", str(tmp_path), fails=True)
    recording = th.open(tmp_path / "ddp.thk")
    assert not recording.manifest.complete
    assert recording.unclosed[1] in [f"was never closed: killed in step {step} or soon after" for step in (1, 2)]
    rows = recording.query("select rank, step, count(*) n from calls where step < 2 group by all").to_pylist()
    assert {(row["rank"], row["step"]) for row in rows} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len({row["n"] for row in rows}) == 1


@pytest.mark.parametrize(("restarts", "name"), [("0", "run.thk"), ("2", "run-restart2.thk")])
def test_processes_that_torchrun_starts_again_write_beside_the_first(tmp_path: Path, restarts: str, name: str) -> None:
    (tmp_path / "train.py").write_text("print('done')")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TORCHELASTIC_RESTART_COUNT": restarts}
    command = [sys.executable, "-m", "tenterhook", "record", "--to", "run.thk", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n"
    assert [path.name for path in tmp_path.glob("*.thk")] == [name]


def test_several_processes_need_one_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('done')")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "WORLD_SIZE": "2", "RANK": "1"}
    command = [sys.executable, "-m", "tenterhook", "record", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--to runs/train.thk" in done.stderr and done.stdout == ""
