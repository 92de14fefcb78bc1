"""A framework of two hundred lines over NumPy, so that tests and docs need no other.

Its tensors record how they came about, as PyTorch's do, and its modules have the two hook tables that a backend needs. It
is no model of speed. The contract tests hold it to the same behaviour as the real ones.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from tenterhook.backends import (
    After,
    Before,
    Detachable,
    Failed,
    InstalledHook,
    Instead,
    Layer,
    OpListener,
    OpTrace,
    ParameterEntry,
    Region,
    Summary,
)
from tenterhook.backends._toy_tensors import (
    Parameter,
    Tap,
    Tensor,
    at_backward_end,
    backward_token,
    make,
    no_grad,
    tracks,
)
from tenterhook.errors import UnsupportedError
from tenterhook.recording.shards import dtype_named
from tenterhook.selection import Entry
from tenterhook.stats import RowBuffer

__all__ = ["BACKEND", "SGD", "Linear", "Module", "Parameter", "ReLU", "Sequential", "Tensor", "ToyBackend", "no_grad"]


class Module:
    """A module: attributes that are modules or parameters are its own."""

    def __init__(self) -> None:
        self.training = True
        self.hooks: list[_ToyHook] = []
        self.instead: list[Instead] = []
        self.load_hooks: list[Callable[[Module, IncompatibleKeys], None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call
        for instead in self.instead:
            call = partial(_bypassed, instead, call)
        running = _running.setdefault(threading.get_ident(), [])
        running.append(self)
        try:
            return call(*args, **kwargs)
        finally:
            running.pop()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        for hook in _any_call[:]:
            hook(self, args, kwargs)
        for hook in self.hooks[:]:
            changed = hook.before(self, args, kwargs) if hook.before is not None else None
            if changed is not None:
                args, kwargs = changed
        try:
            output = self.forward(*args, **kwargs)
        except Exception as error:
            for hook in self.hooks[:]:
                if hook.failed is not None:
                    hook.failed(self, args, kwargs, error)
            raise
        for hook in self.hooks[:]:
            changed = hook.after(self, args, kwargs, output) if hook.after is not None else None
            if changed is not None:
                output = changed
        return output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output; to be defined by each module."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield the modules inside, with their names."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def own_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters of this very module, with their names."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield name, value

    def parameters(self) -> list[Parameter]:
        """List all parameters, of the modules inside as well, each once."""
        return [entry.parameter for entry in BACKEND.parameters(self)]

    def load(self, values: Mapping[str, np.ndarray]) -> IncompatibleKeys:
        """Set parameters by their names, and return which names did not fit."""
        own = {entry.name: entry.parameter for entry in BACKEND.parameters(self)}
        keys = IncompatibleKeys(
            [name for name in own if name not in values], [name for name in values if name not in own]
        )
        for name in own.keys() & values.keys():
            own[name].data = np.array(values[name])
        for hook in self.load_hooks[:]:
            hook(self, keys)
        return keys


@dataclass(slots=True)
class IncompatibleKeys:
    """Names that did not fit in a load."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Linear(Module):
    """``x @ weight + bias``; weight float64 (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int, seed: int = 0) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)
        self.weight = Parameter(generator.normal(size=(inputs, outputs)) / np.sqrt(inputs))
        self.bias = Parameter(np.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class ReLU(Module):
    """``max(x, 0)``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class Sequential(Module):
    """Modules one after another, named by their numbers."""

    def __init__(self, *modules: Module) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            setattr(self, str(number), module)

    def forward(self, x: Any) -> Any:
        for _, module in self.children():
            x = module(x)
        return x


