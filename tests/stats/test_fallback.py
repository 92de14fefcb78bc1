"""Where no compiler was, NumPy does the work of the kernel; ``doctor`` says so, and nothing else changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tenterhook.stats import KERNELS

pytestmark = pytest.mark.skipif(KERNELS == ("numpy",), reason="the kernel is not built here: only the twin exists")

ROOT = Path(__file__).parents[2]
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

class Give(torch.nn.Module):
    def forward(self, x):
        return x

given = []
base = torch.arange(-300.0, 300.0).view(20, 30)
for dtype in vars(torch).values():
    if isinstance(dtype, torch.dtype) and (dtype in (torch.bool, torch.complex32) or str(dtype)[6:] in stats.DTYPE_CODES):
        for tensor in (base, base.t()[::3], base[3:3], base[2, 2], base[:1].expand(9, 30)):
            given.append(tensor.to(dtype) if str(dtype) != "torch.float8_e8m0fnu" else tensor.abs().to(dtype))
bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
given += [bits.view(torch.float16), bits.view(torch.bfloat16), bits.view(torch.float8_e4m3fn), bits.view(torch.float8_e5m2)]
given += [torch.tensor([1e-45, -1e-40, 0.0, torch.nan, torch.inf, -torch.inf, 3e38]), 1e3 + 1e-3 * torch.randn(5000)]
given += [torch.tensor([5e-324, 1e-310, 1.7e308, -1.7e308], dtype=torch.float64), 1e8 + torch.randn(300_000).double()]
given += [torch.tensor([-(2**63), 2**63 - 1]), torch.zeros(2, device="meta"), torch.eye(3).to_sparse()]
give = Give()
with th.record(give, kinds=("output",)) as odd:
    for tensor in given:
        give(tensor)
assert odd._capture.failure is None
tables = {}
for name in ("values", "calls"):
    tables[name] = rec.table(name).to_pylist() + odd.table(name).to_pylist()
for call in tables["calls"]:
    del call["start_ns"], call["duration_ns"]
print(json.dumps({"kernel": stats.KERNEL, "threads": stats.threads(), **tables}, default=str))
"""

_DOCTOR = "from tenterhook.cli import main; main(['doctor', '--json'])"


def output_of(program: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-W", "ignore:ComplexHalf:UserWarning", "-W", "ignore:Sparse:UserWarning", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_a_recording_without_the_kernel_says_the_same() -> None:
    native, numpy = output_of(_RECORD), output_of(_WITHOUT + _RECORD)
    assert (native["kernel"], numpy["kernel"], numpy["threads"]) == (KERNELS[0], "numpy", 1)
    assert native["calls"] == numpy["calls"]
    assert len(native["values"]) == len(numpy["values"]) > 130
    for ours, theirs in zip(native["values"], numpy["values"], strict=True):
        assert ours.keys() == theirs.keys()
        sketches, sizes = [row.pop("sketch") for row in (ours, theirs)], [row.pop("rms") for row in (ours, theirs)]
        if sizes[0] is None:
            assert sizes[1] is None
        else:
            rounding = 1e-6 * sizes[1] * max(1, theirs["numel"] / 64)
            np.testing.assert_allclose(*sketches, rtol=1e-6, atol=rounding if np.isfinite(rounding) else 0)
            assert sizes[0] == pytest.approx(sizes[1], rel=1e-6)
            for name in ("mean", "std"):
                assert ours.pop(name) == pytest.approx(theirs.pop(name), rel=2e-6, abs=1e-7 * sizes[1])
            if "complex" in ours["dtype"]:  # rounding of magnitudes
                for name in ("min", "max", "absmax"):
                    assert ours.pop(name) == pytest.approx(theirs.pop(name), rel=1e-15)
        assert ours == theirs


def test_doctor_says_which_is_in_use() -> None:
    assert output_of(_DOCTOR)["data"]["system"]["statistics"].startswith(f"kernel: {KERNELS[0]}")
    assert output_of(_WITHOUT + _DOCTOR)["data"]["system"]["statistics"].startswith(
        "kernel: numpy (the native one is not built"
    )


def test_it_is_built_and_works_where_there_is_no_compiler(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", "built"]
    none = {**os.environ, "CC": "no-such-compiler"}
    built = subprocess.run(command, cwd=tmp_path, env=none, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert not list(tmp_path.rglob("*.so"))
    there = {**os.environ, "PYTHONPATH": str(tmp_path / "built")}
    program = "import tenterhook; print(tenterhook.__file__);" + _DOCTOR
    done = subprocess.run([sys.executable, "-c", program], env=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    place, _, answer = done.stdout.partition("\n")
    assert Path(place).is_relative_to(tmp_path / "built")
    assert json.loads(answer)["data"]["system"]["statistics"].startswith("kernel: numpy (the native one is not built")
