"""What a framework must offer so that hooks, recordings and edits work on it, and how the right one is found.

A backend is the only thing that touches its framework. It decides nothing: selections, call numbers, steps, order and
statistics are the same for all of them and live elsewhere. ``tests/contract`` holds every backend to the same behaviour.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from tenterhook.errors import HookError
from tenterhook.select import Entry
from tenterhook.stats import RowBuffer

__all__ = [
    "FRAMEWORKS",
    "After",
    "Backend",
    "Before",
    "Detachable",
    "Failed",
    "ParameterEntry",
    "Summary",
    "find_backend",
    "loaded_backends",
]

Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], "tuple[tuple[Any, ...], dict[str, Any]] | None"]
"""``(module, args, kwargs)`` before a call; returns None, or new ``(args, kwargs)``."""

After = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]
"""``(module, args, kwargs, output)`` after a call; returns None, or a new output."""

Failed = Callable[[Any, tuple[Any, ...], dict[str, Any], BaseException], None]
"""``(module, args, kwargs, error)`` when the call raised instead."""

Summary = tuple[tuple[int, ...], str, str]
"""Shape, dtype name (``float32``) and device name (``cpu``, ``cuda:0``) of a tensor."""


class Detachable(Protocol):
    """Something that was put on and comes off."""

    @property
    def live(self) -> bool:
        """Whether it is still in place: False after ``remove``, and when somebody else took it off."""
        ...

    def remove(self) -> None:
        """Take it off. A second call does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """A parameter, the module that owns it and its other names."""

    name: str  # full name, "features.0.weight"
    path: str  # path of the owning module
    parameter: Any
    aliases: tuple[str, ...] = ()


class Backend(Protocol):
    """One framework, seen through the few things that tenterhook needs from it."""

    name: str
    tensor_types: tuple[type, ...]
    tells_backward_end: bool

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
        first: bool = False,
    ) -> Detachable:
        """Put callbacks around every call of ``module``; ``first`` puts them ahead of hooks already there."""
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

    def on_optimizer_step(self, fn: Callable[[Any], None]) -> Detachable:
        """Call ``fn(optimizer)`` after any optimizer of the process has stepped."""
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

    def tap_parameter(self, parameter: Any, fn: Callable[[Any], Any], *, accumulated: bool = False) -> Detachable | str:
        """Call ``fn(gradient)`` once a backward pass, with this pass's gradient or with the running sum."""
        ...

    def alias(self, tensor: Any) -> Any:
        """Return a tensor equal to ``tensor`` whose gradient is the part that flows through this alias."""
        ...

    def version(self, tensor: Any) -> int | None:
        """Return the count of in-place changes, or None where the framework keeps none."""
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

    def in_checkpoint(self) -> bool:
        """Whether this forward runs in a checkpointed region, so that it will run again in the backward pass."""
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
        """Return shape, dtype name and device name."""
        ...

    def measure(self, tensor: Any, rows: RowBuffer, row: int) -> str | None:
        """Write statistics, sketch and digest into ``rows``; returns a reason where that cannot be done."""
        ...

    def keep(self, tensor: Any) -> Any:
        """Return a detached copy in host memory that later changes of ``tensor`` do not reach."""
        ...

    def to_numpy(self, kept: Any) -> Any:
        """Return a kept tensor as a NumPy array (bfloat16 and float8 through ml_dtypes)."""
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
