"""Measures the statistics kernel against a pure read of the same bytes.

    python benchmarks/kernel.py [--kernel "native avx2"] [--dtype float32] [--threads 2] [--seconds 1]
    python benchmarks/kernel.py --gain --threads 2     one thread against two, in turn

Reads and measurements take turns, so that both see the same machine; the ratio is the median over the pairs, and with ``--best``
that of the fastest read and the fastest measurement, for a machine that is busy with something else. The read is compiled for
this machine from ``read_floor.c``, called through the same kind of function call, and done by as many threads where the kernel
uses several. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tenterhook.stats import DTYPE_CODES, KERNEL, KERNELS, THREADED_NUMEL, RowBuffer, set_threads
from tenterhook.stats.layout import COMPLEX32, MEMORY

SIZES = {"64": 64, "4 K": 4096, "64 K": 65536, "1 M": 1 << 20, "8 M": 8 << 20, "32 M": 32 << 20}
GROUPS = {"statistics": (False, False), "+ sketch": (True, False), "+ digest": (False, True), "+ both": (True, True)}


def build_read(folder: str) -> Callable[[int, int, int], int]:
    """Compile the pure read and return it as a function of address, size in bytes and number of threads."""
    library = Path(folder) / "read_floor.so"
    source = Path(__file__).with_name("read_floor.c")
    subprocess.run(
        ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)], check=True
    )
    read = ctypes.CDLL(str(library))
    read.read_bytes.argtypes, read.read_bytes.restype = [ctypes.c_int64, ctypes.c_int64], ctypes.c_uint64
    read.read_together.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    read.read_together.restype = ctypes.c_uint64
    return lambda at, size, count: read.read_bytes(at, size) if count == 1 else read.read_together(at, size, count)


def aligned(numel: int, dtype: np.dtype) -> np.ndarray:
    """Make an array of normal values that begins on a cache line, as the frameworks' own do."""
    memory = np.empty(numel * dtype.itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + numel * dtype.itemsize].view(dtype)
    parts = array.view(np.float16) if dtype == COMPLEX32 else array  # NumPy has no such dtype that it could convert to
    parts[:] = np.random.default_rng(0).standard_normal(parts.size).astype(parts.dtype)
    return array


def seconds_of(call: Callable[[], object], repeats: int) -> float:
    """Time one call, as the mean over a few in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def compare(
    read: Callable[[], object], measure: Callable[[], object], budget: float, *, best: bool
) -> tuple[float, float, float]:
    """Return the read's and the measurement's seconds and their ratio, over interleaved pairs: medians, or of the best."""
    repeats = max(1, int(0.002 / max(seconds_of(measure, 3), 1e-7)))
    pairs: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(pairs) < 5 or time.perf_counter() - start < budget:
        pairs.append((seconds_of(read, repeats), seconds_of(measure, repeats)))
    reads, measures = zip(*pairs, strict=True)
    if best:
        return min(reads), min(measures), min(measures) / min(reads)
    ratio = statistics.median(m / r for r, m in pairs)
    return statistics.median(reads), statistics.median(measures), ratio


def print_gain(options: argparse.Namespace) -> None:
    """Print how many times faster several threads measure large tensors than one does, both in turn in one run."""
    code = DTYPE_CODES[options.dtype]
    print(f"{options.kernel}, {options.dtype}, statistics, sketch and digest: milliseconds")
    print(f"{'elements':>8} {'1 thread':>9} {f'{options.threads} threads':>10} {'gain':>6} {'quartiles':>12}")
    for name, numel in SIZES.items():
        if numel < THREADED_NUMEL:
            continue
        array = aligned(numel, MEMORY[code])
        measure, address = RowBuffer(1, kernel=options.kernel).measure_flat, array.ctypes.data

        def timed(
            threads: int, measure: Callable[..., bool] = measure, address: int = address, numel: int = numel
        ) -> float:
            set_threads(threads)
            return seconds_of(lambda: measure(0, address, code, numel), 3)

        pairs = [(timed(1), timed(options.threads))]  # warms up, too
        start = time.perf_counter()
        while len(pairs) < 12 or time.perf_counter() - start < options.seconds:
            pairs.append((timed(1), timed(options.threads)))
        alone, together = (1e3 * statistics.median(column) for column in zip(*pairs[1:], strict=True))
        low, gain, high = statistics.quantiles([one / several for one, several in pairs[1:]])
        print(f"{name:>8} {alone:>9.3f} {together:>10.3f} {gain:>5.2f}x {low:>5.2f} - {high:.2f}")


def main() -> None:
    """Print a table of microseconds and of ratios to the read."""
    parser = argparse.ArgumentParser(description="Measure the statistics kernel against a pure read of the same bytes.")
    parser.add_argument("--kernel", default=KERNEL, choices=KERNELS)
    parser.add_argument("--dtype", default="float32", choices=DTYPE_CODES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--best", action="store_true", help="compare the fastest of each instead of medians")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each figure")
    parser.add_argument("--gain", action="store_true", help="compare one thread with --threads (2) of them instead")
    options = parser.parse_args()
    if options.gain:
        options.threads = max(2, options.threads)
        print_gain(options)
        return
    code = DTYPE_CODES[options.dtype]
    set_threads(options.threads)
    by = "1 thread" if options.threads == 1 else f"{options.threads} threads from {THREADED_NUMEL} elements on"
    print(f"{options.kernel}, {options.dtype}, {by}: microseconds and ratio to a read of the same bytes")
    print(f"{'elements':>8} {'read us':>9} {'GB/s':>6} " + " ".join(f"{name:>18}" for name in GROUPS))
    with tempfile.TemporaryDirectory() as folder:
        read_bytes = build_read(folder)
        for name, numel in SIZES.items():
            array = aligned(numel, MEMORY[code])
            address, size = array.ctypes.data, array.nbytes
            cells, read_seconds = [], 0.0
            threads = options.threads if numel >= THREADED_NUMEL else 1
            for sketch, digest in GROUPS.values():
                measure = RowBuffer(1, sketch=sketch, digest=digest, kernel=options.kernel).measure_flat
                read_seconds, seconds, ratio = compare(
                    lambda address=address, size=size, threads=threads: read_bytes(address, size, threads),
                    lambda measure=measure, address=address, numel=numel: measure(0, address, code, numel),
                    options.seconds,
                    best=options.best,
                )
                cells.append(f"{seconds * 1e6:>10.2f} {ratio:>6.2f}x")
            print(f"{name:>8} {read_seconds * 1e6:>9.2f} {size / read_seconds / 1e9:>6.1f} " + " ".join(cells))


if __name__ == "__main__":
    main()
