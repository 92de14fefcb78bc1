"""The native kernels give what the NumPy twin gives, over every dtype, layout and kind of values."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenterhook.stats import DTYPE_CODES, KERNELS, STATISTICS, RowBuffer
from tenterhook.stats.layout import COMPLEX32, DTYPES
from tests.stats.arrays import KINDS, arrays, layouts, values
from tests.stats.same import assert_same_row, measured

NATIVE = [kernel for kernel in KERNELS if kernel != "numpy"]
pytestmark = pytest.mark.skipif(not NATIVE, reason="the kernel is not built here: only the twin exists")


@pytest.mark.parametrize("kernel", NATIVE)
@given(array=arrays(), offset=st.one_of(st.just(0), st.integers(0, 2**40)))
@settings(max_examples=300, deadline=None)
def test_contiguous_memory(kernel: str, array: np.ndarray, offset: int) -> None:
    assert_same_row(measured(kernel, array, offset), measured("numpy", array, offset), array)


@pytest.mark.parametrize("kernel", NATIVE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_dtype_with_every_kind_of_values(kernel: str, dtype: np.dtype, kind: str) -> None:
    array = values(np.random.default_rng(7), dtype, 5000, kind)
    assert_same_row(measured(kernel, array), measured("numpy", array), array)


@pytest.mark.parametrize("kernel", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("size", [1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 127, 2047, 2048, 2049, 4160])
def test_sizes_around_vectors_blocks_and_chunks(kernel: str, dtype: np.dtype, size: int) -> None:
    array = values(np.random.default_rng(size), dtype, size, "normal")
    assert_same_row(measured(kernel, array), measured("numpy", array), array)


@pytest.mark.parametrize("kernel", KERNELS)
@given(layout=layouts(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_any_strides_measure_as_their_contiguous_copy(
    kernel: str, layout: tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]], dtype: np.dtype, seed: int
) -> None:
    shape, strides, (first, extent) = layout
    storage = values(np.random.default_rng(seed), dtype, extent, "normal")
    view = np.ndarray(
        shape, dtype, storage, first * dtype.itemsize, tuple(stride * dtype.itemsize for stride in strides)
    )
    buffer = RowBuffer(1, kernel=kernel)
    address = storage.__array_interface__["data"][0] + first * dtype.itemsize
    assert buffer.measure(0, address, dtype.name, shape, strides)
    copied = measured(kernel, np.ascontiguousarray(view))
    np.testing.assert_array_equal(buffer.statistics, copied.statistics)
    np.testing.assert_array_equal(buffer.sketches, copied.sketches)
    assert buffer.digests[0] == copied.digests[0]


@pytest.mark.parametrize("kernel", NATIVE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128", "uint8"])
def test_large_views(kernel: str, dtype: str) -> None:
    kind = DTYPES[DTYPE_CODES[dtype]]
    storage = values(np.random.default_rng(1), kind, 60 * 70 * 80, "normal").reshape(60, 70, 80)
    views = [storage.transpose(axes)[::step, ::-1] for axes in itertools.permutations(range(3)) for step in (1, -1, 3)]
    views += [np.broadcast_to(storage[:1, :, :1], (60, 70, 80)), storage[:, 3:60, 5:], storage[:, :, 0]]
    assert max(view.size for view in views) > 1 << 18, "the twin takes those in parts"
    for view in views:
        assert_same_row(measured(kernel, view), measured("numpy", view), view)


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    bits=st.booleans(),
    size=st.one_of(st.integers(0, 300), st.integers(2000, 5000)),
    offset=st.sampled_from([0, 7, 640]),
)
@settings(max_examples=60, deadline=None)
def test_complex_of_halves_measures_as_the_same_numbers_of_singles(
    kernel: str, bits: bool, size: int, offset: int
) -> None:
    halves = values(np.random.default_rng(size), np.dtype(np.float16), 2 * size, "bits" if bits else "normal")
    with np.errstate(invalid="ignore"):  # signalling NaN
        singles = halves.astype(np.float32).view(np.complex64)
    for step in (1, -3):
        ours = measured(kernel, halves.view(COMPLEX32)[::step], offset)
        theirs = measured(kernel, singles[::step], offset)
        np.testing.assert_array_equal(ours.statistics, theirs.statistics)
        np.testing.assert_array_equal(ours.sketches, theirs.sketches)
    assert measured(kernel, halves.view(COMPLEX32)).digests == measured(kernel, halves).digests


@pytest.mark.parametrize("kernel", KERNELS)
def test_unaligned_memory(kernel: str) -> None:
    storage = np.zeros(4 * 5000 + 1, np.uint8)
    unaligned = storage[1:].view(np.float32)
    unaligned[:] = values(np.random.default_rng(2), np.dtype(np.float32), 5000, "normal")
    aligned = unaligned.copy()
    for step in (1, 3):
        ours, theirs = measured(kernel, unaligned[::step]), measured(kernel, aligned[::step])
        np.testing.assert_array_equal(ours.statistics, theirs.statistics)
        np.testing.assert_array_equal(ours.digests, theirs.digests)


def test_kernels_give_the_same_sketch_bit_for_bit() -> None:
    array = values(np.random.default_rng(3), np.dtype(np.float32), 300_000, "normal")
    first, *others = [measured(kernel, array).sketches for kernel in NATIVE]
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
def test_flushing_subnormals_in_the_callers_thread_changes_nothing(kernel: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    array = np.full(3000, 1e-310 if dtype == "float64" else 1e-39).astype(DTYPES[DTYPE_CODES[dtype]])
    expected = measured(kernel, array)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        buffer = measured(kernel, array)
        flushed = torch.tensor(1e-41) * 1 == 0
    finally:
        torch.set_flush_denormal(False)
    assert flushed, "the mode must be on while measuring, and still on afterwards"
    np.testing.assert_array_equal(buffer.statistics, expected.statistics)
    np.testing.assert_array_equal(buffer.sketches, expected.sketches)
    assert buffer.statistics[0, STATISTICS.index("zero_count")] == 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mprotect"), reason="needs mprotect")
def test_nothing_is_read_outside_the_storage() -> None:
    """Storage that ends at a page, or begins after one, that must not be touched: a stray read kills the process."""
    program = """
