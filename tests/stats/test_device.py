"""Measured where it lies, a tensor has the row that it would have on the host, but for rounding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenterhook.backends import _torch_device as devices
from tenterhook.backends import _torch_measuring as parts
from tenterhook.backends._torch_arrays import from_numpy
from tenterhook.stats import DTYPE_CODES, GROUP_DIGEST, GROUP_STATISTICS, STATISTICS, RowBuffer
from tenterhook.stats.layout import DTYPES
from tests.stats.arrays import KINDS, arrays, layouts, values
from tests.stats.same import assert_same_row, measured
from tests.stats.torch_dtypes import OF_TORCH

MEAN, STD, RMS = (STATISTICS.index(name) for name in ("mean", "std", "rms"))


@pytest.fixture(scope="module", autouse=True)
def everything_in_small_parts() -> Iterator[None]:
    """No tensor is so small that it is brought over and measured on the host, and parts are as small as chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "_COPIED", 0)
        patch.setattr(devices, "PART_SIZE", 2048)
        yield


def deferred(tensor: torch.Tensor, offset: int | None = 0, **groups: bool) -> RowBuffer:
    buffer = RowBuffer(1, **groups)
    code = DTYPE_CODES[str(tensor.dtype).removeprefix("torch.")]
    with devices.unseen():
        assert devices.defer(tensor, buffer, 0, code=code, offset=offset) is None
    assert not buffer.valid[0], "nothing is filled in before it is asked for"
    assert buffer.settle() == {}
    return buffer


@given(array=arrays(dtypes=OF_TORCH), offset=st.one_of(st.just(0), st.integers(0, 2**40)))
@settings(max_examples=300, deadline=None)
def test_contiguous_tensors(array: np.ndarray, offset: int) -> None:
    assert_same_row(deferred(from_numpy(array), offset), measured("numpy", array, offset), array)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", OF_TORCH, ids=lambda dtype: dtype.name)
def test_every_dtype_with_every_kind_of_values(dtype: np.dtype, kind: str) -> None:
    array = values(np.random.default_rng(7), dtype, 5000, kind)
    assert_same_row(deferred(from_numpy(array)), measured("numpy", array), array)


@given(layout=layouts(), dtype=st.sampled_from(OF_TORCH), seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_any_strides(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]], dtype: np.dtype, seed: int
) -> None:
    shape, strides, (first, extent) = layout
    strides = tuple(abs(stride) for stride in strides)  # torch has no negative ones
    storage = values(np.random.default_rng(seed), dtype, first + extent, "normal")
    view = np.ndarray(shape, dtype, storage, 0, tuple(stride * dtype.itemsize for stride in strides))
    tensor = from_numpy(storage).as_strided(shape, strides)
    assert_same_row(deferred(tensor), measured("numpy", np.ascontiguousarray(view)), view)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "uint8"])
def test_large_views(dtype: str) -> None:
    kind = DTYPES[DTYPE_CODES[dtype]]
    storage = values(np.random.default_rng(1), kind, 60 * 70 * 80, "normal").reshape(60, 70, 80)
    tensor = from_numpy(storage)
    for axes in itertools.permutations(range(3)):
        assert_same_row(
            deferred(tensor.permute(axes)[::3, 1:]),
            measured("numpy", np.ascontiguousarray(storage.transpose(axes)[::3, 1:])),
            storage,
        )
    for view in (tensor[:1, :, :1].expand(60, 70, 80), tensor[0, 0, 0], tensor.reshape(-1)[3:]):
        expected = storage[:1, :, :1], storage[0, 0, 0], storage.reshape(-1)[3:]
        array = np.broadcast_to(expected[0], (60, 70, 80)) if view.dim() == 3 else expected[1 if view.dim() == 0 else 2]
        assert_same_row(deferred(view), measured("numpy", np.ascontiguousarray(array)), np.asarray(array))


