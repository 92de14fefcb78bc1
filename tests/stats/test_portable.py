"""The kernel's C, without Python, by each compiler and for each processor that can be had here, gives what the twin gives."""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tenterhook.stats import KERNELS, RowBuffer, layout
from tests.stats.arrays import KINDS, values
from tests.stats.same import assert_same_row, measured

SOURCE = Path(__file__).with_name("portable.c")
KERNEL = Path(layout.__file__).parent

COMPILERS = {
    "as built": ["cc", "-O3", "-std=c11", "-fno-math-errno"],
    "plain": ["cc", "-O0", "-std=c11"],
    "oldest x86-64": ["cc", "-O2", "-std=c11", "-march=x86-64", "-mno-avx"],
    "sanitised": ["cc", "-O1", "-g", "-std=c11", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "clang": ["clang", "-O3", "-std=c11", "-fno-math-errno"],
    "aarch64": ["aarch64-linux-gnu-gcc", "-O3", "-std=c11", "-fno-math-errno", "-static"],
}
RUNNERS = {"aarch64": ["qemu-aarch64"]}
NAMES = {"clang": ("clang", "clang-19", "clang-18", "clang-17", "clang-16", "clang-15", "clang-14")}


@pytest.fixture(scope="module", params=COMPILERS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Build the program; cross-built ones run in an emulator."""
    if request.param == "oldest x86-64" and platform.machine() != "x86_64":
        pytest.skip("this is no x86-64")
    first, *flags = COMPILERS[request.param]
    compiler = next(filter(None, map(shutil.which, NAMES.get(request.param, (first,)))), None)
    runner = RUNNERS.get(request.param, [])
    for needed in (compiler and first, *(shutil.which(name) and name for name in runner)):
        if needed is None:
            pytest.skip(f"{first} {' '.join(runner)} is not here")
    assert compiler is not None
    path = tmp_path_factory.mktemp("portable") / "program"
    command = [compiler, *flags, "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{KERNEL}", str(SOURCE), "-o", str(path)]
    built = subprocess.run([*command, "-lm"], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return [*runner, str(path)]


def rows_of(program: list[str], tensors: list[tuple[np.ndarray, int, int]]) -> list[list[RowBuffer]]:
    """Measure arrays, each with a number of threads and an offset; one row for each instruction set."""
    sent = b""
    for array, threads, offset in tensors:
        base, first = array, 0
        while isinstance(base.base, np.ndarray):
            base = base.base
        first = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        data = base.tobytes()
        code = layout.DTYPE_CODES[array.dtype.name]
        header = (code, threads, offset, array.ndim, first, len(data), 0, 0, *array.shape, *array.strides)
        sent += struct.pack(f"<{len(header)}q", *header) + data
    done = subprocess.run(program, input=sent, capture_output=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
    at, found = 0, []
    for _ in tensors:
        (count,) = struct.unpack_from("<q", done.stdout, at)
        at += 8
        rows = []
        for _ in range(count):
            row = RowBuffer(1)
            row.statistics[0] = np.frombuffer(done.stdout, np.float64, 11, at)
            row.sketches[0] = np.frombuffer(done.stdout, np.float32, 64, at + 88)
            row.digests[0] = struct.unpack_from("<Q", done.stdout, at + 344)[0]
            row.valid[0] = 7
            rows.append(row)
            at += 352
        found.append(rows)
    assert at == len(done.stdout)
    return found


def test_every_dtype_kind_and_layout(program: list[str]) -> None:
    rng = np.random.default_rng(5)
    tensors: list[tuple[np.ndarray, int, int]] = []
    for dtype in layout.DTYPES:
        for kind in KINDS:
            tensors.append((values(rng, dtype, 4200, kind), 1, 77))
        cube = values(rng, dtype, 9 * 10 * 50, "normal").reshape(9, 10, 50)
        views = [
            cube.transpose(2, 0, 1),
            cube[::-1, ::3, ::-2],
            np.broadcast_to(cube[:1, :, :1], cube.shape),
            cube[0, 0, 0:0],
        ]
        tensors += [(view, 1, 0) for view in views]
    for (array, _, offset), rows in zip(tensors, rows_of(program, tensors), strict=True):
        expected = measured("numpy", np.ascontiguousarray(array), offset)
        for row in rows:
            assert_same_row(row, expected, array)


def test_threads_change_no_bit(program: list[str]) -> None:
    rng = np.random.default_rng(6)
    array = values(rng, np.dtype(np.float32), 700_001, "masked")
    turned = values(rng, np.dtype(np.float16), 640 * 700, "normal").reshape(640, 700).T
    tensors = [(tensor, threads, 0) for tensor in (array, turned) for threads in (1, 2, 4)]
    found = rows_of(program, tensors)
    assert_same_row(found[0][0], measured("numpy", array), array)
    for alone, *others in (found[:3], found[3:]):
        for other in others:
            for one, two in zip(alone, other, strict=True):
                assert one.statistics.tobytes() == two.statistics.tobytes()
                assert one.sketches.tobytes() == two.sketches.tobytes()
                assert one.digests[0] == two.digests[0]


_LOAD = """
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
loader = ExtensionFileLoader("tenterhook.stats._kernel", sys.argv[1])
kernel = module_from_spec(spec_from_loader("tenterhook.stats._kernel", loader))
loader.exec_module(kernel)
print(kernel.variants())
"""


@pytest.mark.parametrize("minor", range(10, 16))
def test_one_build_serves_every_python(minor: int) -> None:
    """The limited API: what was built by this Python is loaded by those before and after it."""
    if KERNELS == ("numpy",):
        pytest.skip("the kernel is not built here: only the twin exists")
    from tenterhook.stats import _kernel

    assert ".abi3." in _kernel.__file__ or sys.platform == "win32"
    python = shutil.which(f"python3.{minor}")
    if python is None or subprocess.run([python, "-V"], capture_output=True, check=False).returncode:
        pytest.skip(f"Python 3.{minor} is not here")
    done = subprocess.run([python, "-c", _LOAD, _kernel.__file__], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (repr(_kernel.variants()), "")
