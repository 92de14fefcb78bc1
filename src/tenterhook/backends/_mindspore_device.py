"""Statistics of MindSpore tensors on an accelerator, without waiting for it at each of them.

As :mod:`tenterhook.backends._torch_device`: small tensors are copied and large ones measured where they lie, and one transfer
a step brings over what has been ordered. Since operations in place do not work on every device of MindSpore's, a parcel is a
list of pieces that are joined when it is closed.

No operation is trusted before it has been tried: the first tensor of a dtype on a device is preceded by one whose row is known.
What the device cannot measure it may be able to copy, and what it cannot copy is copied to the host tensor by tensor, which is
told.
"""

from __future__ import annotations

import contextlib
from enum import Enum
from functools import lru_cache
from typing import Any

import mindspore
import numpy as np
from mindspore import ops

from tenterhook.backends._mindspore_measuring import copied_bytes, flat, part_record
from tenterhook.backends._mindspore_unseen import may_compute, unseen
from tenterhook.backends._mindspore_watching import tell_once
from tenterhook.stats import DTYPE_CODES, STATISTICS, RowBuffer
from tenterhook.stats.layout import DTYPES
from tenterhook.stats.parcels import Parcel, ParcelRows, aligned, pieces
from tenterhook.stats.parts import PART_SIZE

__all__ = ["DeviceRows", "Way", "copy_where_it_lies", "defer", "device_of", "way_of"]

_COPIED = 256 * 1024  # bytes up to which a tensor is brought over and measured on the host
_PARCEL = 8 * 1024 * 1024
_JOINED = 128  # pieces at once; operations of very many inputs are not trusted
_TRIED = 5000  # elements of the tensor that is measured first
_SIX_DIGITS = 1e-6


class Way(Enum):
    """What a device does with tensors of a dtype."""

    MEASURED = "measured"
    COPIED = "copied"
    ON_HOST = "copied to the host one by one"


def device_of(tensor: mindspore.Tensor) -> str:
    """Name the device that a tensor lies on, ``"cpu"``, ``"ascend:0"``, ``"gpu:0"``."""
    return str(tensor.device).lower()


def defer(tensor: mindspore.Tensor, rows: RowBuffer, row: int, *, name: str, device: str) -> bool:
    """Order the measurement of a tensor, to be filled in by ``rows.settle()``.

    Args:
        tensor: of any device; to be called in :func:`unseen`.
        rows: where it goes.
        row: the number of its row.
        name: of its dtype, one of ``DTYPE_CODES``.
        device: where it lies.

    Returns:
        False where this cannot be done on the device. It waits for nothing, but where a dtype is met first, and where more
        parcels are on their way than memory is set apart for.
    """
    if not may_compute():
        tell_once(
            f"while operations are watched by a dispatch mode, tensors of {device} are copied to the host one by one"
        )
        return False
    if not _in_order(device):
        tell_once(f"tensors of {device} that are made in streams of the user's are copied to the host one by one")
        return False
    way, why, real = way_of(name, device)
    size = tensor.nbytes
    if way is Way.ON_HOST or (way is Way.COPIED and size > _PARCEL):
        tell_once(f"{name} tensors of {device} are copied to the host one by one: {why}")
        return False
    mine = rows.deferred.get(device)
    if not isinstance(mine, DeviceRows):
        mine = rows.deferred[device] = DeviceRows(
            rows, np.dtype(np.float64 if real == mindspore.float64 else np.float32)
        )
    try:
        mine.add(tensor, row, DTYPE_CODES[name], measured=size > _COPIED and way is Way.MEASURED)
    except RuntimeError as error:  # no memory left there, say; what is copied to the host needs none
        tell_once(f"tensors that {device} did not measure were copied to the host one by one: {_first_line(error)}")
        return False
    return True


def copy_where_it_lies(tensor: mindspore.Tensor) -> mindspore.Tensor:
    """Copy a tensor on its device, out of differentiation; to be called in :func:`unseen`."""
    if not tensor.size:
        return tensor
    return copied_bytes(tensor)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _in_order(device: str) -> bool:
    """Whether what is ordered now runs in the order in which it is ordered: a parcel holds what one stream has made."""
    if device.startswith("cpu"):
        return True
    runtime: Any = mindspore.runtime
    return runtime.current_stream() == runtime.default_stream()


