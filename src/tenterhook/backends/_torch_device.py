"""Statistics of tensors on an accelerator, without waiting for it at each of them.

What a hook sees is ordered on the device and comes over in parcels: a parcel is a piece of device memory to which small
tensors are copied, and into which large ones are measured, part by part. One transfer a step brings it over, or one where it
is full. Small tensors are measured on the host, by the same kernel as tensors of the CPU: for them one copy on the device
costs less than the fifty operations of a measurement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tenterhook.backends._torch_measuring import real_dtype, write_part
from tenterhook.stats import GROUP_SKETCH, RowBuffer
from tenterhook.stats.layout import SKETCH_SIZE
from tenterhook.stats.parts import PART_COUNTS, PART_SIZE, PART_SUMS, parts_row

__all__ = ["DeviceRows", "defer", "unseen"]

_C: Any = torch._C

_COPIED = 256 * 1024  # bytes up to which a tensor is brought over and measured on the host
_PARCEL = 8 * 1024 * 1024
_SENT = 4  # parcels on their way at once; with the one being filled they bound the memory of a device
_ALIGNED = 64
_COUNTS_BYTES = -(-8 * len(PART_COUNTS) // _ALIGNED) * _ALIGNED
_SUMS = len(PART_SUMS) + SKETCH_SIZE


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Keep operations of ours from graphs, from function transforms and from the modes that watch the user's operations."""
    with _C._DisableFuncTorch(), _C.DisableTorchFunction(), torch.no_grad():
        if not _C._len_torch_dispatch_stack():
            yield
            return
        with _disable_current_modes():
            yield


def defer(tensor: torch.Tensor, rows: RowBuffer, row: int, *, code: int, offset: int | None) -> str | None:
    """Order the measurement of a tensor, to be filled in by ``rows.settle()``.

    Args:
        tensor: strided, without a graph, conjugation and negation resolved; on any device.
        rows: where it goes.
        row: the number of its row.
        code: of its dtype, from ``DTYPE_CODES``.
        offset: flat index of its first element in the whole that it is a shard of; None leaves the sketch out.

    Returns:
        Why it cannot be measured, or None. Work, not results: it waits for nothing, but where more parcels are on their way
        than memory is set apart for.
    """
    device = tensor.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "captured in a CUDA graph: it runs again without Python"
    mine = rows.deferred.get(device)
    if not isinstance(mine, DeviceRows):
        mine = rows.deferred[device] = DeviceRows(device, rows)
    try:
        mine.add(tensor, row, code, offset)
    except torch.OutOfMemoryError:
        return "no memory left on the device for its statistics"
    return None


