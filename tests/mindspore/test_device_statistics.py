"""Measured where it lies, a MindSpore tensor has the row that it would have on the host, but for rounding.

There is no accelerator here: tensors of the host take the path of a device's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import ops

from tenterhook.backends import _mindspore_device as devices
from tenterhook.backends import _mindspore_measuring as measuring
from tenterhook.backends._mindspore_unseen import unseen
from tenterhook.backends.mindspore import BACKEND, MindSporeBackend
from tenterhook.stats import DTYPE_CODES, GROUP_DIGEST, GROUP_STATISTICS, STATISTICS, RowBuffer
from tenterhook.stats.layout import DTYPES
from tenterhook.stats.parts import PART_SIZE
from tests.stats.arrays import KINDS, values
from tests.stats.same import ABSMAX, EXACT, assert_same_row, measured

MEAN, STD = STATISTICS.index("mean"), STATISTICS.index("std")
MADE_HERE = [dtype for dtype in DTYPES if not dtype.name.startswith("float8")]  # no kernel of the CPU makes the others
_SIZES = st.one_of(st.integers(0, 200), st.integers(1900, 6500))


@pytest.fixture(autouse=True)
def everything_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is so small that it is brought over and measured on the host, and parts are as small as chunks."""
    monkeypatch.setattr(devices, "_COPIED", 0)
    monkeypatch.setattr(devices, "PART_SIZE", 2048)


def tensor_of(array: np.ndarray) -> ms.Tensor:
    if array.dtype == ml_dtypes.bfloat16:  # bit for bit
        return ms.Tensor(array.view(np.uint16)).view(ms.bfloat16) if array.size else ms.Tensor([]).astype(ms.bfloat16)
    return ms.Tensor(array)


def order(tensor: ms.Tensor, buffer: RowBuffer, row: int = 0) -> bool:
    name = str(tensor.dtype).lower()
    with unseen():
        return devices.defer(tensor, buffer, row, name=name, device=devices.device_of(tensor))


def deferred(tensor: ms.Tensor, **groups: bool) -> RowBuffer:
    buffer = RowBuffer(1, **groups)
    assert order(tensor, buffer)
    assert not buffer.valid[0], "nothing is filled in before it is asked for"
    assert buffer.settle() == {}
    return buffer


def assert_same(found: RowBuffer, array: np.ndarray) -> None:
    """Ask for the row of the host; where there are subnormal numbers, sums may have taken them for zeros."""
    expected = measured("numpy", array)
    halves = array.view(array.real.dtype) if array.dtype.kind == "c" else array
    info = None if array.dtype.kind in "iub" else ml_dtypes.finfo(halves.dtype)
    with np.errstate(invalid="ignore"):
        plain = halves.astype(np.float64)
    if info is None or not ((plain != 0) & (np.abs(plain) < float(info.tiny))).any():
        assert_same_row(found, expected, array)
        return
    ours, theirs = found.statistics[0], expected.statistics[0]
    exact = [at for at in EXACT if array.dtype.kind != "c" or STATISTICS[at] not in ("min", "max")]
    np.testing.assert_array_equal(ours[exact], theirs[exact])
    near = 4 * float(info.tiny) + 1e-6 * np.nan_to_num(theirs[STATISTICS.index("rms")], posinf=0)
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=near)
    assert (found.digests[0], found.valid[0]) == (expected.digests[0], 7)
    sketches = found.sketches[0].astype(np.float64), expected.sketches[0].astype(np.float64)
    finite = np.isfinite(sketches[1])
    np.testing.assert_array_equal(np.isfinite(sketches[0]), finite)
    error = (float(info.tiny) + 2e-7 * np.nan_to_num(theirs[ABSMAX])) * max(1.0, theirs[0] / 16)
    np.testing.assert_allclose(sketches[0][finite], sketches[1][finite], rtol=1e-6, atol=max(error, 1e-44))


@given(dtype=st.sampled_from(MADE_HERE), size=_SIZES, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_contiguous_tensors(dtype: np.dtype, size: int, kind: str, seed: int) -> None:
    array = values(np.random.default_rng(seed), dtype, size, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "PART_SIZE", 2048)
        patch.setattr(devices, "_COPIED", 0)
        assert_same(deferred(tensor_of(array)), array)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", MADE_HERE, ids=lambda dtype: dtype.name)
def test_every_dtype_with_every_kind_of_values(dtype: np.dtype, kind: str) -> None:
    array = values(np.random.default_rng(7), dtype, 5000, kind)
    assert_same(deferred(tensor_of(array)), array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "uint8"])
