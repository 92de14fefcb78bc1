"""Statistics, sketches and digests of arrays and of raw memory; knows no framework."""

from __future__ import annotations

from tenterhook.stats.layout import (
    DTYPE_CODES,
    GROUP_DIGEST,
    GROUP_SKETCH,
    GROUP_STATISTICS,
    SKETCH_SIZE,
    STATISTICS,
)
from tenterhook.stats.merging import merge, merge_statistics
from tenterhook.stats.rows import KERNEL, KERNELS, THREADED_NUMEL, RowBuffer, describe, set_threads, threads
from tenterhook.stats.sketch import block_hashes, merge_sketches, projection, relative_distance

__all__ = [
    "DTYPE_CODES",
    "GROUP_DIGEST",
    "GROUP_SKETCH",
    "GROUP_STATISTICS",
    "KERNEL",
    "KERNELS",
    "SKETCH_SIZE",
    "STATISTICS",
    "THREADED_NUMEL",
    "RowBuffer",
    "block_hashes",
    "describe",
    "merge",
    "merge_sketches",
    "merge_statistics",
    "projection",
    "relative_distance",
    "set_threads",
    "threads",
]
