"""What a device gives back of one part of a large tensor, and the row that the parts of a tensor make.

A device cannot be asked in between, so it leaves sums of each part in a record of fixed size, and the division, the roots and
the merging are done here, in float64. Nothing in this module knows a framework.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

from tenterhook.stats.hashing import finish_digest
from tenterhook.stats.layout import GROUP_DIGEST, GROUP_SKETCH, GROUP_STATISTICS, SKETCH_SIZE, STATISTICS
from tenterhook.stats.merging import merge_statistics

__all__ = ["PART_COUNTS", "PART_SIZE", "PART_SUMS", "Deferred", "DeferredRows", "Part", "parts_row"]

PART_SIZE = 1 << 20
"""Elements of a part; of every dtype whole pages of the digest and whole blocks of the sketch."""

PART_COUNTS = ("finite", "nans", "posinfs", "neginfs", "zeros", "cells")
"""Whole numbers of a record, int64: how many values of each kind, and the sum of the digest's cells modulo 2**64."""

PART_SUMS = ("low", "high", "scale", "shift", "sum", "squares")
"""Real numbers of a record: least and greatest finite value; a power of two; and with ``y = x / scale - shift`` over the finite
values, the sums of ``y`` and of its square. After them the sketch's 64 sums, also divided by the scale."""

_SCALE = PART_SUMS.index("scale")

Part = tuple[np.ndarray, np.ndarray]
"""Counts, int64 (6,), and sums, float64 (70,), of one part."""


class Deferred(Protocol):
    """Measurements of one device for one row buffer that have been ordered and are not yet in their rows."""

    def send(self) -> None:
        """Begin to bring them over, without waiting for the device."""
        ...

    def settle(self) -> dict[int, str]:
        """Wait for them and fill in their rows; returns for each row that is lost the reason."""
        ...


class DeferredRows(Protocol):
    """The columns of a row buffer, as somebody who fills in rows later sees them."""

    statistics: np.ndarray
    sketches: np.ndarray
    digests: np.ndarray
    valid: np.ndarray
    deferred: dict[Hashable, Deferred]


def parts_row(rows: DeferredRows, row: int, parts: Sequence[Part], *, numel: int, size: int, groups: int) -> None:
    """Fill in a row from the records of a tensor's parts.

    Args:
        rows: where the row is.
        row: its number.
        parts: the records of all parts, in order.
        numel: elements of the tensor.
        size: bytes of the tensor.
        groups: what the records hold and the row shall have, bits of ``RowBuffer.valid``.
    """
    table = np.array([_statistics(counts, sums) for counts, sums in parts])
    rows.statistics[row] = table[0] if len(table) == 1 else merge_statistics(table)
    rows.statistics[row, 0] = numel  # the counts of one that was written to meanwhile may not add up
    if groups & GROUP_SKETCH:
        with np.errstate(over="ignore", invalid="ignore"):  # a bucket beyond float32 is infinite, as documented
            rows.sketches[row] = sum(sums[len(PART_SUMS) :][:SKETCH_SIZE] * sums[_SCALE] for _, sums in parts)
    if groups & GROUP_DIGEST:
        rows.digests[row] = finish_digest(size, sum(int(counts[5]) for counts, _ in parts))
    rows.valid[row] = GROUP_STATISTICS | groups


def _statistics(counts: np.ndarray, sums: np.ndarray) -> np.ndarray:
    finite, nans, posinfs, neginfs, zeros = (int(count) for count in counts[:5])
    row = np.full(len(STATISTICS), np.nan)
    row[0] = finite + nans + posinfs + neginfs
    row[7:] = nans, posinfs, neginfs, zeros
    if not finite:
        return row
    low, high, scale, shift, total, squares = sums[: len(PART_SUMS)].tolist()
    rest = total / finite
    mean, std = shift + rest, math.sqrt(max(squares / finite - rest * rest, 0.0))
    if low == high:
        mean, std = low / scale, 0.0
    row[1:7] = low, high, mean * scale, std * scale, math.hypot(mean, std) * scale, max(-low, high) + 0.0
    return row
