"""The sketch: a fixed random projection of a flattened tensor to 64 numbers.

Two sketches estimate the distance of the two tensors: ``|S(a) - S(b)|**2`` is ``|a - b|**2`` in the mean. The definition, with
its sources and error bound, is in ``docs/statistics.md``; in short, with ``i`` the row-major index of an element:

* ``block = i // 64``, ``lane = i % 64``;
* ``h = mix64((block + 1) * GOLDEN)``; the element's sign is bit ``lane`` of ``h`` (set: minus);
* the element's bucket is ``lane ^ (h * ROTATION >> 58)``: a block fills every bucket once, in an order of its own.

Signs come from AMS (Alon, Matias & Szegedy 1996), buckets from the count sketch (Charikar, Chen & Farach-Colton 2002).
"""

from __future__ import annotations

import math

import numpy as np

from tenterhook.stats.hashing import GOLDEN, mix64
from tenterhook.stats.layout import SKETCH_SIZE

__all__ = ["block_hashes", "merge_sketches", "projection", "relative_distance", "sketch_flat"]

_ROTATION = np.uint64(0xD6E8FEB86659FD93)  # odd: makes bucket bits out of the sign bits without tying them to any one
_BLOCKS_AT_ONCE = 4096  # bounds the memory of a sketch: 256 Ki elements


def block_hashes(start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the sign bits and the bucket masks of consecutive blocks.

    What a device needs to sketch on its own: 72 bits for each 64 elements, which it can keep between calls.

    Args:
        start: number of the first block (flat index // 64).
        count: number of blocks.

    Returns:
        Sign bits, uint64 (count,), bit ``lane`` set for minus; and masks, uint8 (count,), 0 to 63, to XOR with the lane.
    """
    bits = mix64(np.arange(start + 1, start + count + 1, dtype=np.uint64) * GOLDEN)
    return bits, ((bits * _ROTATION) >> np.uint64(58)).astype(np.uint8)


def projection(start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the bucket and the sign of consecutive elements.

    Args:
        start: flat (row-major) index of the first element.
        count: number of elements.

    Returns:
        Buckets, int64 (count,), 0 to 63; and signs, float32 (count,), -1 or +1.
    """
    first = start // SKETCH_SIZE
    blocks = -(-(start + count) // SKETCH_SIZE) - first
    bits, masks = block_hashes(first, blocks)
    lanes = np.arange(SKETCH_SIZE, dtype=np.uint64)
    buckets = lanes.astype(np.int64) ^ masks[:, None].astype(np.int64)
    signs = np.float32(1) - np.float32(2) * ((bits[:, None] >> lanes) & np.uint64(1)).astype(np.float32)
    inside = slice(start - first * SKETCH_SIZE, start - first * SKETCH_SIZE + count)
    return buckets.reshape(-1)[inside], signs.reshape(-1)[inside]


def sketch_flat(values: np.ndarray, offset: int = 0) -> np.ndarray:
    """Sketch real values, as float64 sums; NaN and infinities count as 0.

    Args:
        values: real numbers, one dimension, in row-major order; whatever casts to float64.
        offset: flat index of the first value, for a contiguous shard of a larger flat tensor.

    Returns:
        float64 (64,); a recording stores it as float32.
    """
    total = np.zeros(SKETCH_SIZE, np.float64)
    size = SKETCH_SIZE * _BLOCKS_AT_ONCE
    for start in range(0, len(values), size):
        with np.errstate(invalid="ignore"):  # signalling NaN
            part = values[start : start + size].astype(np.float64)
        part[~np.isfinite(part)] = 0.0
        buckets, signs = projection(offset + start, len(part))
        total += np.bincount(buckets, weights=part * signs, minlength=SKETCH_SIZE)
    return total


def merge_sketches(sketches: np.ndarray) -> np.ndarray:
    """Add the sketches of disjoint parts of one tensor, each taken with the offset of its part.

    Args:
        sketches: float32 (parts, 64).

    Returns:
        float32 (64,): the sketch of the whole.
    """
    return np.asarray(sketches, np.float64).reshape(-1, SKETCH_SIZE).sum(axis=0).astype(np.float32)


def relative_distance(sketch: np.ndarray, other: np.ndarray) -> float:
    """Estimate the relative L2 distance ``|a - b| / max(|a|, |b|)`` of two tensors from their sketches.

    The relative standard error is about 9 % for two tensors whose difference is spread over many elements (see
    ``docs/statistics.md``); relative distances below about 1e-6 drown in float32's rounding.

    Args:
        sketch: float32 (64,).
        other: float32 (64,).

    Returns:
        The estimate; 0 where both are all zero, NaN where a bucket of either overflowed.
    """
    a, b = np.asarray(sketch, np.float64), np.asarray(other, np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    scale = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    return float(np.linalg.norm(a - b)) / scale if scale else 0.0
