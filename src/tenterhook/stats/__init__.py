"""Statistics and sketches of arrays."""

from __future__ import annotations

__all__ = ["SKETCH_SIZE", "STATISTICS"]

STATISTICS = (
    "numel",
    "min",
    "max",
    "mean",
    "std",
    "rms",
    "absmax",
    "nan_count",
    "posinf_count",
    "neginf_count",
    "zero_count",
)
"""The basic statistics, in the order of their columns."""

SKETCH_SIZE = 64
"""Number of float32 buckets in a sketch."""
