"""Edits of the gradients of sharded parameters (FSDP2), on two real processes: those of the same edits on the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).with_name("sharded_edits_program.py")


def test_edits_of_shards_are_those_of_the_whole_and_come_before_observers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2  # lines of two processes may run into one another