class SGD:
    """Gradient descent without anything."""

    def __init__(self, parameters: Sequence[Parameter], lr: float) -> None:
        self.parameters = list(parameters)
        self.lr = lr
        _optimizers.add(self)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Change each parameter by ``-lr * grad``."""
        for fn in _before_step[:]:
            fn(self)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.data = parameter.data - self.lr * parameter.grad
        for fn in _after_step[:]:
            fn(self)


_running: dict[int, list[Module]] = {}  # thread -> modules that are being called, the innermost last
_any_call: list[Callable[[Module, tuple[Any, ...], dict[str, Any]], None]] = []
_before_step: list[Callable[[SGD], None]] = []
_after_step: list[Callable[[SGD], None]] = []
_optimizers: weakref.WeakSet[SGD] = weakref.WeakSet()


def _bypassed(instead: Instead, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return instead(call, args, kwargs)


class _ToyHook:
    def __init__(self, module: Module, before: Before | None, after: After | None, failed: Failed | None) -> None:
        self.module = weakref.ref(module)
        self.before, self.after, self.failed = before, after, failed
        self.layer = Layer.OBSERVE

    @property
    def live(self) -> bool:
        module = self.module()
        return module is not None and self in module.hooks

    def remove(self) -> None:
        module = self.module()
        if module is not None and self in module.hooks:
            module.hooks.remove(self)

    def __deepcopy__(self, memo: object) -> _ToyHook:
        return _ToyHook(Module(), None, None, None)


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
    knows_what_gets_gradients = True
    works_in_place_on_aliases = True

    def is_model(self, value: object) -> bool:
        return isinstance(value, Module)

    def check(self, model: Any) -> None:
        pass

    def entries(self, model: Module) -> list[Entry]:
        found: dict[int, tuple[str, Module]] = {}
        aliases: dict[int, list[str]] = {}

        def visit(module: Module, path: str) -> None:
            if id(module) in found:
                aliases.setdefault(id(module), []).append(path)
                return
            found[id(module)] = (path, module)
            for name, child in module.children():
                visit(child, f"{path}.{name}" if path else name)

        visit(model, "")
        return [
            Entry(
                path=path,
                module=module,
                aliases=tuple(aliases.get(key, ())),
                type_names=tuple(cls.__name__ for cls in type(module).__mro__ if cls is not object),
            )
            for key, (path, module) in found.items()
        ]

    def parameters(self, model: Module) -> list[ParameterEntry]:
        found: dict[int, ParameterEntry] = {}
        for entry in self.entries(model):
            module: Any = entry.module
            for name, parameter in module.own_parameters():
                full = f"{entry.path}.{name}" if entry.path else name
                found.setdefault(id(parameter), ParameterEntry(full, entry.path, parameter))
        return list(found.values())

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
        hook = _ToyHook(module, before, after, failed)
        place = (
            0
            if layer == Layer.FIRST
            else next((place for place, other in enumerate(module.hooks) if other.layer > layer), len(module.hooks))
        )
        hook.layer = layer
        module.hooks.insert(place, hook)
        return hook

    def running_modules(self) -> list[Any]:
        return _running.get(threading.get_ident(), [])[::-1]

    def on_any_call(
        self, wanted: Callable[[Any], bool], fn: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
    ) -> Detachable:
        return _ListEntry(_any_call, lambda module, args, kwargs: fn(module, args, kwargs) if wanted(module) else None)

    def on_optimizer_step(self, fn: Callable[[Any], None], *, before: bool = False) -> Detachable:
        return _ListEntry(_before_step if before else _after_step, fn)

    def on_load(self, module: Module, fn: Callable[[Any, Any], None]) -> Detachable:
        return _ListEntry(module.load_hooks, fn)

    def installed_hooks(self, model: Module) -> list[InstalledHook]:
        return [
            InstalledHook(entry.path, "call", type(hook).__name__, None, "tenterhook", True, hook=hook)
            for entry in self.entries(model)
            for hook in vars(entry.module)["hooks"]
        ]

    def trace_ops(self, listener: OpListener) -> OpTrace:
        raise UnsupportedError("the toy framework tells nobody of its functional calls\n  record without ops=True")

    def owns_forward(self, module: Module) -> bool:
        return type(module).__module__ == __name__

    def bare_traceback(self, traceback: TracebackType | None) -> TracebackType | None:
        return traceback

    def has_optimizer(self, model: Module) -> bool:
        own = {id(parameter) for parameter in model.parameters()}
        return any(id(parameter) in own for optimizer in _optimizers for parameter in optimizer.parameters)

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

    def version(self, tensor: Tensor) -> int | None:
        return 0  # nothing here works in place

    def origin(self, tensor: Tensor) -> object:
        return None

    def address(self, tensor: Tensor) -> int | None:
        return None

    def is_leaf(self, tensor: Tensor) -> bool:
        return not tensor.sources

    def wants_gradient(self, tensor: Tensor) -> bool:
        return tensor.requires_grad

    def tracks_gradients(self) -> bool:
        return tracks()

    def regions(self) -> Sequence[Region]:
        return ()  # nothing is checkpointed here

    def is_recomputing(self) -> bool:
        return False

    def was_changed_by(self, key: object) -> bool:
        return True

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

    def bypass(self, module: Module, instead: Instead) -> Detachable:
        return _ListEntry(module.instead, instead)

    def gradients(self, fn: Callable[[Sequence[Any]], Any], at: Sequence[Tensor]) -> list[Any]:
        leaves = [Tensor(tensor.data, requires_grad=True) for tensor in at]
        fn(leaves).backward()
        return [Tensor(np.zeros_like(leaf.data) if leaf.grad is None else leaf.grad) for leaf in leaves]

    def clip_together(self, parameters: Sequence[Any], max_norm: float) -> None:
        raise UnsupportedError("the toy framework does not clip gradients together")

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

    def difference(self, kept: Tensor, other: Tensor) -> Tensor:
        return Tensor(kept.data - other.data)

    def numel(self, tensor: Tensor) -> int:
        return int(tensor.data.size)

    def untracked(self) -> contextlib.AbstractContextManager[Any]:
        return no_grad()

    def environment(self) -> dict[str, Any]:
        return {"framework": "toy", "devices": ["cpu"], "seeds": {}, "modes": {}}


BACKEND = ToyBackend()
