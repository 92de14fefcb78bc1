"""The PyTorch backend.

Forward hooks and tensor hooks only: module backward hooks break in-place layers, are mute for nested outputs and fire
early where no input needs a gradient. Private torch names are used where no public one exists
(``_current_graph_task_id``, ``_functorch``); the tests in ``tests/semantics`` fail where a torch release renames them.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, cast

import ml_dtypes
import torch
from torch import nn
from torch.nn.modules import module as _module_registries
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tenterhook.backends import (
    After,
    Before,
    Detachable,
    Failed,
    InstalledHook,
    Instead,
    Layer,
    NativeBackend,
    OpListener,
    ParameterEntry,
    Summary,
)
from tenterhook.backends import _torch_checkpoint as checkpoint
from tenterhook.backends import _torch_device as devices
from tenterhook.backends import _torch_models as models
from tenterhook.backends import _torch_shards as shards
from tenterhook.backends._torch_aliases import hand_back
from tenterhook.backends._torch_attachments import Attachment, iterated, put_in_layer, remove_late
from tenterhook.backends._torch_editing import Bypass, clip_together, constant, gradients, where
from tenterhook.backends._torch_fast_paths import closed_fast_paths, is_under_compiled
from tenterhook.backends._torch_installed import list_hooks
from tenterhook.backends._torch_native import attach_around, give_way, native_parts
from tenterhook.backends._torch_ops import OpMode, is_builtin_forward
from tenterhook.backends._torch_taps import PostAccumulateTap, ShardTap, Tap, differentiated, tap_parameter, tap_tensor
from tenterhook.backends._torch_tracebacks import bare_traceback
from tenterhook.backends._torch_tracing import untraced
from tenterhook.errors import UnsupportedError
from tenterhook.native import NATIVE, FrameworkParts
from tenterhook.selection import Entry
from tenterhook.stats import DTYPE_CODES, GROUP_SKETCH, THREADED_NUMEL, RowBuffer, set_threads

__all__ = ["BACKEND", "TorchBackend"]

_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
_outside_transforms: Any = (
    torch._C._DisableFuncTorch
)  # else a transform that runs wraps the results of our own operations
_current_graph_task = torch._C._current_graph_task_id

_DTYPE_NAMES = {
    value: name
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
}
_CODES = {dtype: DTYPE_CODES[name] for dtype, name in _DTYPE_NAMES.items() if name in DTYPE_CODES}
_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer} if hasattr(nn, "Buffer") else {torch.Tensor, nn.Parameter})


class _Hook:
    """A callback in a module's hook table; copies and pickles of the module carry one that does nothing."""

    __slots__ = ("after", "before", "failed", "layer")

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        # loads where tenterhook is not installed, takes any arguments, returns None
        return (getattr, (contextlib.nullcontext(), "__exit__"))


class _BeforeHook(_Hook):
    __slots__ = ()

    def __init__(self, before: Before, layer: Layer) -> None:
        self.before = before
        self.layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs is None:  # removed by a hook before it in this very call: torch still calls it, and has forgotten how
            return None
        remove_late()
        return self.before(module, args, kwargs)


_REMOVED = object()


class _AfterHook(_Hook):
    __slots__ = ()

    def __init__(self, after: After | None, failed: Failed | None, layer: Layer) -> None:
        self.after = after
        self.failed = failed
        self.layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = _REMOVED) -> Any:
        if output is _REMOVED:  # by a hook before it in this very call
            return None
        error = sys.exc_info()[1]
        # torch runs these hooks also when the call raised, from the handler in the frame that calls us
        if error is not None and error.__traceback__ is not None and error.__traceback__.tb_frame is sys._getframe(1):
            if self.failed is not None:
                with iterated(module._forward_hooks):
                    self.failed(module, args, kwargs, error)
            return None
        return None if self.after is None else self.after(module, args, kwargs, output)


