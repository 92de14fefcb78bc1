"""Where no compiler was, NumPy does the work of the kernel; ``doctor`` says so, and nothing else changes."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from tenterhook.stats import KERNELS

pytestmark = pytest.mark.skipif(KERNELS == ("numpy",), reason="the kernel is not built here: only the twin exists")

_WITHOUT = "import sys; sys.modules['tenterhook.stats._kernel'] = None\n"

_RECORD = """
import json, sys
import torch
import tenterhook as th
from tenterhook import stats

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 100), torch.nn.ReLU(), torch.nn.Linear(100, 3))
with th.record(model, kinds=("input", "output", "grad_output", "param")) as rec:
    model(torch.randn(500, 8)).square().mean().backward()
    model(torch.randn(500, 8).bfloat16().float().t().contiguous().t())
rows = rec.table("values").drop_columns(["device"]).to_pylist()
print(json.dumps({"kernel": stats.KERNEL, "threads": stats.threads(), "rows": rows}))
"""

_DOCTOR = "from tenterhook.cli import main; main(['doctor', '--json'])"


def output_of(program: str) -> dict:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_a_recording_without_the_kernel_says_the_same() -> None:
    native, numpy = output_of(_RECORD), output_of(_WITHOUT + _RECORD)
    assert (native["kernel"], numpy["kernel"], numpy["threads"]) == (KERNELS[0], "numpy", 1)
    assert len(native["rows"]) == len(numpy["rows"]) > 10
    for ours, theirs in zip(native["rows"], numpy["rows"], strict=True):
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose(ours.pop("sketch"), theirs.pop("sketch"), rtol=1e-5, atol=1e-5)
        for name in ("mean", "std", "rms"):
            assert ours.pop(name) == pytest.approx(theirs.pop(name), rel=1e-6, abs=1e-8)
        assert ours == theirs


def test_doctor_says_which_is_in_use() -> None:
    assert output_of(_DOCTOR)["data"]["system"]["statistics"].startswith(f"kernel: {KERNELS[0]}")
    assert output_of(_WITHOUT + _DOCTOR)["data"]["system"]["statistics"].startswith(
        "kernel: numpy (the native one is not built"
    )
