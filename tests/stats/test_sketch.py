"""The sketch is linear, unbiased within its bound, sensitive to place and sign, mergeable and the same everywhere."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenterhook.stats import (
    KERNELS,
    SKETCH_SIZE,
    RowBuffer,
    block_hashes,
    describe,
    merge_sketches,
    projection,
    relative_distance,
)
from tenterhook.stats.layout import DTYPES

DRAWS = 4000  # independent projections: the same tensor at far-apart offsets


def sketches(array: np.ndarray, offsets: list[int], kernel: str = KERNELS[0]) -> np.ndarray:
    buffer = RowBuffer(len(offsets), kernel=kernel)
    for row, offset in enumerate(offsets):
        assert buffer.measure_array(row, array, offset)
    return buffer.sketches.astype(np.float64)


def sketch(array: np.ndarray, offset: int = 0) -> np.ndarray:
    return sketches(array, [offset])[0]


def structured() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    column, row, corner = np.zeros((64, 64)), np.zeros((64, 64)), np.zeros((64, 64))
    column[:, 5], row[5], corner[:2, :2] = 1, 1, 1
    return {
        "normal": rng.standard_normal(4096),
        "constant": np.ones(4096),
        "alternating": np.tile([1.0, -1.0], 2048),
        "one column of 64": column,
        "one row of 64": row,
        "one corner": corner,
        "repeated rows": np.tile(rng.standard_normal(64), 64),
        "ramp": np.arange(4096.0),
        "heavy tail": rng.standard_cauchy(4096),
        "two elements, one lane": np.eye(1, 4096, 0)[0] + np.eye(1, 4096, 64)[0],
    }


@pytest.mark.parametrize("name", structured())
def test_squared_length_is_unbiased_within_the_documented_bound(name: str) -> None:
    array = structured()[name].astype(np.float32)
    squares = array.astype(np.float64).reshape(-1) ** 2
    ratios = (sketches(array, [i << 20 for i in range(DRAWS)]) ** 2).sum(axis=1) / squares.sum()
    deviation = np.sqrt(2 / SKETCH_SIZE * (1 - (squares**2).sum() / squares.sum() ** 2))
    assert abs(ratios.mean() - 1) <= 4 * deviation / np.sqrt(DRAWS)
    assert ratios.std() <= 1.1 * deviation


@pytest.mark.parametrize("name", ["normal", "constant", "one column of 64"])
def test_inner_products_are_unbiased(name: str) -> None:
    a = structured()[name].astype(np.float32).reshape(-1)
    b = a + np.random.default_rng(12).standard_normal(a.size).astype(np.float32)
    offsets = [i << 20 for i in range(DRAWS)]
    products = (sketches(a, offsets) * sketches(b, offsets)).sum(axis=1)
    exact = float(a.astype(np.float64) @ b.astype(np.float64))
    assert abs(products.mean() - exact) <= 4 * products.std() / np.sqrt(DRAWS)


@given(seed=st.integers(0, 2**32), size=st.integers(1, 5000), factor=st.floats(-4, 4))
@settings(max_examples=50, deadline=None)
def test_linear(seed: int, size: int, factor: float) -> None:
    a, b = np.random.default_rng(seed).standard_normal((2, size))
    combined = sketch(a + factor * b)
    np.testing.assert_allclose(combined, sketch(a) + factor * sketch(b), rtol=1e-5, atol=1e-5 * np.sqrt(size))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: -x,
        lambda x: x.T,
        lambda x: x[::-1],
        lambda x: x[:, ::-1],
        lambda x: np.roll(x, 1),
        lambda x: np.roll(x, 64, axis=0),
        lambda x: np.random.default_rng(1).permutation(x.reshape(-1)).reshape(x.shape),
        lambda x: np.where(np.arange(256) == 7, -x, x),
    ],
    ids=[
        "negated",
        "transposed",
        "rows reversed",
        "columns reversed",
        "shifted by one",
        "rows moved",
        "permuted",
        "one sign",
    ],
)
def test_sees_what_norms_do_not(change) -> None:
    x = np.random.default_rng(13).standard_normal((256, 256)).astype(np.float32)
    changed = change(x)
    exact = np.linalg.norm(changed.astype(np.float64) - x) / np.linalg.norm(x)
    assert relative_distance(sketch(x), sketch(changed)) == pytest.approx(exact, rel=0.35)


@given(size=st.integers(1, 9000), cuts=st.lists(st.integers(0, 9000), max_size=4), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_shards_merge_to_the_whole(size: int, cuts: list[int], seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    parts = [sketch(x[start:end], start) for start, end in itertools.pairwise(edges)]
    np.testing.assert_allclose(merge_sketches(np.array(parts)), sketch(x), rtol=1e-5, atol=1e-5 * np.sqrt(size))


def test_dtypes_that_hold_the_same_values_share_a_sketch() -> None:
    x = np.random.default_rng(14).integers(-3, 4, 3000)
    expected = sketch(x.astype(np.float32))
    for dtype in DTYPES:
        if dtype.kind not in "buc" and dtype.name != "float8_e8m0fnu":  # which has no negative ones, nor zero
            np.testing.assert_array_equal(sketch(x.astype(dtype)), expected)


def test_complex_is_sketched_as_its_interleaved_parts() -> None:
    z = (np.random.default_rng(15).standard_normal((2, 3000)) * [[1], [1j]]).sum(axis=0).astype(np.complex64)
    np.testing.assert_allclose(sketch(z, 77), sketch(z.view(np.float32), 154), rtol=1e-5, atol=1e-5)


def test_nonfinite_values_count_as_zero() -> None:
    x = np.random.default_rng(16).standard_normal(3000).astype(np.float32)
    x[::7], x[1::7] = np.nan, np.inf
    np.testing.assert_array_equal(sketch(x), sketch(np.where(np.isfinite(x), x, 0)))


def test_an_overflowing_bucket_is_infinite_and_makes_no_distance() -> None:
    overflowed = sketch(np.full(1, 1e300))
    assert np.isinf(overflowed).sum() == 1
    assert np.isnan(relative_distance(overflowed, overflowed))


def test_projection_is_what_is_applied() -> None:
    buckets, signs = projection(100, 300)
    x = np.random.default_rng(17).standard_normal(300)
    np.testing.assert_allclose(np.bincount(buckets, x * signs, SKETCH_SIZE), sketch(x, 100), rtol=1e-6, atol=1e-5)


def test_blocks_fill_each_bucket_once() -> None:
    buckets, _ = projection(0, 64 * 100)
    assert all(sorted(block) == list(range(64)) for block in buckets.reshape(-1, 64).tolist())


def test_hashes_are_fixed_for_ever() -> None:
    """Recordings of different versions are compared: these numbers are part of the format."""
    bits, masks = block_hashes(0, 3)
    assert bits.tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # SplitMix64 from 0
    assert masks.tolist() == [int(b * 0xD6E8FEB86659FD93 % 2**64 >> 58) for b in bits.tolist()]


def test_the_same_in_another_process() -> None:
    program = (
        "import numpy as np; from tenterhook.stats import describe;"
        "d = describe(np.linspace(-1, 1, 5000, dtype=np.float32)); print(d['sketch'].tobytes().hex(), d['digest'])"
    )
    here = describe(np.linspace(-1, 1, 5000, dtype=np.float32))
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert there == [here["sketch"].tobytes().hex(), str(here["digest"])]