@pytest.mark.parametrize("kind", ["normal", "masked", "cancelling"])
def test_parts_of_full_size_merge(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(devices, "PART_SIZE", parts.PART_SIZE)
    array = values(np.random.default_rng(4), np.dtype(np.float32), 2_500_001, kind)
    assert_same_row(deferred(from_numpy(array), 77), measured("numpy", array, 77), array)


def test_std_survives_a_mean_a_million_times_larger() -> None:
    array = (1e3 + 1e-3 * np.random.default_rng(0).standard_normal(300_000)).astype(np.float32)
    assert deferred(from_numpy(array)).statistics[0, STD] == pytest.approx(array.astype(np.float64).std(), rel=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bits"])
@pytest.mark.parametrize(
    "dtype", [d for d in OF_TORCH if d.name not in ("float64", "complex128")], ids=lambda d: d.name
)
def test_devices_without_float64(monkeypatch: pytest.MonkeyPatch, dtype: np.dtype, kind: str) -> None:
    """As ``docs/statistics.md`` has it: what float32 does not hold exactly is rounded to it first."""
    monkeypatch.setattr(devices, "real_dtype", lambda device: torch.float32)
    monkeypatch.setattr(devices, "PART_SIZE", parts.PART_SIZE)
    array = values(np.random.default_rng(8), dtype, 300_000, kind)
    found, expected = deferred(from_numpy(array)), measured("numpy", array)
    assert found.digests[0] == expected.digests[0]
    ours, theirs = found.statistics[0], expected.statistics[0]
    np.testing.assert_array_equal(ours[[0, 7, 8, 9, 10]], theirs[[0, 7, 8, 9, 10]])
    np.testing.assert_allclose(ours[1:7], theirs[1:7], rtol=2e-6, atol=1e-6 * theirs[RMS] + 1e-44)
    rounded = dtype.itemsize >= 4 and dtype.kind in "iuc"
    np.testing.assert_allclose(ours[STD], theirs[STD], rtol=2e-6, atol=1e-7 * theirs[RMS] if rounded else 1e-44)
    fits = np.isfinite(expected.sketches[0])
    length = np.linalg.norm(expected.sketches[0][fits].astype(np.float64))
    np.testing.assert_array_equal(np.isfinite(found.sketches[0]), fits)
    np.testing.assert_allclose(found.sketches[0][fits], expected.sketches[0][fits], atol=1e-5 * length + 1e-40)


def test_groups_that_are_left_out() -> None:
    ones = torch.ones(5000)
    assert deferred(ones, sketch=False, digest=False).valid[0] == GROUP_STATISTICS
    unplaced = deferred(ones, offset=None)
    assert unplaced.valid[0] == GROUP_STATISTICS | GROUP_DIGEST
    assert not unplaced.sketches.any()


def test_small_tensors_come_over_and_have_the_very_row_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_COPIED", 256 * 1024)
    rng = np.random.default_rng(9)
    for dtype, size in itertools.product(OF_TORCH, (0, 1, 1000)):
        array = values(rng, dtype, size, "normal")
        found, expected = deferred(from_numpy(array), 5), RowBuffer(1)
        expected.measure_array(0, array, 5)
        np.testing.assert_array_equal(found.statistics, expected.statistics)
        np.testing.assert_array_equal(found.sketches, expected.sketches)
        assert (found.digests[0], found.valid[0]) == (expected.digests[0], 7)


def test_what_is_ordered_is_the_tensor_of_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (0, 256 * 1024):
        monkeypatch.setattr(devices, "_COPIED", limit)
        buffer, tensor = RowBuffer(1), torch.full((3000,), 2.0)
        with devices.unseen():
            devices.defer(tensor, buffer, 0, code=DTYPE_CODES["float32"], offset=0)
        tensor.fill_(7)
        buffer.settle()
        assert buffer.statistics[0, MEAN] == 2


def test_full_parcels_are_sent_and_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_COPIED", 4096)
    monkeypatch.setattr(devices, "_PARCEL", 10_000)
    buffer = RowBuffer(500)
    rng, tensors = np.random.default_rng(10), []
    for row in range(500):
        tensors.append(rng.standard_normal(1500 if row % 7 == 0 else 700).astype(np.float32))
        with devices.unseen():
            devices.defer(from_numpy(tensors[-1]), buffer, row, code=DTYPE_CODES["float32"], offset=0)
        (mine,) = buffer.deferred.values()
        held = [*mine._sent, mine._open]
        assert len(held) <= 5
        assert sum(parcel.memory.numel() for parcel in held) <= 5 * 10_000
    assert buffer.settle() == {}
    expected = RowBuffer(500)
    for row, array in enumerate(tensors):
        expected.measure_array(row, array)
    np.testing.assert_allclose(buffer.statistics, expected.statistics, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(buffer.digests, expected.digests)
    assert not buffer.deferred


def test_a_failing_device_loses_its_rows_with_a_reason_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_COPIED", 256 * 1024)
    buffer = RowBuffer(2)
    buffer.measure_array(1, np.ones(3))
    with devices.unseen():
        devices.defer(torch.ones(5), buffer, 0, code=DTYPE_CODES["float32"], offset=0)

    def fail(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered\nmore of it")

    monkeypatch.setattr(torch.Tensor, "cpu", fail)
    assert buffer.settle() == {0: "lost with its device: CUDA error: device-side assert triggered"}
    assert buffer.valid.tolist() == [0, 7]


@pytest.mark.parametrize("dtype", OF_TORCH, ids=lambda dtype: dtype.name)
def test_no_operation_asks_a_device_for_a_value_or_mixes_it_with_the_host(dtype: np.dtype) -> None:
    """The device ``meta`` has no values to ask for, and refuses partners of the host."""
    buffer = RowBuffer(4)
    whole = torch.empty((3, 70, 50), device="meta").to(getattr(torch, dtype.name))
    with devices.unseen():
        for row, tensor in enumerate((whole, whole.transpose(0, 2), whole[0, 0, 0].expand(5000), whole.view(-1)[3:])):
            assert devices.defer(tensor, buffer, row, code=DTYPE_CODES[dtype.name], offset=5) is None
    (mine,) = buffer.deferred.values()
    assert mine._open is not None and mine._open.memory.is_meta and mine._open.measured[::6] == [0, 1, 2, 3]
