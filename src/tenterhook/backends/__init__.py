"""What a framework must offer so that hooks, recordings and edits work on it, and how the right one is found.

A backend is the only thing that touches its framework. It decides nothing: selections, call numbers, steps, order and
statistics are the same for all of them and live elsewhere. ``tests/contract`` holds every backend to the same behaviour.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from tenterhook.backends._editing import EditingMethods, Instead, Layer
from tenterhook.backends._types import (
    FUSED_OFF,
    After,
    Before,
    BeginningBackend,
    Detachable,
    Failed,
    FunctionT,
    InstalledHook,
    NativeBackend,
    OpListener,
    OpTrace,
    ParameterBackend,
    ParameterEntry,
    Region,
    Summary,
    Suspendable,
    Yielding,
)
from tenterhook.backends._unseen import to_user
from tenterhook.errors import HookError
from tenterhook.recording import converters
from tenterhook.selection import Entry
from tenterhook.stats import RowBuffer

__all__ = [
    "FRAMEWORKS",
    "FUSED_OFF",
    "After",
    "Backend",
    "Before",
    "BeginningBackend",
    "Detachable",
    "Failed",
    "FunctionT",
    "InstalledHook",
    "Instead",
    "Layer",
    "NativeBackend",
    "OpListener",
    "OpTrace",
    "ParameterBackend",
    "ParameterEntry",
    "Region",
    "Summary",
    "Suspendable",
    "Yielding",
    "find_backend",
    "loaded_backends",
    "to_user",
]

# Found by name when a tensor of the framework is asked for, so that reading a recording imports no framework.
converters.register("torch", "tenterhook.backends._torch_arrays:CONVERTER")
converters.register("mindspore", "tenterhook.backends._mindspore_arrays:CONVERTER")


class Backend(EditingMethods, Protocol):
    """One framework, seen through the few things that tenterhook needs from it."""

    name: str
    tensor_types: tuple[type, ...]
    tells_backward_end: bool
    reenters: (
        bool  # some checkpointed regions are differentiated in a backward pass of their own, inside of the outer one
    )
    knows_what_gets_gradients: bool  # False where wants_gradient may be True of a tensor that gets none
    works_in_place_on_aliases: bool  # gradients stay right where a module changes an alias of its input in place

    # --- the model -------------------------------------------------------------------------------------------------
    def is_model(self, value: object) -> bool:
        """Whether ``value`` is a module of this framework."""
        ...

    def check(self, model: Any) -> None:
        """Refuse a model that cannot be hooked at all.

        Raises:
            UnsupportedError: script modules, graph mode and the like; the message says what to do instead.
        """
        ...

    def entries(self, model: Any) -> list[Entry]:
        """List every module once, the root first, under its plain path, with its other paths as aliases."""
        ...

    def parameters(self, model: Any) -> list[ParameterEntry]:
        """List every parameter once, with its other names as aliases."""
        ...

    def blind_spots(self, model: Any) -> Mapping[str, str]:
        """Path -> reason, for modules whose hooks will not fire or will not see everything (compiled, fused, ...)."""
        ...

    def fused(self, model: Any) -> Collection[str]:
        """List the paths of modules that the framework can run fused, as long as there are no hooks on them."""
        ...

    def is_compiled(self, module: Any) -> bool:
        """Whether ``module`` is, or is part of, a model that was compiled, and whose code may not call hooks put on now."""
        ...

    def forward_function(self, module: Any) -> Callable[..., Any]:
        """Return the function whose parameters name the module's inputs."""
        ...

    def is_training(self, module: Any) -> bool:
        """Whether the module is in training mode."""
        ...

    # --- calls -----------------------------------------------------------------------------------------------------
    def attach(
        self,
        module: Any,
        before: Before | None,
        after: After | None,
        failed: Failed | None = None,
        *,
        layer: Layer = Layer.OBSERVE,
    ) -> Detachable:
        """Put callbacks around every call of ``module``; the layer says where among the hooks already there."""
        ...

    def running_modules(self) -> list[Any]:
        """List the modules whose calls are running in this thread, innermost first. May take some microseconds."""
        ...

    def on_any_call(
        self, wanted: Callable[[Any], bool], fn: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
    ) -> Detachable:
        """Before every module call of the process, whoever owns the module, call ``fn(module, args, kwargs)`` if ``wanted(module)``.

        What ``fn`` attaches to the module takes part in this very call, except for its ``before``.
        """
        ...

    def on_optimizer_step(self, fn: Callable[[Any], None], *, before: bool = False) -> Detachable:
        """Call ``fn(optimizer)`` after any optimizer of the process has stepped, or ``before`` it does."""
        ...

    def on_load(self, module: Any, fn: Callable[[Any, Any], None]) -> Detachable:
        """Call ``fn(module, incompatible_keys)`` after ``module`` has loaded its parameters, in order of registration.

        ``missing_keys`` and ``unexpected_keys`` are lists that ``fn`` may change; a strict load raises for what is left.
        """
        ...

    def installed_hooks(self, model: Any) -> list[InstalledHook]:
        """List all hooks that are on ``model``, whoever put them there, those of the whole process last."""
        ...

    def trace_ops(self, listener: OpListener) -> OpTrace:
        """Tell ``listener`` of every functional call that this thread makes inside the context.

        The context is entered and left in one thread; where contexts of others were entered in it and not left, leaving
        it takes ours out from under them.
        """
        ...

    def owns_forward(self, module: Any) -> bool:
        """Whether the framework wrote the module's forward, so that functional calls in it are its implementation."""
        ...

    def bare_traceback(self, traceback: TracebackType | None) -> TracebackType | None:
        """Return a traceback without the frames that hooks of ours have brought into it."""
        ...

    def has_optimizer(self, model: Any) -> bool:
        """Whether some live optimizer holds a parameter of ``model``."""
        ...

    def seeing_everything(self, model: Any) -> AbstractContextManager[Sequence[str]]:
        """For a session's time, leave fast paths that skip hooks; yields sentences that say what was changed."""
        ...

    # --- gradients -------------------------------------------------------------------------------------------------
    def tap(self, tensor: Any, fn: Callable[[Any], Any], module: Any = None, owner: object = None) -> Detachable | str:
        """Call ``fn(gradient)`` when the gradient of ``tensor`` is known; a returned tensor replaces it.

        Where several taps sit on one tensor (a container's output is its last child's), the last module to have
        finished comes first, so that order nests in the backward pass as it does in the forward pass; taps that
        different owners put on for the same ``module`` run in the order in which they were put on.

        Returns:
            the tap, or the reason why no gradient can come ("grad mode off", "requires_grad=False").
        """
        ...

    def tap_parameter(
        self, parameter: Any, fn: Callable[[Any], Any], *, accumulated: bool = False, edits: bool = False
    ) -> Detachable | str:
        """Call ``fn(gradient)`` once a backward pass, with this pass's gradient or with the running sum.

        Taps that are ``edits`` run before all others, in the order in which they were put on.
        """
        ...

    def alias(self, tensor: Any) -> Any:
        """Return a tensor equal to ``tensor`` whose gradient is the part that flows through this alias."""
        ...

    def hand_back(self, tensor: Any, alias: Any, version: int | None) -> str | None:
        """Give to ``tensor`` the memory that a module has put under its ``alias`` (``x.data = ...``).

        Args:
            tensor: the module's input.
            alias: what the module was given.
            version: the alias's before the module ran.

        Returns:
            None, or what the module did to the alias that cannot be done to the tensor now: ``changes ...``.
        """
        ...

    def version(self, tensor: Any) -> int | None:
        """Return a number that every in-place change alters, or None where the framework keeps none."""
        ...

    def origin(self, tensor: Any) -> object:
        """Return the operation that differentiation takes the tensor for the result of; None for a leaf, or where unknown."""
        ...

    def address(self, tensor: Any) -> int | None:
        """Return where the values lie in memory, None where that cannot be told."""
        ...

    def is_leaf(self, tensor: Any) -> bool:
        """Whether the tensor is no result of a computation, so that a tap on it outlives the graph."""
        ...

    def wants_gradient(self, tensor: Any) -> bool:
        """Whether a gradient is being tracked for this tensor now."""
        ...

    def tracks_gradients(self) -> bool:
        """Whether what runs now is being tracked for a backward pass."""
        ...

    def work_done(self) -> int | None:
        """Return a number that grows with each operation that is tracked in this thread; None where there is none."""
        ...

    def unseen(self, fn: FunctionT) -> FunctionT:
        """Have what a function of ours does go past what the user has put there to see all that his program does."""
        ...

    def untraced(self) -> AbstractContextManager[None] | None:
        """Where a graph is being made of what runs now: a context in which what is done stays out of that graph. Else None."""
        ...

    def regions(self) -> Sequence[Region]:
        """Return the checkpointed regions around the forward that runs now: they will run again in the backward pass."""
        ...

    def is_recomputing(self) -> bool:
        """Whether the forward that runs now is a checkpointed region's, run again in a backward pass."""
        ...

    def was_changed_by(self, key: object) -> bool:
        """In a recomputation, whether the region's first run was registered for ``key`` (:meth:`Region.on_rerun`).

        True outside of recomputations, and where it cannot be told.
        """
        ...

    def is_early_stop(self, error: BaseException) -> bool:
        """Whether an exception is the framework's own, to end a recomputation that has all it needs."""
        ...

    def in_backward(self) -> bool:
        """Whether this code runs inside a backward pass (as recomputation under checkpointing does)."""
        ...

    def backward_token(self) -> int:
        """Return a number that differs between backward passes; -1 outside of one."""
        ...

    def at_backward_end(self, fn: Callable[[], None]) -> bool:
        """Call ``fn`` when the present backward pass ends; False where the framework gives no such signal."""
        ...

    # --- values ----------------------------------------------------------------------------------------------------
    def summary(self, tensor: Any) -> Summary:
        """Return shape, with -1 for sizes that are ragged or only symbols, dtype name and device name."""
        ...

    def measure(self, tensor: Any, rows: RowBuffer, row: int) -> str | None:
        """Write statistics, sketch and digest into ``rows``; returns a reason where that cannot be done."""
        ...

    def shard_offset(self, tensor: Any) -> tuple[int, ...] | None:
        """Return where, in the whole of a tensor that is spread over processes, the part begins that this one holds.

        None for a tensor that is whole here, and where the parts cannot be put together.
        """
        ...

    def keep(self, tensor: Any, dtype: str | None = None) -> Any:
        """Return a detached copy in host memory that later changes of ``tensor`` do not reach.

        With ``dtype`` (``"float16"``, ``"bfloat16"``, ``"float32"``, ``"float64"``) real numbers are turned into that.
        """
        ...

    def reference(self, tensor: Any) -> Any | None:
        """Return the tensor without its graph, sharing its memory; None where later changes of it could not be told."""
        ...

    def to_numpy(self, kept: Any) -> Any:
        """Return a kept tensor as a NumPy array (bfloat16 and float8 through ml_dtypes)."""
        ...

    def snapshot(self, tensor: Any) -> Any:
        """Return a detached copy for :meth:`difference` that later changes of ``tensor`` do not reach; waits for no device."""
        ...

    def difference(self, kept: Any, other: Any) -> Any:
        """Return ``kept - other``, ``other`` being a snapshot of what ``kept`` was; of a shard, the shard of the difference.

        Waits for no device.
        """
        ...

    def unscaled(self, gradient: Any, scale: float) -> Any:
        """Return a gradient divided by the factor of loss scaling, half precision as float32 so that nothing is lost."""
        ...

    def numel(self, tensor: Any) -> int:
        """Return the number of elements, 0 where it is not known yet (a lazy parameter)."""
        ...

    def untracked(self) -> AbstractContextManager[Any]:
        """Return a context in which our own computation is neither differentiated nor hooked."""
        ...

    def environment(self) -> dict[str, Any]:
        """Return the manifest's fields that only the framework knows: framework, devices, seeds, modes."""
        ...


FRAMEWORKS = {"torch": "tenterhook.backends.torch", "mindspore": "tenterhook.backends.mindspore"}
"""Frameworks and the modules that speak to them."""

_TOY = "tenterhook.backends.toy"


def loaded_backends() -> list[Backend]:
    """Return the backends of all frameworks that this process has imported by itself."""
    names = [module for framework, module in FRAMEWORKS.items() if framework in sys.modules]
    if _TOY in sys.modules:
        names.append(_TOY)
    return [importlib.import_module(name).BACKEND for name in names]


def find_backend(model: object) -> Backend:
    """Return the backend that owns ``model``.

    A framework is never imported for this: a model of a framework that nobody imported cannot exist.

    Raises:
        HookError: ``model`` is a module of none of the frameworks.
    """
    for backend in loaded_backends():
        if backend.is_model(model):
            return backend
    kind = type(model)
    raise HookError(
        f"expected a torch Module or a MindSpore Cell, got {kind.__module__}.{kind.__qualname__}\n"
        "  pass the model itself (not its state dict, its class, its output or its forward function)"
    )
