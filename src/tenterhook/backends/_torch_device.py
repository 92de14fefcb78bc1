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
from tenterhook.stats.parcels import COUNTS_BYTES, SUMS, Parcel, ParcelRows, pieces
from tenterhook.stats.parts import PART_COUNTS, PART_SIZE

__all__ = ["DeviceRows", "defer", "unseen"]

_C: Any = torch._C

_COPIED = 256 * 1024  # bytes up to which a tensor is brought over and measured on the host
_PARCEL = 8 * 1024 * 1024


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


class _Parcel(Parcel):
    """A piece of device memory, and the copy of it on the host."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size)
        with torch.inference_mode(mode=False):  # else nothing could be written to it outside of one
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.streams: dict[int, Any] = {}
        self.host: torch.Tensor | None = None
        self.arrived: Any = None


class DeviceRows(ParcelRows[_Parcel]):
    """Measurements that have been ordered of one device for the rows of one buffer."""

    def __init__(self, device: torch.device, rows: RowBuffer) -> None:
        self._torch_real = real_dtype(device)
        super().__init__(rows, np.dtype(np.float64 if self._torch_real == torch.float64 else np.float32))
        self._device = device
        module = getattr(torch, device.type, None)
        # memory that is pinned, streams and events: without them a parcel is brought over when it is needed
        self._streams: Any = module if device.type != "cpu" and hasattr(module, "current_stream") else None

    def add(self, tensor: torch.Tensor, row: int, code: int, offset: int | None) -> None:
        """Order the measurement of one tensor."""
        rows, numel, size = self._rows, tensor.numel(), tensor.numel() * tensor.element_size()
        groups = rows.groups if offset is not None else rows.groups & ~GROUP_SKETCH
        if size <= _COPIED:
            parcel, start, memory = self._memory(size)
            if size:
                memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            parcel.copied += (row, start, code, numel, offset or 0, groups)
            return
        parts = -(-numel // PART_SIZE)
        parcel, start, memory = self._memory(parts * self._record)
        records = memory.view(parts, self._record)
        all_counts = records[:, : 8 * len(PART_COUNTS)].view(torch.int64)
        all_sums = records[:, COUNTS_BYTES:][:, : SUMS * self._real.itemsize].view(self._torch_real)
        for part, flat in enumerate(_pieces(tensor)):
            write_part(flat, part * PART_SIZE, offset or 0, groups, counts=all_counts[part], sums=all_sums[part])
        parcel.measured += (row, start, parts, numel, size, groups)

    def _memory(self, size: int) -> tuple[_Parcel, int, torch.Tensor]:
        parcel, start = self._reserve(size)
        if self._streams is not None:
            stream = self._streams.current_stream(self._device)
            if stream.stream_id not in parcel.streams:
                parcel.streams[stream.stream_id] = stream
                parcel.memory.record_stream(stream)
        return parcel, start, parcel.memory[start : start + size]

    def _begin(self, size: int) -> _Parcel:
        return _Parcel(max(_PARCEL, size), self._device)

    def _dispatch(self, parcel: _Parcel) -> None:
        if self._streams is None:
            return
        here = self._streams.current_stream(self._device)
        for stream in parcel.streams.values():
            if stream != here:
                here.wait_stream(stream)
        parcel.host = torch.empty(parcel.used, dtype=torch.uint8, pin_memory=True)
        parcel.host.copy_(parcel.memory[: parcel.used], non_blocking=True)
        parcel.arrived = here.record_event()

    def _arrived(self, parcel: _Parcel) -> np.ndarray:
        if parcel.arrived is not None:
            parcel.arrived.synchronize()
        return (parcel.memory[: parcel.used].cpu() if parcel.host is None else parcel.host).numpy()

    def _unseen(self) -> contextlib.AbstractContextManager[None]:
        return unseen()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    return pieces(tensor, tuple(tensor.shape), PART_SIZE, contiguous=tensor.is_contiguous(), flat=_flat)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous()
    return flat.as_strided((flat.numel(),), (1,))  # a view() may keep another stride where there is one element
