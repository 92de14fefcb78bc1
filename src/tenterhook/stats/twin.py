"""The NumPy twin of the native kernel: the oracle of its tests, and its stand-in where no compiler was."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence

import numpy as np

from tenterhook.stats.float_mode import exact_subnormals
from tenterhook.stats.hashing import PAGE_BYTES, digest_cells, finish_digest
from tenterhook.stats.layout import (
    COMPLEX32,
    DTYPE_CODES,
    GROUP_DIGEST,
    GROUP_SKETCH,
    GROUP_STATISTICS,
    MEMORY,
    SKETCH_SIZE,
    STATISTICS,
)
from tenterhook.stats.merging import merge_statistics
from tenterhook.stats.sketch import sketch_flat

__all__ = ["TwinRows"]

_PART = 1 << 18  # elements at once: bounds the memory of one measurement


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """Cut an array into flat, contiguous parts in row-major order; no more than a part is copied at a time."""
    if array.flags.c_contiguous or array.size <= _PART:
        flat = np.ascontiguousarray(array).reshape(-1)
        for start in range(0, flat.size, _PART):
            yield flat[start : start + _PART]
        return
    for start in range(0, array.size, _PART):
        yield array.flat[start : start + _PART]


def _statistics(part: np.ndarray) -> np.ndarray:
    row = np.full(len(STATISTICS), np.nan)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        real = _magnitudes(part) if _is_complex(part) else part.astype(np.float64)
    finite = real[np.isfinite(real)]
    row[0] = len(real)
    row[7:] = np.isnan(real).sum(), (real == np.inf).sum(), (real == -np.inf).sum(), (real == 0).sum()
    if not len(finite):
        return row
    low, high = finite.min(), finite.max()
    absmax = max(abs(low), abs(high))
    # a power of two near the largest magnitude, so that no square over- or underflows
    scale = 2.0 ** -min(max(math.frexp(absmax)[1], -1000), 1000)
    finite = finite * scale
    rough = finite.mean()
    apart = finite - rough
    rest = apart.mean()
    mean = rough + rest
    std = math.sqrt(np.square(apart - rest).mean())
    rms = math.hypot(mean, std)
    row[1:7] = low, high, mean / scale, std / scale, rms / scale, absmax
    return row


def _is_complex(array: np.ndarray) -> bool:
    return array.dtype.kind == "c" or array.dtype == COMPLEX32


def _interleaved(part: np.ndarray) -> np.ndarray:
    """Give real and imaginary parts of complex numbers in turn."""
    return part.view(np.float16 if part.dtype == COMPLEX32 else np.real(part).dtype)


def _magnitudes(part: np.ndarray) -> np.ndarray:
    real, imaginary = _interleaved(part).astype(np.float64).reshape(-1, 2).T
    infinite = np.isinf(real) | np.isinf(imaginary)  # hypot says NaN where the other one is a signalling NaN
    return np.where(infinite, np.inf, np.hypot(real, imaginary))


class TwinRows:
    """Measures arrays into the columns of a row buffer, with the interface of the native kernel's ``Rows``.

    Args:
        statistics: float64 (capacity, 11).
        sketches: float32 (capacity, 64), or None for no sketches.
        digests: uint64 (capacity,), or None for no digests.
        valid: uint8 (capacity,).
    """

    def __init__(
        self, statistics: np.ndarray, sketches: np.ndarray | None, digests: np.ndarray | None, valid: np.ndarray
    ) -> None:
        self._statistics = statistics
        self._sketches = sketches
        self._digests = digests
        self._valid = valid

    def measure_flat(self, row: int, address: int, dtype_code: int, numel: int, offset: int = 0) -> bool:
        """Measure contiguous memory; see ``RowBuffer.measure_flat``."""
        self._check(row, offset)
        if numel < 0:
            raise ValueError(f"numel must not be negative, got {numel}")
        if not 0 <= dtype_code < len(MEMORY):
            self._valid[row] = 0
            return False
        dtype = MEMORY[dtype_code]
        return self._fill(row, _memory(address, numel * dtype.itemsize).view(dtype), offset)

    def measure(
        self, row: int, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> bool:
        """Measure strided memory; see ``RowBuffer.measure``."""
        self._check(row, offset)
        if len(shape) != len(strides):
            raise ValueError(f"shape has {len(shape)} dimensions, strides {len(strides)}")
        if any(size < 0 for size in shape):
            raise ValueError(f"sizes must not be negative, got {tuple(shape)}")
        if dtype not in DTYPE_CODES:
            self._valid[row] = 0
            return False
        kind = MEMORY[DTYPE_CODES[dtype]]
        if 0 in shape:
            return self._fill(row, np.empty(0, kind), offset)
        kept = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
        below = sum((size - 1) * stride for size, stride in kept if stride < 0)
        above = sum((size - 1) * stride for size, stride in kept if stride > 0)
        view = np.ndarray(
            tuple(size for size, _ in kept),
            kind,
            buffer=_memory(address + below * kind.itemsize, (above - below + 1) * kind.itemsize),
            offset=-below * kind.itemsize,
            strides=tuple(stride * kind.itemsize for _, stride in kept),
        )
        return self._fill(row, view, offset)

    def _check(self, row: int, offset: int) -> None:
        if not 0 <= row < len(self._valid):
            raise IndexError(f"row {row} is outside the buffer, which has {len(self._valid)} rows")
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")

    def _fill(self, row: int, array: np.ndarray, offset: int) -> bool:
        statistics, sketch, cells, done = [], np.zeros(SKETCH_SIZE), 0, 0
        with exact_subnormals():
            for part in _parts(array):
                statistics.append(_statistics(part))
                if self._sketches is not None:
                    by = 2 if _is_complex(part) else 1
                    sketch += sketch_flat(_interleaved(part) if by == 2 else part, by * (offset + done))
                if self._digests is not None:
                    cells += digest_cells(part.view(np.uint8), done * array.itemsize // PAGE_BYTES)
                done += len(part)
            self._statistics[row] = merge_statistics(np.array(statistics or [_statistics(array.reshape(-1))]))
            if self._sketches is not None:
                with np.errstate(over="ignore"):  # a bucket beyond float32 is infinite, as documented
                    self._sketches[row] = sketch
        filled = GROUP_STATISTICS | (GROUP_SKETCH if self._sketches is not None else 0)
        if self._digests is not None:
            filled |= GROUP_DIGEST
            self._digests[row] = finish_digest(array.size * array.itemsize, cells)
        self._valid[row] = filled
        return True


def _memory(address: int, size: int) -> np.ndarray:
    if not size:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
