"""Sketch and digest are what ``docs/statistics.md`` defines, in every kernel and framework, and its bounds hold.

The oracles here are written from the text alone, with Python's integers and fractions.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tenterhook.stats import KERNELS, RowBuffer, describe, merge_sketches
from tenterhook.stats.layout import DTYPES
from tests.stats.arrays import bytes_of, values

WORD = 2**64
GOLDEN, ROTATION, SEED = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0x243F6A8885A308D3
DRAWS = 6000
FIXED = [0xE9E0033E3BADAF36, 0xF9074C6F8DBF03B5, 0x865C1D12366577AD, 0x4A9FA84CFFC976BA]


def mix64(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return z ^ z >> 31


def defined_sketch(numbers: list[float], offset: int) -> list[Fraction]:
    sums = [Fraction()] * 64
    for i, number in enumerate(numbers, offset):
        block, lane = divmod(i, 64)
        h = mix64((block + 1) * GOLDEN % WORD)
        if math.isfinite(number):
            sums[lane ^ (h * ROTATION % WORD >> 58)] += Fraction(number) * (-1 if h >> lane & 1 else 1)
    return sums


def defined_digest(data: bytes) -> int:
    total = 0
    for page in range(-(-len(data) // 2048)):
        held = data[2048 * page : 2048 * (page + 1)]
        held += bytes(-len(held) % 64)
        words = [int.from_bytes(held[at : at + 8], "little") for at in range(0, len(held), 8)]
        sums = [0] * 8
        for at, word in enumerate(words):
            keyed = word ^ mix64((SEED + (at + 1) * GOLDEN) % WORD)
            sums[at % 8] += keyed % 2**32 * (keyed >> 32)
            sums[at % 8 ^ 1] += word
        total += sum(mix64((s + (8 * page + lane + 1) * GOLDEN) % WORD) for lane, s in enumerate(sums))
    return mix64((len(data) * GOLDEN + SEED + total) % WORD)


def measured(array: np.ndarray, offset: int, kernel: str) -> RowBuffer:
    if kernel == "torch, on a device":
        import torch

        from tenterhook.backends import _torch_device as devices
        from tenterhook.backends._torch_arrays import from_numpy
        from tenterhook.stats import DTYPE_CODES

        assume(hasattr(torch, array.dtype.name))
        buffer = RowBuffer(1)
        with pytest.MonkeyPatch.context() as patch, devices.unseen():
            patch.setattr(devices, "_COPIED", 0)
            tensor: torch.Tensor = from_numpy(array)
            devices.defer(tensor, buffer, 0, code=DTYPE_CODES[array.dtype.name], offset=offset)
        assert buffer.settle() == {}
        return buffer
    buffer = RowBuffer(1, kernel=kernel)
    assert buffer.measure_array(0, array, offset)
    return buffer


EVERYWHERE = pytest.mark.parametrize("kernel", [*KERNELS, "torch, on a device"])


@EVERYWHERE
@given(
    dtype=st.sampled_from(DTYPES),
    size=st.integers(0, 3000),
    kind=st.sampled_from(["normal", "masked", "bits"]),
    offset=st.integers(0, 2**40),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25, deadline=None)
def test_sketch_and_digest_are_as_defined(
    kernel: str, dtype: np.dtype, size: int, kind: str, offset: int, seed: int
) -> None:
    array = values(np.random.default_rng(seed), dtype, size, "normal" if dtype.itemsize >= 8 else kind)
    found = measured(array, offset, kernel)
    assert int(found.digests[0]) == defined_digest(bytes_of(array))
    real = array.view(np.float32 if dtype.itemsize == 8 else np.float64) if dtype.kind == "c" else array
    with np.errstate(invalid="ignore"):  # signalling NaN
        numbers = real.astype(np.float64).tolist()
    expected = [float(s) for s in defined_sketch(numbers, offset * (2 if dtype.kind == "c" else 1))]
    finite = [abs(number) for number in numbers if math.isfinite(number)]
    rounding = 1e-6 * max(finite, default=0) * max(1, len(finite) // 64)
    if max(map(abs, expected)) < 3e38:
        np.testing.assert_allclose(found.sketches[0], expected, rtol=1e-6, atol=rounding + 1e-44)


def test_digests_are_fixed_for_ever() -> None:
    """Recordings of different versions are compared: these numbers are part of the format."""
    assert [describe(np.arange(n, dtype=np.uint8))["digest"] for n in (0, 1, 64, 256)] == FIXED
    assert [defined_digest(bytes(range(n))) for n in (0, 1, 64, 256)] == FIXED


def lengths(array: np.ndarray) -> np.ndarray:
    """Squared lengths of independent sketches of one array, relative to its own."""
    buffer = RowBuffer(DRAWS)
    for row in range(DRAWS):
        assert buffer.measure_array(row, array, row << 20)
    squares = (buffer.sketches.astype(np.float64) ** 2).sum(axis=1)
    return squares / float((array.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize(
    "array",
    [
        np.random.default_rng(1).standard_normal(6400),
        np.ones(6400),
        np.arange(6400.0),
        np.repeat(np.eye(1, 100, 3), 64),
        np.eye(100, 64).reshape(-1),
        np.random.default_rng(2).standard_cauchy(6400),
    ],
    ids=["normal", "constant", "ramp", "one block", "a diagonal", "heavy tail"],
)
def test_the_documented_tails(array: np.ndarray) -> None:
    """Off by more than 56 % with a chance of at most 1/10, whatever the structure; variance at most 1/32."""
    ratios = lengths(array.astype(np.float32))
    assert (np.abs(ratios - 1) > 0.56).mean() <= 1 / 10
    assert ratios.var() <= 1.1 / 32
    assert ratios.mean() == pytest.approx(1, abs=4 * 0.177 / math.sqrt(DRAWS))


def test_the_tail_of_what_is_spread_out() -> None:
    """As of chi square with 64 degrees of freedom: 1/350, of the length 9 %."""
    ratios = lengths(np.random.default_rng(3).standard_normal(6400).astype(np.float32))
    assert (np.abs(ratios - 1) > 0.56).mean() <= 3 / 350
    assert np.sqrt(ratios).std() == pytest.approx(0.088, abs=0.005)


def test_a_swap_is_missed_one_time_in_128() -> None:
    swapped, missed = RowBuffer(2), 0
    one, other = np.zeros(6400, np.float32), np.zeros(6400, np.float32)
    one[10], other[10 + 64 * 50] = 1, 1
    for row in range(DRAWS):
        for at, array in enumerate((one, other)):
            swapped.measure_array(at, array, row << 20)
        missed += bool((swapped.sketches[0] == swapped.sketches[1]).all())
        assert swapped.digests[0] != swapped.digests[1]
    assert missed / DRAWS == pytest.approx(1 / 128, abs=4 * math.sqrt(1 / 128 / DRAWS))


@pytest.mark.parametrize("shards", [2, 3, 7, 64])
def test_shards_of_any_number_merge_to_the_whole(shards: int) -> None:
    array = np.random.default_rng(shards).standard_normal(100_003).astype(np.float32)
    parts = np.array_split(array, shards)
    starts = np.cumsum([0, *map(len, parts)])
    sketches = [describe(part, int(start))["sketch"] for part, start in zip(parts, starts, strict=False)]
    whole = describe(array)["sketch"]
    np.testing.assert_allclose(
        merge_sketches(np.array(sketches)), whole, atol=1e-6 * np.abs(array).max() * 100_003 / 64
    )
    backwards = merge_sketches(np.array(sketches)[::-1])
    np.testing.assert_allclose(backwards, whole, atol=1e-6 * np.abs(array).max() * 100_003 / 64)
