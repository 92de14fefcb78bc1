"""The row buffer: preallocated columns into which tensors are measured, one row each."""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tenterhook.stats.layout import (
    COMPLEX32,
    DTYPE_CODES,
    GROUP_DIGEST,
    GROUP_SKETCH,
    GROUP_STATISTICS,
    SKETCH_SIZE,
    STATISTICS,
)
from tenterhook.stats.merging import as_description
from tenterhook.stats.parts import Deferred
from tenterhook.stats.twin import TwinRows

try:
    from tenterhook.stats import _kernel
except ImportError:  # built without a compiler: the NumPy twin gives the same results
    _kernel = None

__all__ = ["KERNEL", "KERNELS", "THREADED_NUMEL", "RowBuffer", "describe", "set_threads", "threads"]

KERNELS: tuple[str, ...] = (*(_kernel.variants() if _kernel else ()), "numpy")
"""The kernels that this machine can run, the fastest first."""

KERNEL: str = KERNELS[0]
"""The kernel in use: ``"native avx512"``, ``"native avx2"``, ``"native"`` or ``"numpy"``."""


THREADED_NUMEL = 4 * 65536
"""Elements from which on a native kernel uses several threads, where it has been told to."""


def set_threads(count: int) -> None:
    """Say how many threads measure a large tensor, the calling one among them; the results are the same to the bit.

    They are started when they are first needed and sleep in between. While one tensor is measured by several threads, other
    Python threads measure theirs alone. What ``OMP_NUM_THREADS`` says holds until this is called, or else 1; the torch backend
    calls it with ``torch.get_num_threads()``. The NumPy twin has one thread.

    Args:
        count: 1 or more; more than 64 are as 64.

    Raises:
        ValueError: the count is less than 1.
    """
    if _kernel is not None:
        _kernel.set_threads(count)
    elif count < 1:
        raise ValueError(f"the number of threads must be 1 or more, got {count}")


def threads() -> int:
    """Return how many threads measure a large tensor."""
    return 1 if _kernel is None else _kernel.threads()


def _threads_of_environment() -> int:
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # one number for each level of nesting
    return max(1, int(first)) if first.isdecimal() else 1


set_threads(_threads_of_environment())


class _MeasureFlat(Protocol):
    def __call__(self, row: int, address: int, dtype_code: int, numel: int, offset: int = 0, /) -> bool: ...


class _Measure(Protocol):
    def __call__(
        self,
        row: int,
        address: int,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int = 0,
        /,
    ) -> bool: ...