import ctypes, mmap
import numpy as np
from tenterhook.stats import DTYPE_CODES, KERNELS, RowBuffer
from tenterhook.stats.layout import MEMORY
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 18 * page)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
assert protect(base, page, 0) == 0 and protect(base + 17 * page, page, 0) == 0
start, end = base + page, base + 17 * page
for kernel in KERNELS:
    buffer = RowBuffer(1, kernel=kernel)
    for name, code in DTYPE_CODES.items():
        item = MEMORY[code].itemsize
        for numel in (1, 3, 17, 63, 64, 65, 100, 2047, 2049, 4000):
            for address in (start, end - numel * item):
                assert buffer.measure_flat(0, address, code, numel)
                assert buffer.measure(0, address, name, (numel, 5), (1, 0))
            assert buffer.measure(0, end - item, name, (numel,), (-1,))
            assert buffer.measure(0, end - item, name, (numel, 7), (0, 0))
print("survived")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("survived", 0), done.stderr


@pytest.mark.parametrize("kernel", NATIVE)
def test_megabytes(kernel: str) -> None:
    array = values(np.random.default_rng(4), np.dtype(np.float32), 3_000_001, "masked")
    assert_same_row(measured(kernel, array), measured("numpy", array), array)


@pytest.mark.parametrize("kernel", KERNELS)
def test_threads_measure_into_rows_of_one_buffer(kernel: str) -> None:
    arrays_ = [values(np.random.default_rng(seed), np.dtype(np.float32), 50_000, "normal") for seed in range(16)]
    buffer, alone = RowBuffer(16, kernel=kernel), RowBuffer(16, kernel=kernel)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(buffer.measure_array, range(16), arrays_))
    for row, array in enumerate(arrays_):
        alone.measure_array(row, array)
    np.testing.assert_array_equal(buffer.statistics, alone.statistics)
    np.testing.assert_array_equal(buffer.sketches, alone.sketches)
    np.testing.assert_array_equal(buffer.digests, alone.digests)


@pytest.mark.parametrize("kernel", NATIVE)
@pytest.mark.parametrize("kind", KINDS)
def test_what_else_is_wanted_changes_no_bit(kernel: str, kind: str) -> None:
    """Statistics and sketch may be taken in one loop or in two."""
    for dtype, offset in itertools.product(DTYPES, (0, 640, 77)):
        array = values(np.random.default_rng(5), dtype, 9000, kind)
        both, alone = RowBuffer(1, kernel=kernel), RowBuffer(1, sketch=False, digest=False, kernel=kernel)
        assert both.measure_array(0, array, offset) and alone.measure_array(0, array, offset)
        np.testing.assert_array_equal(both.statistics, alone.statistics)