class _Parcel(Parcel):
    """Pieces of device memory in the order of their places; each fills its place up to the next."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._joined: list[mindspore.Tensor] = []
        self._pieces: list[mindspore.Tensor] = []

    def put(self, piece: mindspore.Tensor) -> None:
        """Put a piece at the place that was taken last."""
        self._pieces.append(piece)
        if len(self._pieces) >= _JOINED:
            self._join()

    def close(self) -> None:
        """Join all pieces to one."""
        self._joined, self._pieces = [*self._joined, *self._pieces], []
        if len(self._joined) > 1 and may_compute():
            # Else, and where there is no memory left for it, the pieces come over one by one.
            with contextlib.suppress(RuntimeError):
                self._joined = [ops.cat(self._joined)]

    def _join(self) -> None:
        # Where there is no memory left for it, the pieces come over one by one. None may be missing: they tell the places of the next.
        with contextlib.suppress(RuntimeError):
            self._joined, self._pieces = [*self._joined, ops.cat(self._pieces)], []

    def bring(self) -> np.ndarray:
        """Wait for it and return its bytes: the one transfer."""
        arrays = [piece.asnumpy() for piece in self._joined]
        return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.uint8), *arrays])


class DeviceRows(ParcelRows[_Parcel]):
    """Measurements that have been ordered of one device for the rows of one buffer."""

    def add(self, tensor: mindspore.Tensor, row: int, code: int, *, measured: bool) -> None:
        """Order the measurement of one tensor, or the copy of it that is measured later."""
        numel, size, groups = tensor.size, tensor.nbytes, self._rows.groups
        if not measured:
            piece = copied_bytes(tensor) if size else None  # first: it may fail
            parcel, start = self._reserve(size)
            if piece is not None:
                parcel.put(piece)
            parcel.copied += (row, start, code, numel, 0, groups)
            return
        real = mindspore.float64 if self._real == np.float64 else mindspore.float32
        cut = pieces(tensor, tuple(tensor.shape), PART_SIZE, contiguous=tensor.is_contiguous(), flat=flat)
        records = [part_record(part, number * PART_SIZE, groups, real) for number, part in enumerate(cut)]
        parcel, start = self._reserve(len(records) * self._record)
        for record in records:
            parcel.put(record)
        parcel.measured += (row, start, len(records), numel, size, groups)

    def _begin(self, size: int) -> _Parcel:
        return _Parcel(max(_PARCEL, aligned(size)))

    def _dispatch(self, parcel: _Parcel) -> None:
        parcel.close()

    def _arrived(self, parcel: _Parcel) -> np.ndarray:
        return parcel.bring()

    def _unseen(self) -> contextlib.AbstractContextManager[None]:
        return unseen()


# --- trying ----------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=64)
def way_of(name: str, device: str) -> tuple[Way, str, Any]:
    """Try what a device can do with tensors of a dtype; once, since it waits for the device.

    Args:
        name: of the dtype, one of ``DTYPE_CODES``.
        device: where it is tried.

    Returns:
        What it does, why it does no better, and what it carries sums in, float64 or float32; a device has one of the two.
    """
    real, why = _real_of(device)
    with unseen():
        try:
            array, tensor = _known(name)
            expected = RowBuffer(1)
            expected.measure_array(0, array)
            with np.errstate(all="ignore"):
                trouble = _difference(_row(tensor, name, real, measured=False), expected, 0.0)
            if trouble:
                return Way.ON_HOST, f"it copies them wrongly ({trouble})", real
        except Exception as error:  # a kernel that is missing is of any type, and no reason to end a training
            return Way.ON_HOST, _first_line(error), real
        if real is mindspore.float32 and DTYPES[DTYPE_CODES[name]].itemsize >= 4 and name != "float32":
            return Way.COPIED, why, real
        try:
            trouble = _difference(_row(tensor, name, real, measured=True), expected, _SIX_DIGITS)
        except Exception as error:  # as above
            trouble = _first_line(error)
    return (Way.COPIED, f"it measures them wrongly: {trouble}", real) if trouble else (Way.MEASURED, "", real)


@lru_cache(maxsize=16)
def _real_of(device: str) -> tuple[Any, str]:
    """Try whether sums can be carried in float64."""
    array = np.float64([1.0, 2.0**-40, 2.0**40])
    with unseen():
        try:
            exact = ops.sum(mindspore.Tensor(array)).asnumpy() == array.sum()
        except Exception as error:  # as above
            return mindspore.float32, f"no float64 ({_first_line(error)})"
    return (mindspore.float64, "") if exact else (mindspore.float32, "float64 is rounded")


def _known(name: str) -> tuple[np.ndarray, mindspore.Tensor]:
    """Make a tensor of every kind of values but subnormal ones, in memory and on the device."""
    dtype = DTYPES[DTYPE_CODES[name]]
    rng = np.random.default_rng(0)
    plain = rng.standard_normal(_TRIED)
    plain[::5], plain[1::50] = 0, 1e3
    if dtype.kind in "iu":
        array = (plain * 100).astype(np.int64).astype(dtype)
        array[:2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    elif dtype.kind == "b":
        array = plain > 0
    else:
        array = plain.astype(dtype)
        array[2:5] = np.array([np.nan, np.inf, -np.inf]).astype(dtype)
    if dtype.kind == "V" or name.startswith(
        "float8"
    ):  # a dtype that NumPy lacks; MindSpore takes float32 and casts it itself
        tensor = mindspore.Tensor(array.astype(np.float32)).astype(getattr(mindspore, name))
        array[2] = tensor[2:3].asnumpy().view(dtype)[0]  # whichever NaN it makes
        return array, tensor
    return array, mindspore.Tensor(array)


def _row(tensor: mindspore.Tensor, name: str, real: Any, *, measured: bool) -> RowBuffer:
    rows = RowBuffer(1)
    mine = DeviceRows(rows, np.dtype(np.float64 if real == mindspore.float64 else np.float32))
    mine.add(tensor, 0, DTYPE_CODES[name], measured=measured)
    lost = mine.settle()
    if lost:
        raise RuntimeError(lost[0])
    return rows


def _difference(found: RowBuffer, expected: RowBuffer, tolerance: float) -> str:
    """Say in what two rows differ, of which the counts, the extrema and the digest must be the same; empty if in nothing."""
    ours, theirs = found.statistics[0], expected.statistics[0]
    for name, one, other in zip(STATISTICS, ours, theirs, strict=True):
        exact = name in ("numel", "min", "max") or name.endswith("count")
        if abs(one - other) > (0.0 if exact else tolerance * theirs[STATISTICS.index("rms")]) or np.isnan(
            one
        ) != np.isnan(other):
            return f"{name} {one:g} instead of {other:g}"
    if found.digests[0] != expected.digests[0]:
        return "another digest"
    sketches = found.sketches[0].astype(np.float64), expected.sketches[0].astype(np.float64)
    apart = np.abs(sketches[0] - sketches[1]).max()
    return "another sketch" if not apart <= 10 * tolerance * np.linalg.norm(sketches[1]) else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
