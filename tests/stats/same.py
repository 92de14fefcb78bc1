"""Whether two row buffers say the same of an array, but for rounding."""

from __future__ import annotations

import numpy as np

from tenterhook.stats import STATISTICS, RowBuffer

__all__ = ["assert_same_row", "assert_same_sketch", "measured"]

EXACT = [STATISTICS.index(name) for name in STATISTICS if name.endswith("count") or name in ("numel", "min", "max")]
ABSMAX, MEAN, STD, RMS = (STATISTICS.index(name) for name in ("absmax", "mean", "std", "rms"))


def assert_same_row(native: RowBuffer, twin: RowBuffer, array: np.ndarray) -> None:
    ours, theirs = native.statistics[0], twin.statistics[0]
    exact = [at for at in EXACT if array.dtype.kind != "c" or STATISTICS[at] not in ("min", "max")]
    np.testing.assert_array_equal(ours[exact], theirs[exact])
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=max(1e-6 * np.nan_to_num(theirs[RMS], posinf=0), 1e-320))
    if theirs[STD] > 1e-9 * theirs[RMS]:
        np.testing.assert_allclose(ours[STD], theirs[STD], rtol=2e-6)
    np.testing.assert_allclose(ours[[RMS, ABSMAX]], theirs[[RMS, ABSMAX]], rtol=1e-6)
    assert native.valid[0] == twin.valid[0] == 7
    assert native.digests[0] == twin.digests[0]
    assert_same_sketch(native.sketches[0], twin.sketches[0], theirs)


def assert_same_sketch(ours: np.ndarray, theirs: np.ndarray, statistics: np.ndarray) -> None:
    if not np.isfinite(theirs).all():
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
        return
    per_bucket = np.nan_to_num(statistics[ABSMAX]) * max(1.0, 2 * statistics[0] / 64)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=max(2e-7 * per_bucket, 1e-44))


def measured(kernel: str, array: np.ndarray, offset: int = 0) -> RowBuffer:
    buffer = RowBuffer(1, kernel=kernel)
    with np.errstate(over="ignore"):
        assert buffer.measure_array(0, array, offset)
    return buffer
