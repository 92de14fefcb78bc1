"""What torch tensors hold: measured, kept, turned into arrays, compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tenterhook.backends import Summary
from tenterhook.backends import _torch_device as devices
from tenterhook.backends import _torch_shards as shards
from tenterhook.backends._torch_unseen import hiding
from tenterhook.errors import UnsupportedError
from tenterhook.stats import DTYPE_CODES, GROUP_SKETCH, THREADED_NUMEL, RowBuffer, set_threads

__all__ = ["DTYPE_NAMES", "PLAIN", "TensorValues"]

_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
_DisableTorchDispatch: Any = torch._C._DisableTorchDispatch
_AS_IT_IS = contextlib.nullcontext()

DTYPE_NAMES = {
    value: name
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
}
_CODES = {dtype: DTYPE_CODES[name] for dtype, name in DTYPE_NAMES.items() if name in DTYPE_CODES}
PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer} if hasattr(nn, "Buffer") else {torch.Tensor, nn.Parameter})


class TensorValues:
    """The part of the backend that reads tensors."""

    def origin(self, tensor: torch.Tensor) -> object:
        return tensor.grad_fn

    def address(self, tensor: torch.Tensor) -> int | None:
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
            return None
        try:
            return tensor.data_ptr() or None
        except RuntimeError:  # no storage of its own: functorch wrapper
            return None

    def summary(self, tensor: torch.Tensor) -> Summary:
        if type(tensor) in PLAIN:
            return self._summary(tensor)
        with torch._C.DisableTorchFunctionSubclass():  # its class may refuse what is asked
            shape, dtype, device = self._summary(tensor)
        return (
            tuple(size if isinstance(size, int) else -1 for size in shape),
            dtype,
            device,
        )  # ragged, or a tracer's symbols

    def _summary(self, tensor: torch.Tensor) -> Summary:
        dtype = tensor.dtype
        try:
            shape = tuple(tensor.shape)
        except RuntimeError:  # of a nested tensor in the strided layout
            shape = (tensor.size(0), *(-1 for _ in range(tensor.dim() - 1)))
        return shape, DTYPE_NAMES.get(dtype) or str(dtype), "cpu" if tensor.is_cpu else str(tensor.device)

    def measure(self, tensor: torch.Tensor, rows: RowBuffer, row: int) -> str | None:
        if type(tensor) in PLAIN:
            try:
                if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_nested):
                    code = _CODES.get(dtype := tensor.dtype)
                    if code is not None and not (dtype.is_complex and tensor.is_conj()):
                        numel = tensor.numel()
                        if numel >= THREADED_NUMEL:
                            set_threads(torch.get_num_threads())
                        storage = tensor.untyped_storage()
                        if not numel or (  # else let go, as FSDP does, in part or as a whole, or never there
                            storage.data_ptr()
                            and storage.nbytes() >= (tensor.storage_offset() + numel) * dtype.itemsize
                        ):
                            rows.measure_flat(row, tensor.data_ptr(), code, numel)
                            return None
            except RuntimeError:
                pass  # no storage of its own: functorch wrapper, sparse or nested layout; told apart below
        return self._measure_unusual(tensor, rows, row)

    def _measure_unusual(self, tensor: torch.Tensor, rows: RowBuffer, row: int) -> str | None:
        if type(tensor) in PLAIN or shards.is_dtensor(tensor):
            return self._measure_any(tensor, rows, row)
        with torch._C.DisableTorchFunctionSubclass():
            return self._measure_any(tensor, rows, row)

    def _measure_any(self, tensor: torch.Tensor, rows: RowBuffer, row: int) -> str | None:
        note = None
        while _functorch.is_functorch_wrapped_tensor(tensor):
            if _is_batched(tensor):
                note = "statistics over the whole vmap batch"
            tensor = _functorch.get_unwrapped(tensor)
        offset: int | None = 0
        if shards.is_dtensor(tensor):
            offset, note = shards.sketch_offset(tensor), shards.shard_note(tensor)
            tensor = shards.local_part(tensor)
        if type(tensor) in PLAIN and tensor._is_zerotensor():  # of forward-mode differentiation: no memory behind it
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        reason = _why_no_values(tensor)
        if reason is not None:
            return reason
        name = DTYPE_NAMES.get(tensor.dtype, "")
        if name not in DTYPE_CODES:
            return f"no statistics for dtype {name or tensor.dtype}"
        with devices.unseen(), _AS_IT_IS if type(tensor) in PLAIN else _DisableTorchDispatch():
            plain = tensor.detach().resolve_conj().resolve_neg()
            if self.defers(plain):
                return devices.defer(plain, rows, row, code=DTYPE_CODES[name], offset=offset) or note
        if plain.numel() >= THREADED_NUMEL:
            set_threads(torch.get_num_threads())
        rows.measure(row, plain.data_ptr(), name, tuple(plain.shape), tuple(plain.stride()), offset or 0)
        if offset is None:
            rows.valid[row] &= ~GROUP_SKETCH & 0xFF
        return note

    def defers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is measured where it lies, and its row filled in later: all but those of the host."""
        return not tensor.is_cpu

    def shard_offset(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        return None if type(tensor) in PLAIN else shards.shard_offset(_unwrapped(tensor))

    def keep(self, tensor: torch.Tensor, dtype: str | None = None) -> Any:
        tensor = _unwrapped(tensor)
        if shards.is_dtensor(tensor):
            tensor = shards.local_part(tensor)
        with self.untracked(), _AS_IT_IS if type(tensor) in PLAIN else torch._C.DisableTorchFunctionSubclass():
            if (reason := _why_no_copy(tensor)) is not None:
                raise UnsupportedError(reason)
            plain = tensor.detach()
            if dtype is not None and plain.is_floating_point() and not plain.is_quantized and not plain.is_meta:
                return plain.to("cpu", getattr(torch, dtype), copy=True)
            return plain.clone() if plain.is_cpu or plain.is_meta else plain.to("cpu", copy=True)

    def reference(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if type(tensor) not in PLAIN or tensor.is_inference() or _functorch.is_functorch_wrapped_tensor(tensor):
            return None
        return tensor.detach()  # shares the count of changes, too

    def to_numpy(self, kept: torch.Tensor) -> Any:
        if (reason := _why_no_array(kept)) is not None:
            raise UnsupportedError(reason)
        if kept.layout is not torch.strided or kept.is_quantized:
            kept = kept.dequantize() if kept.is_quantized else kept.to_dense()
        name = DTYPE_NAMES.get(kept.dtype, "")
        kept = kept.detach().resolve_conj().resolve_neg()
        try:
            return kept.numpy()
        except TypeError:  # dtypes that NumPy lacks travel as their bytes
            dtype = getattr(ml_dtypes, name, None)
            if dtype is None:
                raise UnsupportedError(f"NumPy has no dtype {name or kept.dtype}") from None
            return kept.contiguous().view(torch.uint8 if kept.itemsize == 1 else torch.int16).numpy().view(dtype)

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        if shards.is_dtensor(tensor):
            tensor = shards.local_part(tensor)
        plain = tensor.detach()
        # to pinned memory of the host: that waits for nothing, and the device keeps its memory for the step
        return plain.clone() if plain.is_cpu or plain.is_meta else plain.to("cpu", non_blocking=True)

    def difference(self, kept: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if shards.is_dtensor(kept):
            local = shards.local_part(kept).detach()
            return shards.shard_like(kept, local - other.to(local.device, non_blocking=True))
        return kept.detach() - other.to(kept.device, non_blocking=True)

    def unscaled(self, gradient: torch.Tensor, scale: float) -> torch.Tensor:
        with torch.no_grad():
            whole = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
            return whole / scale

    @hiding
    def numel(self, tensor: torch.Tensor) -> int:
        return 0 if is_lazy(tensor) else tensor.numel()

    @contextlib.contextmanager
    def untracked(self) -> Iterator[None]:
        # within torch.func.grad or vmap even detach() would give one of their wrappers again, without storage
        with torch._C._DisableFuncTorch(), torch.no_grad():
            yield


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def _is_batched(tensor: torch.Tensor) -> bool:
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def _why_no_values(tensor: torch.Tensor) -> str | None:
    if tensor.is_meta:
        return "meta tensor: no values"
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return "fake tensor: no values"
    if tensor.is_nested:
        return "nested tensor: no statistics"
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return "tensor of layout _mkldnn: no statistics"
    if tensor.layout is not torch.strided:
        return f"sparse tensor ({str(tensor.layout).removeprefix('torch.')}): no statistics"
    if tensor.is_quantized:
        return "quantised tensor: no statistics"
    try:
        there = _has_storage(tensor)
        if there and _is_cut_short(tensor):
            return f"{type(tensor).__name__}: its storage has been made smaller than it is"
    except RuntimeError as error:  # NotImplementedError is one
        return f"{type(tensor).__name__}: no statistics ({str(error).splitlines()[0]})"
    return None if there else f"{type(tensor).__name__}: no storage of its own"


def _has_storage(tensor: torch.Tensor) -> bool:
    return _end(tensor) == 0 or (tensor.untyped_storage().nbytes() > 0 and tensor.data_ptr() != 0)


def _is_cut_short(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() < _end(tensor)


def _why_no_copy(tensor: torch.Tensor) -> str | None:
    """Say why a plain tensor has no values to copy any more: torch would read past the end of its memory."""
    if type(tensor) not in PLAIN or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        return None
    if tensor._is_zerotensor() or not _is_cut_short(tensor):
        return None
    return "its storage was let go" if not _has_storage(tensor) else "its storage has been made smaller than it is"


def _why_no_array(tensor: torch.Tensor) -> str | None:
    if tensor.is_meta:
        return "meta tensor has no data"
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return "fake tensor has no data"
    return "nested tensor has no array of one shape" if tensor.is_nested else None


def _end(tensor: torch.Tensor) -> int:
    """Return how many bytes of storage a strided tensor needs."""
    if not tensor.numel():
        return 0
    last: Any = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.element_size()