class _LoadHook(_Hook):
    __slots__ = ("fn",)

    def __init__(self, fn: Callable[[Any, Any], None]) -> None:
        self.fn = fn

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.fn(module, incompatible_keys)


class _AnyCall:
    """The global forward-pre hook of a recording that does not know its models yet."""

    def __init__(
        self, wanted: Callable[[Any], bool], fn: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
    ) -> None:
        self._wanted = wanted
        self._fn = fn

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # of a wrapper the module inside bears the name, and is called next
        if self._wanted(module) and not models.is_wrapper(module):
            # torch gives a global pre-hook no keyword arguments; they stand in the frame that calls it
            self._fn(module, args, sys._getframe(1).f_locals.get("kwargs", {}))


class _Unwarned:
    """Keeps torch from warning, at each call of a compiled module, that there is a global hook: that is ours."""

    id = 0
    extra_dict_ref = ()  # as of a handle of torch

    def __init__(self) -> None:
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        self._filter = warnings.filters[0]

    def hooks_dict_ref(self) -> dict[int, object]:
        return {self.id: self}

    def remove(self) -> None:
        with contextlib.suppress(ValueError):  # the user has set the filters anew
            cast("list[Any]", warnings.filters).remove(self._filter)


class TorchBackend(NativeBackend):
    """PyTorch, seen through what tenterhook needs (see :class:`tenterhook.backends.Backend`)."""

    name = "torch"
    tensor_types: tuple[type, ...] = (torch.Tensor,)
    tells_backward_end = True
    reenters = True
    knows_what_gets_gradients = True
    works_in_place_on_aliases = True

    def is_model(self, value: object) -> bool:
        return isinstance(value, (nn.Module, torch.jit.ScriptFunction)) or models.is_exported(value)

    def check(self, model: Any) -> None:
        if isinstance(model, torch.jit.ScriptFunction):
            raise UnsupportedError(
                "a script function runs no Python hooks\n  hook the module that it was made from, before torch.jit.script"
            )
        if models.is_exported(model):
            raise UnsupportedError(
                "an exported program is no module and runs no hooks\n"
                "  hook what exported.module() gives (its graph calls few modules), or the model before torch.export"
            )
        models.check(model)

    def entries(self, model: nn.Module) -> list[Entry]:
        return models.list_modules(model)

    def parameters(self, model: nn.Module) -> list[ParameterEntry]:
        return models.list_parameters(model)

    def blind_spots(self, model: nn.Module) -> dict[str, str]:
        return models.blind_spots(model)

    def fused(self, model: nn.Module) -> Collection[str]:
        return models.fused(model)

    def is_compiled(self, module: nn.Module) -> bool:
        return is_under_compiled(module)

    def forward_function(self, module: nn.Module) -> Callable[..., Any]:
        return module.forward

    def is_training(self, module: nn.Module) -> bool:
        return module.training

    # --- calls -----------------------------------------------------------------------------------------------------
    def attach(
        self,
        module: nn.Module,
        before: Before | None,
        after: After | None,
        failed: Failed | None = None,
        *,
        layer: Layer = Layer.OBSERVE,
    ) -> Detachable:
        give_way(module)
        return self._put_hooks(module, before, after, failed, layer=layer, native=None)

    def attach_native(
        self, module: nn.Module, before: Before, after: After, failed: Failed, *, native: tuple[Any, Any]
    ) -> Detachable:
        give_way(module)
        put_hooks = partial(
            self._put_hooks, before=before, after=after, failed=failed, layer=Layer.OBSERVE, native=native
        )
        return attach_around(module, native, (_BeforeHook(before, Layer.OBSERVE), after, failed), put_hooks)

    @staticmethod
    def _put_hooks(
        module: nn.Module,
        before: Before | None,
        after: After | None,
        failed: Failed | None,
        *,
        layer: Layer,
        native: tuple[Any, Any] | None,
    ) -> Attachment:
        handles: list[Any] = []
        try:
            if before is not None:
                hook: Any = _BeforeHook(before, layer)
                if native is not None:
                    hook = NATIVE.Before(*native, hook, layer)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=layer == Layer.FIRST))
                put_in_layer(module._forward_pre_hooks, handles[-1].id, layer)
            if after is not None or failed is not None:
                hook = _AfterHook(after, failed, layer)
                if native is not None:
                    hook = NATIVE.After(*native, hook, layer)
                handles.append(
                    module.register_forward_hook(
                        hook,
                        with_kwargs=True,
                        always_call=failed is not None,
                        prepend=layer == Layer.FIRST,
                    )
                )
                put_in_layer(module._forward_hooks, handles[-1].id, layer)
        except BaseException:
            for handle in handles:
                handle.remove()
            raise
        return Attachment(handles)

    def native_parts(self) -> FrameworkParts | None:
        return native_parts(tuple(_PLAIN))

    def running_modules(self) -> list[Any]:
        return models.running_modules()

    def on_any_call(
        self, wanted: Callable[[Any], bool], fn: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
    ) -> Detachable:
        return Attachment([_module_registries.register_module_forward_pre_hook(_AnyCall(wanted, fn)), _Unwarned()])

    def on_optimizer_step(self, fn: Callable[[Any], None], *, before: bool = False) -> Detachable:
        def around_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            fn(optimizer)

        register = register_optimizer_step_pre_hook if before else register_optimizer_step_post_hook
        return Attachment([register(around_step)])

    def on_load(self, module: nn.Module, fn: Callable[[Any, Any], None]) -> Detachable:
        return Attachment([module.register_load_state_dict_post_hook(_LoadHook(fn))])

    def installed_hooks(self, model: nn.Module) -> list[InstalledHook]:
        return list_hooks(model)

    def trace_ops(self, listener: OpListener) -> OpMode:
        return OpMode(listener)

    def owns_forward(self, module: nn.Module) -> bool:
        return is_builtin_forward(module)

    def bare_traceback(self, traceback: TracebackType | None) -> TracebackType | None:
        return bare_traceback(traceback)

    def has_optimizer(self, model: nn.Module) -> bool:
        return models.has_optimizer(model)

    @contextlib.contextmanager
    def seeing_everything(self, model: nn.Module | None) -> Iterator[Sequence[str]]:
        with closed_fast_paths(model) as told:
            del model  # a suspended frame would keep it alive
            yield told
        remove_late()

    # --- gradients -------------------------------------------------------------------------------------------------
    def tap(
        self, tensor: torch.Tensor, fn: Callable[[Any], Any], module: Any = None, owner: object = None
    ) -> Tap | str:
        return tap_tensor(tensor, fn, module, owner)

    def tap_parameter(
        self, parameter: torch.Tensor, fn: Callable[[Any], Any], *, accumulated: bool = False, edits: bool = False
    ) -> Detachable | str:
        if not parameter.requires_grad:
            return "requires_grad=False"
        if accumulated:
            return PostAccumulateTap(parameter, fn)
        if shards.is_dtensor(parameter):
            return ShardTap(parameter, fn, edits=edits)
        return tap_parameter(parameter, fn, edits=edits)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.view_as(tensor)
        if type(alias) is torch.Tensor:
            # What is pinned to the one is on the other, whoever does it and whenever.
            setattr(alias, "__dict__", vars(tensor))  # noqa: B010 - a type checker holds it for read-only
        else:  # a class of its own may keep there what makes up the tensor
            vars(alias).update({name: value for name, value in vars(tensor).items() if name not in vars(alias)})
        return alias

    def hand_back(self, tensor: torch.Tensor, alias: torch.Tensor, version: int | None) -> str | None:
        return hand_back(tensor, alias, version)

    def version(self, tensor: torch.Tensor) -> int | None:
        return None if tensor.is_inference() else tensor._version

    def origin(self, tensor: torch.Tensor) -> object:
        return tensor.grad_fn

    def address(self, tensor: torch.Tensor) -> int | None:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
            return None
        try:
            return tensor.data_ptr() or None
        except RuntimeError:  # no storage of its own: functorch wrapper
            return None

    def is_leaf(self, tensor: torch.Tensor) -> bool:
        return differentiated(
            tensor
        ).is_leaf  # of a batched tensor under vmap, which is none itself and dies with the call

    def wants_gradient(self, tensor: torch.Tensor) -> bool:
        return torch.is_grad_enabled() and differentiated(tensor).requires_grad

    tracks_gradients = staticmethod(torch.is_grad_enabled)
    regions = staticmethod(checkpoint.regions)
    untraced = staticmethod(untraced)

    def is_recomputing(self) -> bool:
        return _current_graph_task() != -1 and checkpoint.is_recomputing()

    def was_changed_by(self, key: object) -> bool:
        return _current_graph_task() == -1 or checkpoint.was_changed_by(key)

    def is_early_stop(self, error: BaseException) -> bool:
        return checkpoint.is_early_stop(error)

    def in_backward(self) -> bool:
        return _current_graph_task() != -1

    backward_token = staticmethod(_current_graph_task)

    def at_backward_end(self, fn: Callable[[], None]) -> bool:
        if _current_graph_task() == -1:
            return False
        torch.autograd.Variable._execution_engine.queue_callback(fn)
        return True

    # --- changing --------------------------------------------------------------------------------------------------
    def constant(self, value: Any, like: torch.Tensor, *, boolean: bool = False) -> torch.Tensor:
        return constant(value, like, boolean)

    def where(self, mask: torch.Tensor, new: Any, old: torch.Tensor) -> torch.Tensor:
        return where(mask, new, old)

    def bypass(self, module: nn.Module, instead: Instead) -> Bypass:
        give_way(module)
        return Bypass.on(module, instead)

    def gradients(self, fn: Callable[[Sequence[Any]], Any], at: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return gradients(fn, at)

    def clip_together(self, parameters: Sequence[Any], max_norm: float) -> None:
        clip_together(parameters, max_norm)

    # --- values ----------------------------------------------------------------------------------------------------
    def summary(self, tensor: torch.Tensor) -> Summary:
        dtype = tensor.dtype
        try:
            shape = tuple(tensor.shape) if type(tensor) in _PLAIN else _known_shape(tensor)
        except RuntimeError:  # of a nested tensor in the strided layout
            shape = (tensor.size(0), *(-1 for _ in range(tensor.dim() - 1)))
        return shape, _DTYPE_NAMES.get(dtype) or str(dtype), "cpu" if tensor.is_cpu else str(tensor.device)

    def measure(self, tensor: torch.Tensor, rows: RowBuffer, row: int) -> str | None:
        if type(tensor) in _PLAIN:
            try:
                if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_nested):
                    code = _CODES.get(dtype := tensor.dtype)
                    if code is not None and not (dtype.is_complex and tensor.is_conj()):
                        numel = tensor.numel()
                        if numel >= THREADED_NUMEL:
                            set_threads(torch.get_num_threads())
                        if tensor.untyped_storage().nbytes() or not numel:  # else it has been let go, as FSDP does
                            rows.measure_flat(row, tensor.data_ptr(), code, numel)
                            return None
            except RuntimeError:
                pass  # no storage of its own: functorch wrapper, sparse or nested layout; told apart below
        return self._measure_unusual(tensor, rows, row)

    def _measure_unusual(self, tensor: torch.Tensor, rows: RowBuffer, row: int) -> str | None:
        note = None
        while _functorch.is_functorch_wrapped_tensor(tensor):
            if _is_batched(tensor):
                note = "statistics over the whole vmap batch"
            tensor = _functorch.get_unwrapped(tensor)
        offset: int | None = 0
        if shards.is_dtensor(tensor):
            offset, note = shards.sketch_offset(tensor), shards.shard_note(tensor)
            tensor = shards.local_part(tensor)
        reason = _why_no_values(tensor)
        if reason is not None:
            return reason
        name = _DTYPE_NAMES.get(tensor.dtype, "")
        if name not in DTYPE_CODES:
            return f"no statistics for dtype {name or tensor.dtype}"
        with devices.unseen():
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
        return None if type(tensor) in _PLAIN else shards.shard_offset(_unwrapped(tensor))

    def keep(self, tensor: torch.Tensor, dtype: str | None = None) -> Any:
        tensor = _unwrapped(tensor)
        if shards.is_dtensor(tensor):
            tensor = shards.local_part(tensor)
        with self.untracked(), _outside_transforms():
            plain = tensor.detach()
            if dtype is not None and plain.is_floating_point() and not plain.is_quantized and not plain.is_meta:
                return plain.to("cpu", getattr(torch, dtype), copy=True)
            return plain.clone() if plain.is_cpu or plain.is_meta else plain.to("cpu", copy=True)

    def reference(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if type(tensor) not in _PLAIN or tensor.is_inference() or _functorch.is_functorch_wrapped_tensor(tensor):
            return None
        return tensor.detach()  # shares the count of changes, too

    def to_numpy(self, kept: torch.Tensor) -> Any:
        if kept.layout is not torch.strided or kept.is_quantized:
            kept = kept.dequantize() if kept.is_quantized else kept.to_dense()
        name = _DTYPE_NAMES.get(kept.dtype, "")
        kept = kept.detach().resolve_conj().resolve_neg()
        try:
            return kept.numpy()
        except TypeError:  # dtypes that NumPy lacks travel as their bytes
            return (
                kept.contiguous()
                .view(torch.uint8 if kept.itemsize == 1 else torch.int16)
                .numpy()
                .view(getattr(ml_dtypes, name))
            )

    def difference(self, kept: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if shards.is_dtensor(kept):
            return shards.shard_like(kept, self.keep(kept) - other)
        return kept.detach().to(other.device) - other

    def unscaled(self, gradient: torch.Tensor, scale: float) -> torch.Tensor:
        with torch.no_grad():
            whole = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
            return whole / scale

    def numel(self, tensor: torch.Tensor) -> int:
        return 0 if is_lazy(tensor) else tensor.numel()

    @contextlib.contextmanager
    def untracked(self) -> Iterator[None]:
        # within torch.func.grad or vmap even detach() would give one of their wrappers again, without storage
        with torch._C._DisableFuncTorch(), torch.no_grad():
            yield

    def environment(self) -> dict[str, Any]:
        process = shards.process()
        return {
            **({} if process is None else {"rank": process[0], "world": process[1]}),
            "framework": "torch",
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"],
            "seeds": {"torch": torch.initial_seed()},
            "modes": {
                "default_dtype": _DTYPE_NAMES[torch.get_default_dtype()],
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "threads": torch.get_num_threads(),
                "autocast": torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
            },
        }


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


def _known_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Give -1 for sizes that are no numbers: ragged ones, and symbols of a tracer."""
    return tuple(size if isinstance(size, int) else -1 for size in tensor.shape)


def _why_no_values(tensor: torch.Tensor) -> str | None:
    if tensor.is_meta:
        return "meta tensor: no values"
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return "fake tensor: no values"
    if tensor.is_nested:
        return "nested tensor: no statistics"
    if tensor.layout is not torch.strided:
        return f"sparse tensor ({str(tensor.layout).removeprefix('torch.')}): no statistics"
    if tensor.is_quantized:
        return "quantised tensor: no statistics"
    try:
        size = tensor.untyped_storage().nbytes() and tensor.data_ptr()
    except RuntimeError as error:  # NotImplementedError is one
        return f"{type(tensor).__name__}: no statistics ({str(error).splitlines()[0]})"
    if size == 0 and tensor.numel() > 0:
        return f"{type(tensor).__name__}: no storage of its own"
    return None


BACKEND = TorchBackend()
