"""Statistics mean what docs/statistics.md says; checked against plain formulas, for every kernel."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenterhook.stats import (
    DTYPE_CODES,
    GROUP_DIGEST,
    GROUP_SKETCH,
    GROUP_STATISTICS,
    KERNELS,
    STATISTICS,
    RowBuffer,
    describe,
    merge,
)
from tenterhook.stats.layout import COMPLEX32, DTYPES, MEMORY
from tests.stats.arrays import KINDS, bytes_of, values

every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def measured(kernel: str, array: np.ndarray) -> dict[str, float]:
    buffer = RowBuffer(1, kernel=kernel)
    with np.errstate(over="ignore"):
        assert buffer.measure_array(0, array)
    return dict(zip(STATISTICS, buffer.statistics[0].tolist(), strict=True))


def exact_statistics(array: np.ndarray) -> tuple[float, float, float]:
    """Mean, std and rms of the finite values, in rational arithmetic."""
    finite = [Fraction(float(v)) for v in array.astype(np.float64).reshape(-1) if np.isfinite(v)]
    mean = sum(finite, Fraction()) / len(finite)
    variance = sum(((v - mean) ** 2 for v in finite), Fraction()) / len(finite)
    return float(mean), _root(variance), _root(variance + mean**2)


def _root(square: Fraction) -> float:
    scale = Fraction(2) ** (10 + (square.denominator.bit_length() - square.numerator.bit_length()) // 2)
    return float(Fraction(math.isqrt(int(square * scale**2 * 2**120)), 2**60) / scale) if square else 0.0


@every_kernel
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bits"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_mean_std_rms_against_rational_arithmetic(kernel: str, kind: str, dtype: type) -> None:
    array = values(np.random.default_rng(5), np.dtype(dtype), 3000, kind)
    mean, std, rms = exact_statistics(array)
    found = measured(kernel, array)
    assert found["mean"] == pytest.approx(mean, rel=0, abs=1e-6 * rms)
    assert found["rms"] == pytest.approx(rms, rel=1e-6)
    assert found["std"] == pytest.approx(std, rel=1e-6, abs=1e-12 * rms)


@every_kernel
def test_std_survives_a_mean_a_million_times_larger(kernel: str) -> None:
    array = (1e3 + 1e-3 * np.random.default_rng(0).standard_normal(300_000)).astype(np.float32)
    assert measured(kernel, array)["std"] == pytest.approx(array.astype(np.float64).std(), rel=1e-6)
    shifting = np.repeat(np.arange(100.0, dtype=np.float32) * 100, 3000) + array
    assert measured(kernel, shifting)["std"] == pytest.approx(shifting.astype(np.float64).std(), rel=1e-6)


@every_kernel
def test_long_sums_do_not_drift(kernel: str) -> None:
    array = np.full(5_000_000, 0.1, np.float32)
    array[::2] = 0.3
    found = measured(kernel, array)
    assert found["mean"] == pytest.approx(array.astype(np.float64).mean(), rel=1e-6)
    assert found["std"] == pytest.approx(array.astype(np.float64).std(), rel=1e-6)


@every_kernel
def test_nonfinite_values_are_counted_and_left_out(kernel: str) -> None:
    found = measured(kernel, np.array([np.nan, np.inf, np.inf, -np.inf, -0.0, 0.0, 4.0, 2.0], np.float32))
    assert found["numel"] == 8
    assert (found["nan_count"], found["posinf_count"], found["neginf_count"], found["zero_count"]) == (1, 2, 1, 2)
    assert (found["min"], found["max"], found["mean"], found["absmax"]) == (0, 4, 1.5, 4)
    assert found["rms"] == pytest.approx(math.sqrt(5))


@every_kernel
@pytest.mark.parametrize("array", [np.zeros((0, 3)), np.full(3, np.nan), np.full((2, 2), -np.inf, np.float16)])
def test_null_where_nothing_is_finite(kernel: str, array: np.ndarray) -> None:
    found = measured(kernel, array)
    assert found["numel"] == array.size
    assert all(math.isnan(found[name]) for name in ("min", "max", "mean", "std", "rms", "absmax"))


@every_kernel
@pytest.mark.parametrize("name", DTYPE_CODES)
def test_scalars_of_every_dtype(kernel: str, name: str) -> None:
    one = np.zeros((), MEMORY[DTYPE_CODES[name]])
    one["real" if name == "complex32" else ...] = 1
    found = measured(kernel, one)
    assert found["numel"] == found["min"] == found["max"] == found["mean"] == found["rms"] == found["absmax"] == 1
    assert found["std"] == found["zero_count"] == 0


@every_kernel
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128, np.float16])
def test_an_infinite_part_beside_any_nan_is_infinite(kernel: str, dtype: type) -> None:
    half = np.dtype({np.complex64: np.float32, np.complex128: np.float64}.get(dtype, np.float16))
    infinity, one = np.array(np.inf, half).view(f"u{half.itemsize}"), np.array(1, f"u{half.itemsize}")
    parts = np.array([infinity, infinity + one, infinity + one, infinity, infinity, 0]).astype(one.dtype).view(half)
    found = measured(kernel, parts.view(COMPLEX32 if dtype is np.float16 else dtype))
    assert (found["posinf_count"], found["nan_count"]) == (3, 0)


@every_kernel
def test_complex_is_measured_by_magnitude(kernel: str) -> None:
    z = np.array([3 + 4j, 0j, complex(np.nan, 1), complex(np.inf, np.nan), complex(0, -np.inf)], np.complex64)
    found = measured(kernel, z)
    assert (found["min"], found["max"], found["mean"], found["absmax"]) == (0, 5, 2.5, 5)
    assert (found["nan_count"], found["posinf_count"], found["neginf_count"], found["zero_count"]) == (1, 2, 0, 1)


@every_kernel
@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e200, 1e307])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_squares_beyond_float64_neither_vanish_nor_overflow(kernel: str, scale: float, dtype: type) -> None:
    found = measured(kernel, (np.array([1, 2, 3, -2]) * scale).astype(dtype))
    assert found["rms"] == pytest.approx(math.sqrt(4.5) * scale, rel=1e-3 if scale < 1e-300 else 1e-12)
    assert found["absmax"] == pytest.approx(3 * scale)


@every_kernel
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.kind in "iu"], ids=lambda dtype: dtype.name)
def test_the_extremes_of_integers(kernel: str, dtype: np.dtype) -> None:
    """Beyond 2**53 they are rounded to float64 first, and no further."""
    info = np.iinfo(dtype)
    array = np.array([info.min, info.max, 0, 1, *[info.max] * 100], dtype)
    found, (mean, std, rms) = measured(kernel, array), exact_statistics(array)
    assert (found["min"], found["max"]) == (float(info.min), float(info.max))
    assert found["zero_count"] == 1 + (info.min == 0)
    assert (found["mean"], found["std"], found["rms"]) == pytest.approx((mean, std, rms), rel=1e-6)


@every_kernel
@pytest.mark.parametrize("at", [1.0, 1e3, 1e8, 1e300, 2.0**52, 1.7e308])
@pytest.mark.parametrize("size", [3, 2000, 70_000])
def test_values_that_differ_in_their_last_bit(kernel: str, at: float, size: int) -> None:
    array = np.full(size, at)
    array[::2] = np.nextafter(at, 0)
    array[5:7] = np.nextafter(at, np.inf)
    mean, std, rms = exact_statistics(array)
    found = measured(kernel, array)
    assert (found["mean"], found["rms"]) == pytest.approx((mean, rms), rel=1e-15)
    assert found["std"] == pytest.approx(std, rel=1e-6)


@every_kernel
@pytest.mark.parametrize(("at", "by"), [(1e3, 1e-3), (1e8, 1.0), (-1e12, 1.0)])
def test_what_cancels_in_float64(kernel: str, at: float, by: float) -> None:
    array = at + by * np.random.default_rng(3).choice([-1.0, 1.0], 5000)
    mean, std, _ = exact_statistics(array)
    found = measured(kernel, array)
    assert found["mean"] == pytest.approx(mean, rel=1e-15)
    assert found["std"] == pytest.approx(std, rel=1e-6)


@every_kernel
def test_integers_are_exact(kernel: str) -> None:
    found = measured(kernel, np.array([-(2**53) + 1, 2**53 - 1, 0]))
    assert (found["min"], found["max"], found["mean"], found["zero_count"]) == (-(2**53) + 1, 2**53 - 1, 0, 1)


@every_kernel
def test_equal_bytes_equal_digest_and_one_flipped_bit_differs(kernel: str) -> None:
    array = np.random.default_rng(6).integers(0, 256, 5000, np.uint8)
    buffer = RowBuffer(2, kernel=kernel)
    buffer.measure_array(0, array)
    buffer.measure_array(1, array[::-1][::-1].view(np.int16).reshape(50, 50))
    assert buffer.digests[0] == buffer.digests[1]
    seen = {int(buffer.digests[0])}
    for bit in range(0, 8 * len(array), 97):
        flipped = array.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        buffer.measure_array(1, flipped)
        seen.add(int(buffer.digests[1]))
    assert len(seen) == 1 + len(range(0, 8 * len(array), 97))


@every_kernel
def test_digests_of_near_data_do_not_collide(kernel: str) -> None:
    buffer = RowBuffer(1, kernel=kernel)
    digests: dict[int, bytes] = {}
    zero, minus_zero = np.zeros(40, np.float32), -np.zeros(40, np.float32)
    candidates = [np.zeros(n, np.uint8) for n in range(3000)] + [minus_zero] + [np.arange(n) for n in range(1, 400)]
    ramp = np.arange(700, dtype=np.float32)
    for at in range(698):  # every swap of neighbours, and of elements two 64-bit lanes and one page apart
        for apart in (1, 4, 512):
            if at + apart < len(ramp):
                swapped = ramp.copy()
                swapped[[at, at + apart]] = swapped[[at + apart, at]]
                candidates.append(swapped)
    for array in candidates:
        buffer.measure_array(0, array)
        assert digests.setdefault(int(buffer.digests[0]), bytes_of(array)) == bytes_of(array)
    assert len(digests) == len({bytes_of(array) for array in candidates})
    assert zero.tobytes() in digests.values() and minus_zero.tobytes() in digests.values()


@given(
    seed=st.integers(0, 2**32),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    size=st.integers(0, 700),
)
@settings(max_examples=80, deadline=None)
def test_merged_parts_describe_the_whole(seed: int, kinds: list[str], size: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [values(rng, np.dtype(np.float32), size + at, kind) for at, kind in enumerate(kinds)]
    whole = np.concatenate(parts)
    starts = np.cumsum([0, *map(len, parts)])
    with np.errstate(over="ignore"):
        merged = merge([describe(part, int(start)) for part, start in zip(parts, starts, strict=False)])
        expected = describe(whole)
    for name in STATISTICS:
        if name in ("mean", "std", "rms") and expected[name] is not None:
            assert merged[name] == pytest.approx(expected[name], rel=2e-6, abs=1e-6 * expected["rms"])
        else:
            assert merged[name] == expected[name]
    finite = np.where(np.isfinite(whole), whole, 0).astype(np.float64)
    if np.isfinite(expected["sketch"]).all():
        np.testing.assert_allclose(merged["sketch"], expected["sketch"], atol=1e-6 * np.abs(finite).sum() + 1e-44)


@every_kernel
def test_groups_that_are_left_out_stay_empty(kernel: str) -> None:
    buffer = RowBuffer(2, sketch=False, digest=False, kernel=kernel)
    assert buffer.measure_array(1, np.ones(5))
    assert buffer.valid.tolist() == [0, GROUP_STATISTICS]
    assert not buffer.sketches.any() and not buffer.digests.any()
    full = RowBuffer(1, kernel=kernel)
    full.measure_array(0, np.ones(5))
    assert full.valid[0] == GROUP_STATISTICS | GROUP_SKETCH | GROUP_DIGEST


@every_kernel
def test_unsupported_dtypes_are_refused_and_leave_the_row_invalid(kernel: str) -> None:
    buffer = RowBuffer(1, kernel=kernel)
    assert buffer.measure_array(0, np.ones(3))
    assert not buffer.measure_array(0, np.array(["2020-01-01"], "datetime64[D]"))
    assert buffer.valid[0] == 0
    assert not buffer.measure_flat(0, 0, 99, 0)
    assert not buffer.measure(0, 0, "qint8", (), ())
    with pytest.raises(TypeError, match="no statistics for dtype datetime64"):
        describe(np.array(["2020-01-01"], "datetime64[D]"))


@every_kernel
def test_bad_calls_raise_and_touch_nothing(kernel: str) -> None:
    buffer = RowBuffer(2, kernel=kernel)
    for row in (-1, 2, 2**40):
        with pytest.raises(IndexError, match="outside the buffer, which has 2 rows"):
            buffer.measure_flat(row, 0, 0, 0)
    with pytest.raises(ValueError, match="must not be negative"):
        buffer.measure_flat(0, 0, 0, -1)
    with pytest.raises(ValueError, match="must not be negative"):
        buffer.measure_flat(0, 0, 0, 0, -1)
    with pytest.raises(ValueError, match="must not be negative"):
        buffer.measure(0, 0, "float32", (2, -1), (1, 1))
    with pytest.raises(ValueError, match="strides"):
        buffer.measure(0, 0, "float32", (2, 1), (1,))
    with pytest.raises(TypeError):
        buffer.measure_flat(0, 0, 0)  # type: ignore[call-arg]
    assert not buffer.valid.any()
    with pytest.raises(ValueError, match="no kernel 'abacus' here"):
        RowBuffer(1, kernel="abacus")


@every_kernel
def test_empty_tensors_read_nothing(kernel: str) -> None:
    buffer = RowBuffer(2, kernel=kernel)
    assert buffer.measure_flat(0, 0, 0, 0)
    assert buffer.measure(1, 0, "float32", (2**40, 2**40, 0, 3), (5, 1, 1, -7))
    assert buffer.statistics[:, 0].tolist() == [0, 0]


def test_whatever_numpy_makes_an_array_of_is_described_or_refused_by_its_dtype() -> None:
    assert describe([1, 2, 6])["mean"] == 3  # type: ignore[arg-type]
    assert describe(2.5)["mean"] == 2.5
    records = np.zeros(3, [("a", np.float32), ("b", np.int16)])
    records["a"] = 1, 2, 6
    assert describe(records["a"])["mean"] == 3, "its strides are no multiple of its items"
    for array in (records, np.array([1, None]), np.array(["a"]), np.zeros(2, "m8[s]"), np.zeros(0, "V0"), ["a", 1]):
        with pytest.raises(TypeError, match="no statistics for dtype"):
            describe(array)


def test_foreign_byte_order_measures_as_native() -> None:
    for kind in ("f4", "i2", "c16", "u8", "f2"):
        array = np.arange(100, dtype=kind)
        foreign, native = describe(array.astype(array.dtype.newbyteorder())[::-2]), describe(array[::-2])
        assert [foreign[name] for name in (*STATISTICS, "digest")] == [native[name] for name in (*STATISTICS, "digest")]


def test_a_bound_measure_keeps_the_columns_alive() -> None:
    buffer = RowBuffer(3)
    statistics, measure_array = buffer.statistics, buffer.measure_array
    del buffer
    assert measure_array(2, np.arange(5.0))
    assert statistics[2, STATISTICS.index("mean")] == 2