def test_views(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    kind = DTYPES[DTYPE_CODES[dtype]]
    storage = values(np.random.default_rng(1), kind, 12 * 70 * 8, "normal").reshape(12, 70, 8)
    whole = tensor_of(storage.reshape(-1)).view(storage.shape)
    for limit in (0, 256 * 1024):
        monkeypatch.setattr(devices, "_COPIED", limit)
        for axes in itertools.permutations(range(3)):
            expected = np.ascontiguousarray(storage.transpose(axes)[1:])
            assert_same(deferred(ops.transpose(whole, axes)[1:]), expected)
        assert_same(deferred(whole.view((-1,))[3:]), storage.reshape(-1)[3:])
        assert_same(deferred(whole[0, 0, 0]), storage[0, 0, 0].reshape(1))


@pytest.mark.parametrize("limit", [0, 256 * 1024])
@pytest.mark.parametrize("dtype", MADE_HERE, ids=lambda dtype: dtype.name)
def test_what_an_operation_gives_without_dimensions(
    monkeypatch: pytest.MonkeyPatch, dtype: np.dtype, limit: int
) -> None:
    monkeypatch.setattr(devices, "_COPIED", limit)
    array = np.ones(1, dtype)
    kind = tensor_of(array).dtype
    assert_same(deferred(ms.Tensor(np.float32([0.5, 0.5])).sum().astype(kind)), array)
    assert_same(deferred(ops.relu(ms.Tensor(np.float32([1.0])))[0].astype(kind)), array)


@pytest.mark.parametrize("kind", ["normal", "masked", "cancelling"])
def test_parts_of_full_size_merge(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(devices, "PART_SIZE", PART_SIZE)
    array = values(np.random.default_rng(4), np.dtype(np.float32), 2_500_001, kind)
    assert_same(deferred(ms.Tensor(array)), array)


def test_std_survives_a_mean_a_million_times_larger() -> None:
    array = (1e3 + 1e-3 * np.random.default_rng(0).standard_normal(300_000)).astype(np.float32)
    assert deferred(ms.Tensor(array)).statistics[0, STD] == pytest.approx(array.astype(np.float64).std(), rel=1e-6)


def test_groups_that_are_left_out() -> None:
    alone = deferred(ms.Tensor(np.ones(5000, np.float32)), sketch=False, digest=False)
    assert alone.valid[0] == GROUP_STATISTICS
    assert deferred(ms.Tensor(np.ones(5000)), sketch=False).valid[0] == GROUP_STATISTICS | GROUP_DIGEST


def test_small_tensors_come_over_and_have_the_very_row_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_COPIED", 256 * 1024)
    rng = np.random.default_rng(9)
    for dtype, size in itertools.product(MADE_HERE, (0, 1, 64, 1000)):
        array = values(rng, dtype, size, "bits")
        found, expected = deferred(tensor_of(array)), RowBuffer(1)
        with np.errstate(over="ignore"):
            expected.measure_array(0, array)
        np.testing.assert_array_equal(found.statistics, expected.statistics)
        np.testing.assert_array_equal(found.sketches, expected.sketches)
        assert (found.digests[0], found.valid[0]) == (expected.digests[0], 7)


@pytest.mark.parametrize("limit", [0, 256 * 1024])
def test_what_is_ordered_is_the_tensor_of_that_moment(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(devices, "_COPIED", limit)
    buffer, tensor = RowBuffer(1), ms.Tensor(np.full(4096, 2, np.float32))
    assert order(tensor, buffer)
    tensor.copy_(ms.Tensor(np.full(4096, 7, np.float32)))
    assert tensor.asnumpy()[0] == 7
    buffer.settle()
    assert buffer.statistics[0, MEAN] == 2


def test_rows_are_right_where_memory_for_joining_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    deferred(ms.Tensor(np.ones(1, np.float32)))  # what the device can do has been tried
    monkeypatch.setattr(devices, "_JOINED", 2)
    arrays = [np.full(size, row + 1, np.float32) for row, size in enumerate((5000, 100, 9000, 3000))]
    buffer, expected = RowBuffer(len(arrays)), RowBuffer(len(arrays))
    cat, measuring_record = ops.cat, devices.part_record

    def no_memory(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Out of memory")

    def measured(*args: Any) -> Any:  # what measures a part joins pieces, too, and has memory for that
        with monkeypatch.context() as patch:
            patch.setattr(ops, "cat", cat)
            return measuring_record(*args)

    monkeypatch.setattr(devices, "part_record", measured)
    for row, array in enumerate(arrays):
        expected.measure_array(row, array)
        with monkeypatch.context() as patch:
            if row != 3:
                patch.setattr(ops, "cat", no_memory)
            if not order(ms.Tensor(array), buffer, row):
                buffer.measure_array(row, array)  # as the backend does
    assert buffer.settle() == {}
    np.testing.assert_allclose(buffer.statistics, expected.statistics, rtol=1e-6)


def test_full_parcels_are_closed_and_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_COPIED", 4096)
    monkeypatch.setattr(devices, "_PARCEL", 10_000)
    monkeypatch.setattr(devices, "_JOINED", 3)
    buffer = RowBuffer(300)
    rng, arrays = np.random.default_rng(10), []
    for row in range(300):
        arrays.append(rng.standard_normal(1500 if row % 7 == 0 else 200).astype(np.float32))
        assert order(ms.Tensor(arrays[-1]), buffer, row)
        (mine,) = buffer.deferred.values()
        held = [*mine._sent, mine._open]
        assert len(held) <= 5
        assert sum(parcel.used for parcel in held) <= 5 * 10_000
    assert buffer.settle() == {}
    expected = RowBuffer(300)
    for row, array in enumerate(arrays):
        expected.measure_array(row, array)
    np.testing.assert_allclose(buffer.statistics, expected.statistics, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(buffer.digests, expected.digests)
    assert not buffer.deferred


# --- what a device cannot do -----------------------------------------------------------------------------------------
@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(MindSporeBackend, "defers", lambda self, device: True)
    devices.way_of.cache_clear()
    yield
    devices.way_of.cache_clear()


def no_kernel(*_: Any, **__: Any) -> Any:
    raise RuntimeError("The kernel Nameless unregistered.\nmore of it")


def measured_anyway(array: np.ndarray) -> RowBuffer:
    buffer = RowBuffer(1)
    assert BACKEND.measure(tensor_of(array), buffer, 0) is None
    buffer.settle()
    assert_same(buffer, array)
    return buffer


def test_a_device_that_cannot_measure_copies(forced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring.ops, "gather_elements", no_kernel)
    measured_anyway(values(np.random.default_rng(0), np.dtype(np.float32), 5000, "normal"))
    assert devices.way_of("float32", "cpu")[:2] == (
        devices.Way.COPIED,
        "it measures them wrongly: The kernel Nameless unregistered.",
    )


def test_a_device_that_measures_wrongly_is_found_out(forced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    amax = measuring.ops.amax
    monkeypatch.setattr(measuring.ops, "amax", lambda *args: amax(*args) - 1)
    measured_anyway(values(np.random.default_rng(0), np.dtype(np.float32), 5000, "normal"))
    assert devices.way_of("float32", "cpu")[0] is devices.Way.COPIED


def test_a_device_that_cannot_copy_leaves_it_to_the_host(forced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "copied_bytes", no_kernel)
    told: list[str] = []
    monkeypatch.setattr(devices, "tell_once", told.append)
    array = values(np.random.default_rng(0), np.dtype(np.float32), 5000, "normal")
    buffer = RowBuffer(1)
    assert BACKEND.measure(ms.Tensor(array), buffer, 0) is None
    assert not buffer.deferred
    assert_same(buffer, array)
    assert told == ["float32 tensors of cpu are copied to the host one by one: The kernel Nameless unregistered."]


def test_dtypes_without_kernels_are_left_to_the_host(forced: None) -> None:
    for name in ("float8_e4m3fn", "float8_e5m2"):
        assert devices.way_of(name, "cpu")[0] is devices.Way.ON_HOST


def test_where_memory_runs_out_the_host_copies(forced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    array = values(np.random.default_rng(0), np.dtype(np.float32), 5000, "normal")
    measured_anyway(array)
    monkeypatch.setattr(devices, "part_record", no_kernel)
    monkeypatch.setattr(devices, "tell_once", lambda sentence: None)
    measured_anyway(array)


@pytest.mark.parametrize("name", ["int32", "int64", "uint32", "complex64", "float64"])
def test_a_device_without_float64_copies_what_float32_does_not_hold(
    forced: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(devices, "_real_of", lambda device: (ms.float32, "no float64 (not here)"))
    assert devices.way_of(name, "cpu") == (devices.Way.COPIED, "no float64 (not here)", ms.float32)
    measured_anyway(values(np.random.default_rng(0), DTYPES[DTYPE_CODES[name]], 5000, "normal"))


@pytest.mark.parametrize("kind", ["normal", "relu", "cancelling", "outlier", "masked", "huge", "constant"])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8"])
def test_sums_in_float32(forced: None, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    """As ``docs/statistics.md`` has it."""
    monkeypatch.setattr(devices, "_real_of", lambda device: (ms.float32, ""))
    monkeypatch.setattr(devices, "PART_SIZE", PART_SIZE)
    array = values(np.random.default_rng(8), DTYPES[DTYPE_CODES[name]], 300_000, kind)
    found, expected = deferred(tensor_of(array)), measured("numpy", array)
    assert devices.way_of(name, "cpu")[0] is devices.Way.MEASURED
    assert found.digests[0] == expected.digests[0]
    ours, theirs = found.statistics[0], expected.statistics[0]
    np.testing.assert_array_equal(ours[EXACT], theirs[EXACT])
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6 * theirs[STATISTICS.index("rms")])
    np.testing.assert_allclose(ours[STD], theirs[STD], rtol=2e-6)
    fits = np.isfinite(expected.sketches[0])
    length = np.linalg.norm(expected.sketches[0][fits].astype(np.float64))
    np.testing.assert_allclose(found.sketches[0][fits], expected.sketches[0][fits], atol=3e-5 * length)
