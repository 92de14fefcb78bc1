"""Arrays for the tests: strategies over dtype, shape, layout and awkward values."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from tenterhook.stats.layout import DTYPES

__all__ = ["arrays", "bytes_of", "layouts", "values"]


def values(rng: np.random.Generator, dtype: np.dtype, size: int, kind: str) -> np.ndarray:
    """Draw ``size`` values of a dtype; ``kind`` names their character."""
    if dtype.kind == "b":
        return rng.random(size) < 0.5
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        low, high = (info.min, info.max) if kind == "bits" else (max(info.min, -5), 5)
        return rng.integers(low, high, size, dtype=dtype, endpoint=True)
    if kind == "bits":  # every pattern: NaN, infinities, subnormals, the largest magnitudes
        return rng.integers(0, 256, size * dtype.itemsize, dtype=np.uint8).view(dtype)
    if dtype.kind == "c":
        half = np.dtype(np.float32 if dtype.itemsize == 8 else np.float64)
        return values(rng, half, 2 * size, kind).view(dtype)
    x = rng.standard_normal(size)
    if kind == "relu":
        x = np.maximum(x, 0)
    elif kind == "cancelling":
        x = 1e3 + 1e-3 * x
    elif kind == "outlier":
        x = 1 + 1e-3 * x
        x[:1] = 1e4
    elif kind == "masked":
        x[rng.random(size) < 0.3] = -np.inf
        x[rng.random(size) < 0.01] = np.nan
    elif kind == "tiny":
        x = x * float(ml_dtypes.finfo(dtype).tiny)
    elif kind == "huge":
        x = x * (float(ml_dtypes.finfo(dtype).max) / 8)
    elif kind == "constant":
        x = np.full(size, 0.1)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


KINDS = ("normal", "relu", "cancelling", "outlier", "masked", "tiny", "huge", "constant", "bits")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Draw a shape, its strides in elements (negative, zero and overlapping ones too) and the place of the first element."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    steps = st.one_of(st.integers(-9, 9), st.sampled_from([0, 1, 64, -64]))
    strides = tuple(draw(steps) for _ in shape)
    if 0 in shape:
        return shape, strides, (0, 1)
    below = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if stride < 0)
    above = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if stride > 0)
    return shape, strides, (-below, above - below + 1)


@st.composite
def arrays(
    draw: st.DrawFn, sizes: st.SearchStrategy[int] | None = None, dtypes: Sequence[np.dtype] = DTYPES
) -> np.ndarray:
    """Draw a flat array of any supported dtype, or of some of them, and of any kind of values."""
    dtype = draw(st.sampled_from(dtypes))
    size = draw(sizes or st.one_of(st.integers(0, 200), st.integers(1900, 6500)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return values(rng, dtype, size, draw(st.sampled_from(KINDS)))


def bytes_of(array: np.ndarray) -> bytes:
    """Give the logical bytes of an array in row-major order."""
    return np.ascontiguousarray(array).tobytes()