class RowBuffer:
    """Columns for the statistics, sketches and digests of a fixed number of tensors.

    Measuring writes straight into the columns and allocates nothing. Null is NaN: min, max, mean, std, rms and absmax are over
    the finite values, so NaN cannot be one of them; it stands where there are none. Counts are whole numbers in float64, exact
    to 2**53. Two threads may measure into different rows at the same time; the GIL is released for tensors over 32 KiB. How many
    threads measure one tensor is for :func:`set_threads` to say.

    Args:
        capacity: number of rows.
        sketch: whether to take sketches.
        digest: whether to take digests.
        kernel: one of ``KERNELS``; the fastest by default.

    Attributes:
        capacity: number of rows.
        kernel: the kernel in use.
        statistics: float64 (capacity, 11), columns as in ``STATISTICS``.
        sketches: float32 (capacity, 64).
        digests: uint64 (capacity,).
        valid: uint8 (capacity,): which groups of the row are filled, ``GROUP_STATISTICS | GROUP_SKETCH | GROUP_DIGEST``; 0 for
            a row that was never measured or whose dtype is not supported.
        groups: what a row gets, the same bits.
        deferred: what has been ordered of devices for rows of this buffer and is not in them yet, by device.
        measure_flat: ``measure_flat(row, address, dtype_code, numel, offset=0) -> bool`` measures ``numel`` contiguous
            elements at ``address``: the cheapest call, positional arguments only. ``dtype_code`` is from ``DTYPE_CODES``;
            False for a code that is none.
        measure: ``measure(row, address, dtype, shape, strides, offset=0) -> bool`` measures strided memory, ``strides`` in
            elements (0 and negative ones too), ``address`` that of the first element in logical order; positional arguments
            only. False, and ``valid[row] = 0``, where the dtype is not supported.

    ``offset`` is the flat index of the first element, for a contiguous shard of a larger flat tensor; only the sketch looks at
    it. The memory must hold the elements and stay alive during the call.

    Raises:
        ValueError: the kernel is not one of ``KERNELS``.
    """

    measure_flat: _MeasureFlat
    measure: _Measure

    def __init__(self, capacity: int, *, sketch: bool = True, digest: bool = True, kernel: str | None = None) -> None:
        self.capacity = capacity
        self.groups = GROUP_STATISTICS | GROUP_SKETCH * sketch | GROUP_DIGEST * digest
        self.deferred: dict[Hashable, Deferred] = {}
        self.kernel = KERNEL if kernel is None else kernel
        self.statistics = np.full((capacity, len(STATISTICS)), np.nan)
        self.sketches = np.zeros((capacity, SKETCH_SIZE), np.float32)
        self.digests = np.zeros(capacity, np.uint64)
        self.valid = np.zeros(capacity, np.uint8)
        if self.kernel not in KERNELS:
            raise ValueError(f"no kernel {self.kernel!r} here; choose one of {', '.join(map(repr, KERNELS))}")
        sketches, digests = self.sketches if sketch else None, self.digests if digest else None
        if _kernel is None or self.kernel == "numpy":
            rows = TwinRows(self.statistics, sketches, digests, self.valid)
        else:
            rows = _kernel.Rows(
                self.kernel,
                capacity,
                _address(self.statistics),
                0 if sketches is None else _address(sketches),
                0 if digests is None else _address(digests),
                _address(self.valid),
                DTYPE_CODES,
                (self.statistics, self.sketches, self.digests, self.valid),
            )
        self.measure_flat = rows.measure_flat
        self.measure = rows.measure

    def send(self) -> None:
        """Begin to bring over what devices have measured so far, without waiting for them."""
        for deferred in self.deferred.values():
            deferred.send()

    def settle(self) -> dict[int, str]:
        """Wait for what devices have measured and fill in its rows.

        Returns:
            For each row whose measurement is lost, because its device has failed, the reason.
        """
        lost: dict[int, str] = {}
        for deferred in self.deferred.values():
            lost |= deferred.settle()
        self.deferred.clear()
        return lost

    def measure_array(self, row: int, array: np.ndarray, offset: int = 0) -> bool:
        """Measure an array of any shape and strides, also of ml_dtypes' bfloat16 and float8, and of ``layout.COMPLEX32``.

        Args:
            row: where to write, 0 to capacity - 1.
            array: any shape; copied only where its byte order is foreign or its strides are no multiple of its items.
            offset: flat index of the first element, for the sketch of a shard.

        Returns:
            False where the dtype is not supported.

        Raises:
            IndexError: the row is outside the buffer.
        """
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        size = array.dtype.itemsize
        if size and any(stride % size for stride in array.strides):
            array = array.copy()
        strides = tuple(stride // size for stride in array.strides) if size else array.strides
        name = "complex32" if array.dtype == COMPLEX32 else array.dtype.name
        return self.measure(row, _address(array), name, array.shape, strides, offset)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def describe(array: npt.ArrayLike, offset: int = 0) -> dict[str, Any]:
    """Describe an array: its statistics by name, its sketch and its digest.

    Args:
        array: any shape, or what ``np.asarray`` makes one of; any of the dtypes in ``DTYPE_CODES``.
        offset: flat index of the first element, for the sketch of a contiguous shard of a larger tensor.

    Returns:
        The names in ``STATISTICS`` (counts as int, the others float or None where null), ``"sketch"`` (float32 (64,)) and
        ``"digest"`` (int).

    Raises:
        TypeError: the dtype is not supported.
    """
    buffer, array = RowBuffer(1), np.asarray(array)
    if not buffer.measure_array(0, array, offset):
        raise TypeError(f"no statistics for dtype {array.dtype.name}; supported are {', '.join(DTYPE_CODES)}")
    described = as_description(buffer.statistics[0])
    described["sketch"] = buffer.sketches[0]
    described["digest"] = int(buffer.digests[0])
    return described
