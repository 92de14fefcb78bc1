"""The MindSpore backend, for PyNative mode.

Calls are seen at ``Cell.__call__`` and gradients by tensor hooks; the cells' own hooks are not used (see
:mod:`tenterhook.backends._mindspore_seams` for what is changed while somebody watches). Private MindSpore names are used
where no public one exists; ``tests/mindspore`` fails where a release renames them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any

import mindspore
import ml_dtypes
import numpy as np
from mindspore import context, nn
from mindspore.graph.api import _no_grad

from tenterhook.backends import (
    After,
    Before,
    Detachable,
    Failed,
    FunctionT,
    InstalledHook,
    Instead,
    Layer,
    OpListener,
    ParameterEntry,
    Summary,
)
from tenterhook.backends import _mindspore_checkpoint as checkpoint
from tenterhook.backends import _mindspore_device as devices
from tenterhook.backends import _mindspore_models as models
from tenterhook.backends._installed import function_name, users_function
from tenterhook.backends._mindspore_in_place import tell_of_cells, tell_of_code
from tenterhook.backends._mindspore_installed import list_hooks
from tenterhook.backends._mindspore_load import register_load_post_hook
from tenterhook.backends._mindspore_numpy import warn_about_numpy
from tenterhook.backends._mindspore_offers import clip_together
from tenterhook.backends._mindspore_ops import MISSES, OpMode, is_builtin_construct
from tenterhook.backends._mindspore_passes import in_pass, running_pass
from tenterhook.backends._mindspore_seams import executor, is_differentiating, is_nested, running_cells
from tenterhook.backends._mindspore_taps import Tap, tap_parameter, tap_tensor, version_of, why_no_gradient
from tenterhook.backends._mindspore_unseen import may_compute, unseen
from tenterhook.backends._mindspore_watching import STATE, CallHook, Hold, Listener, put_on, tell_once
from tenterhook.selection import Entry
from tenterhook.stats import DTYPE_CODES, RowBuffer
from tenterhook.stats.layout import MEMORY

__all__ = ["BACKEND", "MindSporeBackend"]


class MindSporeBackend:
    """MindSpore, seen through what tenterhook needs (see :class:`tenterhook.backends.Backend`)."""

    name = "mindspore"
    tensor_types: tuple[type, ...] = (mindspore.Tensor,)
    tells_backward_end = True
    reenters = False
    knows_what_gets_gradients = False
    works_in_place_on_aliases = False

    def __init__(self) -> None:
        self._eager_sessions = 0

    def is_model(self, value: object) -> bool:
        return isinstance(value, nn.Cell)

    def check(self, model: Any) -> None:
        warn_about_numpy(stacklevel=3)
        models.check(model)

    def entries(self, model: nn.Cell) -> list[Entry]:
        return models.list_cells(model)

    def parameters(self, model: nn.Cell) -> list[ParameterEntry]:
        return models.list_parameters(model)

    def blind_spots(self, model: nn.Cell) -> dict[str, str]:
        return models.blind_spots(model, compiled_runs_eager=self._eager_sessions > 0)

    def fused(self, model: nn.Cell) -> Collection[str]:
        return ()  # our hooks change nothing of what runs

    def is_compiled(self, module: nn.Cell) -> bool:
        return False  # a compiled cell is refused

    def forward_function(self, module: nn.Cell) -> Callable[..., Any]:
        return module.construct

    def is_training(self, module: nn.Cell) -> bool:
        return module.training

    # --- calls -----------------------------------------------------------------------------------------------------
    def attach(
        self,
        module: nn.Cell,
        before: Before | None,
        after: After | None,
        failed: Failed | None = None,
        *,
        layer: Layer = Layer.OBSERVE,
    ) -> Detachable:
        for callback in (before, after):
            if callback is not None and (function := users_function(callback)) is not None:
                tell_of_code(function, f"the hook {function_name(function)}")
        return put_on(CallHook(module, before, after, failed, layer=layer))

    def running_modules(self) -> list[Any]:
        return running_cells()

    def on_any_call(
        self, wanted: Callable[[Any], bool], fn: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
    ) -> Detachable:
        def on_call(cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if wanted(cell):
                fn(cell, args, kwargs)

        return Listener("calls", on_call)

    def on_optimizer_step(self, fn: Callable[[Any], None], *, before: bool = False) -> Detachable:
        return Listener("steps to come" if before else "steps", fn)

    def on_load(self, module: nn.Cell, fn: Callable[[Any, Any], None]) -> Detachable:
        return register_load_post_hook(module, fn, after_guess=True)

    def installed_hooks(self, model: nn.Cell) -> list[InstalledHook]:
        return list_hooks(model, self.blind_spots(model))

    def trace_ops(self, listener: OpListener) -> OpMode:
        tell_once(MISSES)
        return OpMode(listener)

    def owns_forward(self, module: nn.Cell) -> bool:
        return is_builtin_construct(module)

    def bare_traceback(self, traceback: TracebackType | None) -> TracebackType | None:
        return traceback

    def has_optimizer(self, model: nn.Cell) -> bool:
        return models.has_optimizer(model)

    @contextlib.contextmanager
    def seeing_everything(self, model: nn.Cell | None) -> Iterator[Sequence[str]]:
        """Run what ``ms.jit`` has compiled eager for as long as the session lasts."""
        told: list[str] = []  # gets a sentence for each compiled function as it is met
        STATE.told.append(told)
        eager = model is not None
        hold = Hold(eager=eager)
        if model is not None:
            tell_of_cells(cell for _, _, cell, _ in models.walk(model))
        del model  # a suspended frame would keep it alive
        self._eager_sessions += eager
        try:
            yield told
        finally:
            self._eager_sessions -= eager
            STATE.told = [one for one in STATE.told if one is not told]
            hold.release()

    # --- gradients -------------------------------------------------------------------------------------------------
    def tap(
        self, tensor: mindspore.Tensor, fn: Callable[[Any], Any], module: Any = None, owner: object = None
    ) -> Tap | str:
        return tap_tensor(tensor, fn, module, owner)

    def tap_parameter(
        self,
        parameter: mindspore.Parameter,
        fn: Callable[[Any], Any],
        *,
        accumulated: bool = False,
        edits: bool = False,
    ) -> Detachable | str:
        if not parameter.requires_grad:
            return "requires_grad=False"
        if accumulated:
            return "MindSpore keeps no running sum of gradients: they are what value_and_grad returns"
        return tap_parameter(parameter, fn, edits=edits)

    def alias(self, tensor: mindspore.Tensor) -> mindspore.Tensor:
        # of a gradient of a gradient MindSpore makes something else where there is a view in it
        return tensor.expand_as(tensor) if is_nested() else tensor.view(tensor.shape)

    def hand_back(self, tensor: mindspore.Tensor, alias: mindspore.Tensor, version: int | None) -> str | None:
        return None  # an alias is changed in its values only, and shares those

    def version(self, tensor: mindspore.Tensor) -> int | None:
        return version_of(tensor)

    def origin(self, tensor: mindspore.Tensor) -> object:
        node = tensor._grad_node
        return None if node is None or tensor._is_leaf else (node._unique_id(), node._sequence_nr())

    def address(self, tensor: mindspore.Tensor) -> int | None:
        return None if _is_uninitialised(tensor) else tensor.data_ptr() or None

    def is_leaf(self, tensor: mindspore.Tensor) -> bool:
        return tensor._is_leaf

    def wants_gradient(self, tensor: mindspore.Tensor) -> bool:
        # what is made of it where gradients are off (the first run of what is checkpointed) has none, whatever it says
        return executor.enable_grad() and executor.grad_flag() and why_no_gradient(tensor) is None

    def tracks_gradients(self) -> bool:
        # a cell that is differentiated itself sets MindSpore's own flag only once it has been called
        return executor.enable_grad() and (executor.grad_flag() or is_differentiating())

    def work_done(self) -> None:
        return None

    def unseen(self, fn: FunctionT) -> FunctionT:
        return fn

    def untraced(self) -> None:
        return None

    def regions(self) -> Sequence[checkpoint.Region]:
        return checkpoint.regions()

    def is_recomputing(self) -> bool:
        return in_pass() and checkpoint.is_recomputing()

    def was_changed_by(self, key: object) -> bool:
        return not in_pass() or checkpoint.was_changed_by(key)

    def is_early_stop(self, error: BaseException) -> bool:
        return checkpoint.is_early_stop(error)

    def in_backward(self) -> bool:
        return in_pass()

    def backward_token(self) -> int:
        this = running_pass()
        return -1 if this is None else this.token

    def at_backward_end(self, fn: Callable[[], None]) -> bool:
        this = running_pass()
        if this is None:
            return False
        this.at_end.append(fn)
        return True

    # --- changing --------------------------------------------------------------------------------------------------
    def constant(self, value: Any, like: mindspore.Tensor, *, boolean: bool = False) -> mindspore.Tensor:
        dtype = mindspore.bool_ if boolean else like.dtype
        if isinstance(value, mindspore.Tensor):
            return value.astype(dtype)
        array = np.asarray(value)
        if array.dtype == ml_dtypes.bfloat16:
            array = array.astype(np.float32)
        return mindspore.Tensor(array.copy()).astype(dtype)

    def where(self, mask: mindspore.Tensor, new: Any, old: mindspore.Tensor) -> mindspore.Tensor:
        return mindspore.ops.where(mask, new, old)

    def bypass(self, module: nn.Cell, instead: Instead) -> CallHook:
        return put_on(CallHook(module, layer=Layer.EDIT, instead=instead))

    def gradients(self, fn: Callable[[Sequence[Any]], Any], at: Sequence[mindspore.Tensor]) -> list[mindspore.Tensor]:
        found = mindspore.grad(lambda *tensors: fn(tensors), tuple(range(len(at))))(*at)
        return list(found) if isinstance(found, (tuple, list)) else [found]

    def clip_together(self, parameters: Sequence[Any], max_norm: float) -> None:
        clip_together(parameters, max_norm)

    # --- values ----------------------------------------------------------------------------------------------------
    def summary(self, tensor: mindspore.Tensor) -> Summary:
        return tuple(tensor.shape), _dtype_name(tensor), devices.device_of(tensor)

    def measure(self, tensor: mindspore.Tensor, rows: RowBuffer, row: int) -> str | None:
        if _is_uninitialised(tensor):
            return "parameter not initialised yet"
        name = _dtype_name(tensor)
        device = devices.device_of(tensor)
        if name in DTYPE_CODES and self.defers(device):
            with unseen():
                if devices.defer(tensor, rows, row, name=name, device=device):
                    return None
        array = tensor.asnumpy()
        if array.dtype.name not in DTYPE_CODES and name in DTYPE_CODES:  # float8 comes as bytes of no dtype
            array = array.view(MEMORY[DTYPE_CODES[name]])
        if array.dtype.name not in DTYPE_CODES:
            return f"no statistics for dtype {name}"
        rows.measure_array(row, array)
        return None

    def defers(self, device: str) -> bool:
        """Whether tensors of a device are measured where they lie, and rows filled in later: all but those of the host."""
        return not device.startswith("cpu")

    def _computes(self, tensor: mindspore.Tensor) -> bool:
        return self.defers(devices.device_of(tensor)) and may_compute()

    def shard_offset(self, tensor: mindspore.Tensor) -> None:
        return None

    def keep(self, tensor: mindspore.Tensor, dtype: str | None = None) -> mindspore.Tensor:
        # asnumpy() shares the tensor's memory, and so does a tensor made of an array
        kept = mindspore.Tensor(tensor.asnumpy().copy())
        return kept.astype(getattr(mindspore, dtype)) if dtype and kept.is_floating_point() else kept

    def reference(self, tensor: mindspore.Tensor) -> None:
        return None

    def to_numpy(self, kept: mindspore.Tensor) -> Any:
        array = kept.asnumpy()
        # MindSpore's bfloat16 is a NumPy dtype of its own
        return array.view(np.dtype(ml_dtypes.bfloat16)) if kept.dtype == mindspore.bfloat16 else array

    def snapshot(self, tensor: mindspore.Tensor) -> mindspore.Tensor:
        if _is_uninitialised(tensor) or not self._computes(tensor):
            return self.keep(tensor)
        with unseen():
            try:
                return devices.copy_where_it_lies(tensor)
            except RuntimeError:  # no memory left there, or no kernel that copies
                return self.keep(tensor)

    def difference(self, kept: mindspore.Tensor, other: mindspore.Tensor) -> mindspore.Tensor:
        if self._computes(kept):
            with unseen():
                return kept - other
        return mindspore.Tensor(self.to_numpy(kept) - self.to_numpy(other))

    def unscaled(self, gradient: mindspore.Tensor, scale: float) -> mindspore.Tensor:
        if self._computes(gradient):
            with unseen():
                whole = gradient.astype(mindspore.float32) if gradient.itemsize < 4 else gradient
                return whole / mindspore.Tensor(scale, whole.dtype)
        array = self.to_numpy(gradient)
        return mindspore.Tensor(
            (array.astype(np.float32) if array.dtype.itemsize < 4 else array) / array.dtype.type(scale)
        )

    def numel(self, tensor: mindspore.Tensor) -> int:
        return int(np.prod(tensor.shape))

    def untracked(self) -> contextlib.AbstractContextManager[Any]:
        return _no_grad()

    def environment(self) -> dict[str, Any]:
        return {
            "framework": "mindspore",
            "devices": [str(context.get_context("device_target")).lower()],
            "seeds": {"mindspore": mindspore.get_seed()} if mindspore.get_seed() is not None else {},
            "modes": {"mode": "graph" if context.get_context("mode") == context.GRAPH_MODE else "pynative"},
        }


def _dtype_name(tensor: mindspore.Tensor) -> str:
    name = str(tensor.dtype).lower()
    return name.replace("float8", "float8_") if name.startswith("float8") else name  # Float8E4M3FN


def _is_uninitialised(tensor: mindspore.Tensor) -> bool:
    return isinstance(tensor, mindspore.Parameter) and bool(tensor.has_init)


BACKEND = MindSporeBackend()
