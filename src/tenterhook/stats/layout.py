"""Names, order and encoding of what is measured: the columns, the dtypes and the groups of a row."""

from __future__ import annotations

import ml_dtypes
import numpy as np

__all__ = [
    "COMPLEX32",
    "DTYPES",
    "DTYPE_CODES",
    "GROUP_DIGEST",
    "GROUP_SKETCH",
    "GROUP_STATISTICS",
    "MEMORY",
    "SKETCH_SIZE",
    "STATISTICS",
]

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

GROUP_STATISTICS = 1
"""Bit of ``RowBuffer.valid``: the row of ``statistics`` is filled."""

GROUP_SKETCH = 2
"""Bit of ``RowBuffer.valid``: the row of ``sketches`` is filled."""

GROUP_DIGEST = 4
"""Bit of ``RowBuffer.valid``: the entry of ``digests`` is filled."""

DTYPES: tuple[np.dtype, ...] = (
    np.dtype(np.float32),
    np.dtype(np.float64),
    np.dtype(np.float16),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2),
    np.dtype(ml_dtypes.float8_e4m3fnuz),
    np.dtype(ml_dtypes.float8_e5m2fnuz),
    np.dtype(np.int8),
    np.dtype(np.uint8),
    np.dtype(np.int16),
    np.dtype(np.uint16),
    np.dtype(np.int32),
    np.dtype(np.uint32),
    np.dtype(np.int64),
    np.dtype(np.uint64),
    np.dtype(np.bool_),
    np.dtype(np.complex64),
    np.dtype(np.complex128),
    np.dtype(ml_dtypes.float8_e8m0fnu),
)
"""The supported dtypes that NumPy has, or ml_dtypes; the place of each is its code, which the native kernel shares."""

COMPLEX32 = np.dtype([("real", np.float16), ("imag", np.float16)])
"""What stands for torch's ``complex32`` in NumPy, which has no such dtype."""

MEMORY: tuple[np.dtype, ...] = (*DTYPES, COMPLEX32)
"""How memory of each code is read."""

DTYPE_CODES: dict[str, int] = {dtype.name: code for code, dtype in enumerate(DTYPES)} | {"complex32": len(DTYPES)}
"""Code of each supported dtype by its name (``"float32"``, ``"bfloat16"``, ``"bool"``, ...)."""
