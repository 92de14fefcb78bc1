"""Measurements that have been ordered of a device, and come over in parcels.

A parcel is a piece of device memory: small tensors are copied to it and measured on the host later, by the kernel that
measures tensors of the host; of large ones the device measures parts, and leaves a record of each. One transfer a step
brings a parcel over, or one where it is full. How memory is got, filled and brought over is for the backend to say, which
derives from :class:`ParcelRows`; what lies where, and how rows are made of it, is the same for all and stands here.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import numpy as np

from tenterhook.stats.layout import SKETCH_SIZE
from tenterhook.stats.parts import PART_COUNTS, PART_SUMS, Part, parts_row
from tenterhook.stats.rows import RowBuffer

__all__ = ["COUNTS_BYTES", "SUMS", "Parcel", "ParcelRows", "aligned", "pieces", "record_bytes"]

_ALIGNED = 64
_SENT = 4  # parcels on their way at once; with the one being filled they bound the memory of a device


def aligned(size: int) -> int:
    """Round a number of bytes up to where the next thing in a parcel may begin."""
    return -(-size // _ALIGNED) * _ALIGNED


COUNTS_BYTES = aligned(8 * len(PART_COUNTS))
"""Where in a record the sums begin, after the counts."""

SUMS = len(PART_SUMS) + SKETCH_SIZE
"""How many real numbers a record has."""


def record_bytes(real_bytes: int) -> int:
    """Return the size of a record whose real numbers have so many bytes."""
    return COUNTS_BYTES + aligned(SUMS * real_bytes)


class Parcel:
    """What lies in a piece of device memory.

    Args:
        size: bytes that it has room for.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        # Plain numbers one after the other: objects for each tensor would keep the garbage collector busy.
        self.copied: list[int] = []  # row, place, dtype's code, elements, offset, groups
        self.measured: list[int] = []  # row, place, parts, elements, bytes, groups

    def take(self, size: int) -> int | None:
        """Set so many bytes apart and return their place; None where it is full."""
        start = self.used
        if start + size > self.size:
            return None
        self.used = start + aligned(size)
        return start

    def rows(self) -> list[int]:
        """Return the numbers of the rows that are made of it."""
        return self.copied[::6] + self.measured[::6]

    def fill(self, rows: RowBuffer, memory: np.ndarray, real: np.dtype) -> None:
        """Fill in its rows.

        Args:
            rows: where they are.
            memory: its bytes, on the host, uint8 of one dimension, contiguous.
            real: of the numbers in the records.
        """
        address = memory.ctypes.data
        for row, start, code, numel, offset, groups in _in_turn(self.copied, 6):
            rows.measure_flat(row, address + start, code, numel, offset)
            rows.valid[row] &= groups
        record = record_bytes(real.itemsize)
        for row, start, parts, numel, size, groups in _in_turn(self.measured, 6):
            records = _records(memory[start:][: parts * record], parts, real)
            parts_row(rows, row, records, numel=numel, size=size, groups=groups)


_P = TypeVar("_P", bound=Parcel)


class ParcelRows(abc.ABC, Generic[_P]):
    """Measurements that have been ordered of one device for the rows of one buffer (:class:`tenterhook.stats.parts.Deferred`).

    As everything of a row buffer, it is used by one thread at a time.

    Args:
        rows: the buffer.
        real: what the device carries sums in: float64, or float32 where it has no other.
    """

    def __init__(self, rows: RowBuffer, real: np.dtype) -> None:
        self._rows = rows
        self._real = real
        self._record = record_bytes(real.itemsize)
        self._open: _P | None = None
        self._sent: list[_P] = []
        self._lost: dict[int, str] = {}

    @abc.abstractmethod
    def _begin(self, size: int) -> _P:
        """Return a new parcel with room for at least so many bytes."""

    @abc.abstractmethod
    def _dispatch(self, parcel: _P) -> None:
        """Begin to bring a parcel over, without waiting for the device."""

    @abc.abstractmethod
    def _arrived(self, parcel: _P) -> np.ndarray:
        """Wait for a parcel and return its bytes; RuntimeError where the device has failed."""

    @abc.abstractmethod
    def _unseen(self) -> AbstractContextManager[Any]:
        """Keep operations of ours from graphs and from all who watch the user's operations."""

    def _reserve(self, size: int) -> tuple[_P, int]:
        """Return the parcel to write so many bytes to, and their place in it."""
        start = None if self._open is None else self._open.take(size)
        if start is None:
            self._send()
            while len(self._sent) >= _SENT:
                self._bring(self._sent.pop(0))
            self._open = self._begin(size)
            start = self._open.take(size)
        assert self._open is not None and start is not None
        return self._open, start

    def send(self) -> None:
        """Begin to bring over what has been ordered, once the streams that it was ordered on come to it."""
        with self._unseen():
            self._send()

    def settle(self) -> dict[int, str]:
        """Fill in the rows; returns those that are lost and why."""
        with self._unseen():
            self._send()
            while self._sent:
                self._bring(self._sent.pop(0))
        lost, self._lost = self._lost, {}
        return lost

    def _send(self) -> None:
        parcel, self._open = self._open, None
        if parcel is not None:
            self._sent.append(parcel)
            self._dispatch(parcel)

    def _bring(self, parcel: _P) -> None:
        """Wait for a parcel and fill in its rows."""
        try:
            memory = self._arrived(parcel)
        except RuntimeError as error:  # the device has failed: what it holds is lost, the other rows are not
            why = f"lost with its device: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
            self._lost.update(dict.fromkeys(parcel.rows(), why))
            return
        parcel.fill(self._rows, memory, self._real)


def pieces(
    tensor: Any, shape: tuple[int, ...], size: int, *, contiguous: bool, flat: Callable[[Any], Any]
) -> Iterator[Any]:
    """Cut a tensor into contiguous pieces of ``size`` elements in logical order.

    One that is not contiguous is copied piece by piece, unless an index of its first dimension holds more than a piece: then it
    is copied as a whole.

    Args:
        tensor: anything with slices, its elements strided.
        shape: its shape.
        size: elements of a piece; the last one may be shorter.
        contiguous: whether it is.
        flat: makes a contiguous tensor of one dimension of what it is given.
    """
    numel = math.prod(shape)
    rows = shape[0] if shape else 0
    if contiguous or rows < 2 or numel // rows > size:
        whole = flat(tensor)
        for start in range(0, numel, size):
            yield whole[start : start + size] if numel > size else whole
        return
    width = numel // rows
    for start in range(0, numel, size):
        end = min(start + size, numel)
        first, last = start // width, -(-end // width)
        yield flat(tensor[first:last])[start - first * width : end - first * width]


def _in_turn(numbers: list[int], width: int) -> Iterator[tuple[int, ...]]:
    """Take so many at a time."""
    return zip(*[iter(numbers)] * width, strict=True)


def _records(memory: np.ndarray, parts: int, real: np.dtype) -> list[Part]:
    records = memory.reshape(parts, -1)
    counts = np.ascontiguousarray(records[:, : 8 * len(PART_COUNTS)]).view(np.int64)
    sums = np.ascontiguousarray(records[:, COUNTS_BYTES:][:, : SUMS * real.itemsize]).view(real).astype(np.float64)
    return list(zip(counts, sums, strict=True))
