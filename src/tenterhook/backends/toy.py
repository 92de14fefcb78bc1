"""A framework of a few hundred lines over NumPy, so that tests and docs need no other.

Its tensors record how they came about, as PyTorch's do, and its modules have the two hook tables that a backend needs. It
is no model of speed. The contract tests hold it to the same behaviour as the real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

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
    OpTrace,
    ParameterEntry,
    Region,
    Summary,
)
from tenterhook.backends import _places as places
from tenterhook.backends import _toy_checkpoint as checkpoint
from tenterhook.backends._toy_checkpoint import Checkpointed
from tenterhook.backends._toy_modules import (
    SGD,
    Linear,
    Module,
    ReLU,
    Sequential,
    ToyHook,
    after_step,
    any_call,
    before_step,
    list_parameters,
    optimizers,
    running_modules,
    walk,
)
from tenterhook.backends._toy_tensors import (
    OpTeller,
    Parameter,
    Tap,
    Tensor,
    at_backward_end,
    backward_token,
    make,
    no_grad,
    tracks,
)
from tenterhook.recording.shards import dtype_named
from tenterhook.selection import Entry
from tenterhook.stats import RowBuffer

__all__ = [
    "BACKEND",
    "SGD",
    "Checkpointed",
    "Linear",
    "Module",
    "Parameter",
    "ReLU",
    "Sequential",
    "Tensor",
    "ToyBackend",
    "no_grad",
]


class _ListEntry:
    def __init__(self, entries: list[Any], entry: Any) -> None:
        self._entries, self._entry = entries, entry
        entries.append(entry)

    @property
    def live(self) -> bool:
        return self._entry in self._entries

    def remove(self) -> None:
        if self.live:
            self._entries.remove(self._entry)


class ToyBackend:
    """The toy framework, seen through what tenterhook needs (see :class:`tenterhook.backends.Backend`)."""

    name = "toy"
    tensor_types: tuple[type, ...] = (Tensor,)
    tells_backward_end = True
    reenters = False
    knows_what_gets_gradients = True
    works_in_place_on_aliases = True

    def is_model(self, value: object) -> bool:
        return isinstance(value, Module)

    def check(self, model: Any) -> None:
        pass

    def entries(self, model: Module) -> list[Entry]:
        return places.list_modules(walk(model))

    def parameters(self, model: Module) -> list[ParameterEntry]:
        return list_parameters(model)

    def blind_spots(self, model: Any) -> dict[str, str]:
        return {}

    def fused(self, model: Any) -> Collection[str]:
        return ()

    def is_compiled(self, module: Module) -> bool:
        return False

    def forward_function(self, module: Module) -> Callable[..., Any]:
        return module.forward

    def is_training(self, module: Module) -> bool:
        return module.training

    def attach(
        self,
        module: Module,
        before: Before | None,
        after: After | None,
        failed: Failed | None = None,
        *,
        layer: Layer = Layer.OBSERVE,
    ) -> Detachable:
        return ToyHook(module, before, after, failed, layer=layer).put_on()

    def running_modules(self) -> list[Any]:
        return running_modules()

    def on_any_call(
        self, wanted: Callable[[Any], bool], fn: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
    ) -> Detachable:
        return _ListEntry(any_call, lambda module, args, kwargs: fn(module, args, kwargs) if wanted(module) else None)

    def on_optimizer_step(self, fn: Callable[[Any], None], *, before: bool = False) -> Detachable:
        return _ListEntry(before_step if before else after_step, fn)

    def on_load(self, module: Module, fn: Callable[[Any, Any], None]) -> Detachable:
        return _ListEntry(module.load_hooks, fn)

    def installed_hooks(self, model: Module) -> list[InstalledHook]:
        return [
            InstalledHook(entry.path, "call", type(hook).__name__, None, "tenterhook", True, hook=hook)
            for entry in self.entries(model)
            for hook in vars(entry.module)["hooks"]
        ]

    def trace_ops(self, listener: OpListener) -> OpTrace:
        return OpTeller(listener)

    def owns_forward(self, module: Module) -> bool:
        return type(module).__module__ == Module.__module__

    def bare_traceback(self, traceback: TracebackType | None) -> TracebackType | None:
        return traceback

    def has_optimizer(self, model: Module) -> bool:
        own = {id(parameter) for parameter in model.parameters()}
        return any(id(parameter) in own for optimizer in optimizers for parameter in optimizer.parameters)

    @contextlib.contextmanager
    def seeing_everything(self, model: Any) -> Iterator[Sequence[str]]:
        del model  # a suspended frame would keep it alive
        yield []

    def tap(self, tensor: Tensor, fn: Callable[[Any], Any], module: Any = None, owner: object = None) -> Tap | str:
        if not tensor.requires_grad:
            return "requires_grad=False" if tracks() else "grad mode off"
        tap = Tap(tensor, fn, None if module is None else id(module), owner)
        place = len(tensor.taps)
        if tap.module is not None:
            while place and tensor.taps[place - 1].module == tap.module and tensor.taps[place - 1].owner is not owner:
                place -= 1
        else:
            while place and tensor.taps[place - 1].edits:
                place -= 1
        tensor.taps.insert(place, tap)
        return tap

    def tap_parameter(
        self, parameter: Tensor, fn: Callable[[Any], Any], *, accumulated: bool = False, edits: bool = False
    ) -> Detachable | str:
        if not accumulated:
            tap = self.tap(parameter, fn)
            if edits and not isinstance(tap, str):
                tap.edits = True
            return tap

        def sum_so_far(gradient: Tensor) -> None:
            fn(gradient if parameter.grad is None else Tensor(parameter.grad + gradient.data))

        return self.tap(parameter, sum_so_far)

    def alias(self, tensor: Tensor) -> Tensor:
        return make(tensor.data, (tensor, lambda g: g))

    def hand_back(self, tensor: Tensor, alias: Tensor, version: int | None) -> str | None:
        return None  # an alias is changed in its values only, and shares those

    def version(self, tensor: Tensor) -> int | None:
        return tensor.version if isinstance(tensor, Tensor) else 0  # gradients are plain arrays

    def origin(self, tensor: Tensor) -> object:
        return id(tensor.sources) if tensor.sources else None

    def address(self, tensor: Tensor) -> int | None:
        return tensor.data.__array_interface__["data"][0] or None

    def is_leaf(self, tensor: Tensor) -> bool:
        return not tensor.sources

    def wants_gradient(self, tensor: Tensor) -> bool:
        return tensor.requires_grad

    def tracks_gradients(self) -> bool:
        return tracks()

    def work_done(self) -> None:
        return None

    def unseen(self, fn: FunctionT) -> FunctionT:
        return fn

    def untraced(self) -> None:
        return None

    def regions(self) -> Sequence[Region]:
        return checkpoint.regions()

    def is_recomputing(self) -> bool:
        return checkpoint.is_recomputing()

    def was_changed_by(self, key: object) -> bool:
        return checkpoint.was_changed_by(key)

    def is_early_stop(self, error: BaseException) -> bool:
        return False

    def in_backward(self) -> bool:
        return self.backward_token() != -1

    def backward_token(self) -> int:
        return backward_token()

    def at_backward_end(self, fn: Callable[[], None]) -> bool:
        return at_backward_end(fn)

    def constant(self, value: Any, like: Tensor, *, boolean: bool = False) -> Tensor:
        array = value.data if isinstance(value, Tensor) else np.asarray(value)
        return Tensor(array.astype(bool if boolean else like.data.dtype))

    def where(self, mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
        return make(np.where(mask.data, new.data, old.data), (old, lambda g: np.where(mask.data, 0, g)))

    def bypass(self, module: Module, instead: Instead) -> ToyHook:
        return ToyHook(module, instead=instead, layer=Layer.EDIT).put_on()

    def gradients(self, fn: Callable[[Sequence[Any]], Any], at: Sequence[Tensor]) -> list[Any]:
        leaves = [Tensor(tensor.data, requires_grad=True) for tensor in at]
        fn(leaves).backward()
        return [Tensor(np.zeros_like(leaf.data) if leaf.grad is None else leaf.grad) for leaf in leaves]

    def clip_together(self, parameters: Sequence[Any], max_norm: float) -> None:
        held = [parameter for parameter in parameters if parameter.grad is not None]
        norm = float(np.sqrt(sum(np.sum(np.square(parameter.grad)) for parameter in held)))
        for parameter in held:
            parameter.grad = parameter.grad * min(1.0, max_norm / (norm + 1e-6))

    def summary(self, tensor: Tensor) -> Summary:
        return tensor.data.shape, str(tensor.data.dtype), "cpu"

    def measure(self, tensor: Tensor, rows: RowBuffer, row: int) -> str | None:
        return None if rows.measure_array(row, tensor.data) else f"no statistics for dtype {tensor.data.dtype}"

    def shard_offset(self, tensor: Tensor) -> None:
        return None

    def keep(self, tensor: Tensor, dtype: str | None = None) -> Tensor:
        real = np.issubdtype(tensor.data.dtype, np.floating)
        return Tensor(tensor.data.astype(dtype_named(dtype)) if dtype and real else tensor.data.copy())

    def reference(self, tensor: Tensor) -> None:
        return None

    def to_numpy(self, kept: Tensor) -> np.ndarray:
        return kept.data

    def unscaled(self, gradient: Tensor, scale: float) -> Tensor:
        return Tensor(gradient.data / scale)

    def snapshot(self, tensor: Tensor) -> Tensor:
        return self.keep(tensor)

    def difference(self, kept: Tensor, other: Tensor) -> Tensor:
        return Tensor(kept.data - other.data)

    def numel(self, tensor: Tensor) -> int:
        return int(tensor.data.size)

    def untracked(self) -> contextlib.AbstractContextManager[Any]:
        return no_grad()

    def environment(self) -> dict[str, Any]:
        return {"framework": "toy", "devices": ["cpu"], "seeds": {}, "modes": {}}


BACKEND = ToyBackend()
