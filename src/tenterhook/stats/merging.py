"""Merging what was measured of disjoint parts of one tensor: chunks of a long one, or shards on several ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tenterhook.stats.layout import STATISTICS
from tenterhook.stats.sketch import merge_sketches

__all__ = ["merge", "merge_statistics"]

_NUMEL, _MIN, _MAX, _MEAN, _STD, _RMS, _ABSMAX = range(7)
_COUNTS = slice(7, 11)
_NONFINITE = slice(7, 10)


def merge_statistics(rows: np.ndarray) -> np.ndarray:
    """Merge rows of statistics of disjoint parts into the row of the whole.

    Counts, min, max and absmax are exact; mean, std and rms are combined in float64 by the pairwise formulas of Chan, Golub &
    LeVeque (1983), so they hold to rounding however the parts differ in size and mean.

    Args:
        rows: float64 (parts, 11), columns as in ``STATISTICS``, null as NaN.

    Returns:
        float64 (11,).
    """
    rows = np.asarray(rows, np.float64).reshape(-1, len(STATISTICS))
    merged = np.full(len(STATISTICS), np.nan)
    merged[_NUMEL] = rows[:, _NUMEL].sum()
    merged[_COUNTS] = rows[:, _COUNTS].sum(axis=0)
    weights = rows[:, _NUMEL] - rows[:, _NONFINITE].sum(axis=1)
    rows, weights = rows[weights > 0], weights[weights > 0]
    if not len(rows):
        return merged
    merged[_MIN] = rows[:, _MIN].min()
    merged[_MAX] = rows[:, _MAX].max()
    merged[_ABSMAX] = rows[:, _ABSMAX].max()
    # a power of two near the largest magnitude, so that no square over- or underflows
    scale = 2.0 ** -min(max(math.frexp(merged[_ABSMAX])[1], -1000), 1000)
    shares = weights / weights.sum()
    means = rows[:, _MEAN] * scale
    mean = means[0] + float(((means - means[0]) * shares).sum())
    spread = float(((rows[:, _STD] * scale) ** 2 * shares).sum() + ((means - mean) ** 2 * shares).sum())
    merged[_MEAN] = mean / scale
    merged[_STD] = math.sqrt(spread) / scale
    merged[_RMS] = math.sqrt(spread + mean * mean) / scale
    return merged


def merge(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge descriptions (as ``describe`` gives them) of disjoint parts of one tensor.

    Args:
        rows: statistics by name, None where null, and ``sketch``, taken with each part's ``offset``.

    Returns:
        The description of the whole; ``digest`` is None, because digests cannot be merged, and ``sketch`` is None where a
        part has none.
    """
    table = np.array(
        [[math.nan if row[name] is None else row[name] for name in STATISTICS] for row in rows], np.float64
    )
    described = as_description(merge_statistics(table))
    sketches = [row.get("sketch") for row in rows]
    complete = bool(sketches) and all(sketch is not None for sketch in sketches)
    described["sketch"] = merge_sketches(np.array(sketches, np.float64)) if complete else None
    described["digest"] = None
    return described


def as_description(row: np.ndarray) -> dict[str, Any]:
    """Turn a row of statistics into a dict by name: counts as int, null as None.

    Args:
        row: float64 (11,).
    """
    counted = {0, 7, 8, 9, 10}
    return {
        name: int(value) if at in counted else (None if math.isnan(value) else float(value))
        for at, (name, value) in enumerate(zip(STATISTICS, row, strict=True))
    }