class _Parcel:
    """A piece of device memory, what lies in it, and the copy of it on the host."""

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.inference_mode(mode=False):  # else nothing could be written to it outside of one
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.used = 0
        # Plain numbers one after the other: objects for each tensor would keep the garbage collector busy.
        self.copied: list[int] = []  # row, place, dtype's code, elements, offset, groups
        self.measured: list[int] = []  # row, place, parts, bytes, groups
        self.streams: dict[int, Any] = {}
        self.host: torch.Tensor | None = None
        self.arrived: Any = None

    def take(self, size: int) -> tuple[int, torch.Tensor] | None:
        """Return place and memory for so many bytes; None where it is full."""
        start = self.used
        if start + size > self.memory.numel():
            return None
        self.used = start + -(-size // _ALIGNED) * _ALIGNED
        return start, self.memory[start : start + size]


class DeviceRows:
    """Measurements that have been ordered of one device for the rows of one buffer.

    As everything of a row buffer, it is used by one thread at a time.
    """

    def __init__(self, device: torch.device, rows: RowBuffer) -> None:
        self._device = device
        self._rows = rows
        self._real = real_dtype(device)
        self._record = _COUNTS_BYTES + -(-_SUMS * self._real.itemsize // _ALIGNED) * _ALIGNED
        self._open: _Parcel | None = None
        self._sent: list[_Parcel] = []
        self._lost: dict[int, str] = {}
        module = getattr(torch, device.type, None)
        # memory that is pinned, streams and events: without them a parcel is brought over when it is needed
        self._streams: Any = module if device.type != "cpu" and hasattr(module, "current_stream") else None

    def add(self, tensor: torch.Tensor, row: int, code: int, offset: int | None) -> None:
        """Order the measurement of one tensor."""
        rows, numel, size = self._rows, tensor.numel(), tensor.numel() * tensor.element_size()
        groups = rows.groups if offset is not None else rows.groups & ~GROUP_SKETCH
        if size <= _COPIED:
            parcel, start, memory = self._reserve(size)
            if size:
                memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            parcel.copied += (row, start, code, numel, offset or 0, groups)
            return
        parts = -(-numel // PART_SIZE)
        parcel, start, memory = self._reserve(parts * self._record)
        records = memory.view(parts, self._record)
        all_counts = records[:, : 8 * len(PART_COUNTS)].view(torch.int64)
        all_sums = records[:, _COUNTS_BYTES:][:, : _SUMS * self._real.itemsize].view(self._real)
        for part, flat in enumerate(_pieces(tensor)):
            write_part(flat, part * PART_SIZE, offset or 0, groups, counts=all_counts[part], sums=all_sums[part])
        parcel.measured += (row, start, parts, size, groups)

    def _reserve(self, size: int) -> tuple[_Parcel, int, torch.Tensor]:
        place = None if self._open is None else self._open.take(size)
        if place is None:
            self._send()
            while len(self._sent) >= _SENT:
                self._bring(self._sent.pop(0))
            self._open = _Parcel(max(_PARCEL, size), self._device)
            place = self._open.take(size)
            assert place is not None
        parcel = self._open
        assert parcel is not None
        if self._streams is not None:
            stream = self._streams.current_stream(self._device)
            if stream.stream_id not in parcel.streams:
                parcel.streams[stream.stream_id] = stream
                parcel.memory.record_stream(stream)
        return parcel, *place

    def send(self) -> None:
        """Begin to bring over what has been ordered, once the streams that it was ordered on come to it."""
        with unseen():
            self._send()

    def _send(self) -> None:
        parcel, self._open = self._open, None
        if parcel is None:
            return
        self._sent.append(parcel)
        if self._streams is None:
            return
        here = self._streams.current_stream(self._device)
        for stream in parcel.streams.values():
            if stream != here:
                here.wait_stream(stream)
        parcel.host = torch.empty(parcel.used, dtype=torch.uint8, pin_memory=True)
        parcel.host.copy_(parcel.memory[: parcel.used], non_blocking=True)
        parcel.arrived = here.record_event()

    def settle(self) -> dict[int, str]:
        """Fill in the rows; returns those that are lost and why."""
        with unseen():
            self._send()
            while self._sent:
                self._bring(self._sent.pop(0))
        lost, self._lost = self._lost, {}
        return lost

    def _bring(self, parcel: _Parcel) -> None:
        """Wait for a parcel and fill in its rows."""
        try:
            if parcel.arrived is not None:
                parcel.arrived.synchronize()
            host = (parcel.memory[: parcel.used].cpu() if parcel.host is None else parcel.host).numpy()
        except RuntimeError as error:  # the device has failed: what it holds is lost, the other rows are not
            why = f"lost with its device: {str(error).splitlines()[0]}"
            self._lost.update(dict.fromkeys(parcel.copied[::6] + parcel.measured[::5], why))
            return
        rows, address = self._rows, host.ctypes.data
        for row, start, code, numel, offset, groups in _in_turn(parcel.copied, 6):
            rows.measure_flat(row, address + start, code, numel, offset)
            rows.valid[row] &= groups
        for row, start, parts, size, groups in _in_turn(parcel.measured, 5):
            records = _records(host[start:][: parts * self._record], parts, self._real)
            parts_row(rows, row, records, size, groups)


def _in_turn(numbers: list[int], width: int) -> Iterator[tuple[int, ...]]:
    """Take so many at a time."""
    return zip(*[iter(numbers)] * width, strict=True)


def _records(memory: np.ndarray, parts: int, real: torch.dtype) -> list[tuple[np.ndarray, np.ndarray]]:
    kind = np.dtype(np.float64 if real == torch.float64 else np.float32)
    records = memory.reshape(parts, -1)
    counts = np.ascontiguousarray(records[:, : 8 * len(PART_COUNTS)]).view(np.int64)
    sums = np.ascontiguousarray(records[:, _COUNTS_BYTES:][:, : _SUMS * kind.itemsize]).view(kind).astype(np.float64)
    return list(zip(counts, sums, strict=True))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a tensor into contiguous pieces of ``PART_SIZE`` elements in logical order.

    One that is not contiguous is copied piece by piece, unless an index of its first dimension holds more than a piece: then it
    is copied as a whole.
    """
    numel = tensor.numel()
    rows = 0 if tensor.dim() == 0 else tensor.shape[0]
    if tensor.is_contiguous() or rows < 2 or numel // rows > PART_SIZE:
        flat = _flat(tensor)
        for start in range(0, numel, PART_SIZE):
            yield flat[start : start + PART_SIZE]
        return
    width = numel // rows
    for start in range(0, numel, PART_SIZE):
        end = min(start + PART_SIZE, numel)
        first, last = start // width, -(-end // width)
        yield _flat(tensor[first:last])[start - first * width : end - first * width]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous()
    return flat.as_strided((flat.numel(),), (1,))  # a view() may keep another stride where there is one element
