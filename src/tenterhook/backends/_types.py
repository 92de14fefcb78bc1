"""The small things that backends give and take: callbacks, attachments, parameters, installed hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tenterhook.native import FrameworkParts

__all__ = [
    "FUSED_OFF",
    "After",
    "Before",
    "BeginningBackend",
    "Detachable",
    "Failed",
    "FunctionT",
    "InstalledHook",
    "NativeBackend",
    "OpListener",
    "OpTrace",
    "ParameterBackend",
    "ParameterEntry",
    "Region",
    "Summary",
    "Suspendable",
    "Yielding",
]

FUSED_OFF = "fused transformer path off: results may differ in the last bits from the fused ones"
"""What is said where hooks, or a session, have kept a framework from it."""

Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], "tuple[tuple[Any, ...], dict[str, Any]] | None"]
"""``(module, args, kwargs)`` before a call; returns None, or new ``(args, kwargs)``."""

After = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]
"""``(module, args, kwargs, output)`` after a call; returns None, or a new output."""

Failed = Callable[[Any, tuple[Any, ...], dict[str, Any], BaseException], None]
"""``(module, args, kwargs, error)`` when the call raised instead."""

Summary = tuple[tuple[int, ...], str, str]
"""Shape, dtype name (``float32``) and device name (``cpu``, ``cuda:0``) of a tensor."""


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
AroundT = TypeVar("AroundT", bound=Callable[[], AbstractContextManager[object]])


class Detachable(Protocol):
    """Something that was put on and comes off."""

    @property
    def live(self) -> bool:
        """Whether it is still in place: False after ``remove``, and when somebody else took it off."""
        ...

    def remove(self) -> None:
        """Take it off. A second call does nothing."""
        ...


class Suspendable(Detachable):
    """Hooks that can be taken off for a while, at less than the cost of removing them and putting on new ones.

    A class to derive from, and no protocol: to ask whether an object fits a protocol costs more than it saves.
    """

    def suspend(self) -> bool:
        """Take them off until ``resume``; False where that cannot be done now, and nothing was."""
        raise NotImplementedError

    def resume(self) -> None:
        """Put them on again, after those that are on by now."""
        raise NotImplementedError


class Yielding(Suspendable):
    """Something around a module's calls that hooks can take the place of; to derive from, as above."""

    def give_way(self) -> None:
        """Have hooks take its place; nothing where they have."""
        raise NotImplementedError


class NativeBackend:
    """A backend whose framework has what the native path of a recording needs; to derive from, as above."""

    def native_parts(self) -> FrameworkParts | None:
        """Return what the native path calls; None where this release of the framework lacks something."""
        raise NotImplementedError

    def attach_native(
        self, module: Any, before: Before, after: After, failed: Failed, *, native: tuple[Any, Any]
    ) -> Detachable:
        """Put callbacks around every call of ``module``, as ``attach`` does; what is plain goes the native path.

        Args:
            module: the module.
            before: called before a call that is not plain.
            after: called after it.
            failed: called where it has raised.
            native: the engine, and the place of the module in it.
        """
        raise NotImplementedError


class BeginningBackend:
    """A backend whose calls decide which hooks they run before they run the first of them; to derive from, as above.

    A call is an object that lives as long as the call, and is hidden otherwise.
    """

    def beginning(self, modules: Collection[Any]) -> list[object]:
        """List the calls of modules, begun by other threads, that may not run a ``before`` that has just been put on."""
        raise NotImplementedError

    def hooked_call(self) -> object | None:
        """Return the call whose hooks are being run here."""
        raise NotImplementedError


class ParameterBackend:
    """A backend that can tell cheaply whether a model's parameters are still the same; to derive from, as above."""

    def same_parameters(self, model: Any, before: object) -> object:
        """Look whether a model still has the modules and parameters that it had.

        Args:
            model: the model.
            before: what was returned before, or None.

        Returns:
            ``before`` itself where nothing has been replaced, added, renamed or taken away; something else otherwise.
        """
        raise NotImplementedError


class Region(Protocol):
    """A part of a forward under activation checkpointing, which the backward pass runs again."""

    def on_rerun(self, key: object, around: AroundT, attachment: Detachable | None = None) -> AroundT:
        """Have it run inside ``around()`` whenever it is run again; a key's first registration holds and is returned.

        Args:
            key: whose registration this is.
            around: makes the context.
            attachment: hooks that are put back, if they have come off by then, for the time of the second run.
        """
        ...


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """A parameter, the module that owns it and its other names."""

    name: str  # full name, "features.0.weight"
    path: str  # path of the owning module
    parameter: Any
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InstalledHook:
    """A hook that is on a model now; see :func:`tenterhook.installed_hooks`.

    Attributes:
        path: where: a module's path, a parameter's name, or words in parentheses for what is no part of the model.
        kind: which of the framework's tables it is in: ``forward_pre``, ``forward``, ``backward``, ``load``, ...
        function: the callback's name; of a hook put on through tenterhook, the user's callback.
        source: ``file.py:12``, None where it is not written in Python.
        owner: ``tenterhook``, or the package of the callback.
        alive: whether it will be called.
        note: why it will not, or what else is to be known of it.
        hook: what stands in the framework's table.
    """

    path: str
    kind: str
    function: str
    source: str | None
    owner: str
    alive: bool
    note: str = ""
    hook: Any = field(default=None, repr=False, compare=False)


class OpListener(Protocol):
    """What is told of functional calls."""

    def begins(self, name: str, source: Callable[[], str | None]) -> Any:
        """A function is about to be called; returns None where nobody wants to know, else what ``ends`` is given.

        ``source`` gives the line of the user's code.
        """
        ...

    def ends(self, begun: Any, output: Any, error: BaseException | None) -> None:
        """It has returned ``output``, or raised ``error``."""
        ...

    def differentiated(self, begun: Any, slot: str, put_on: Callable[[Callable[[Any], None]], None]) -> None:
        """Of a framework that shows what functions return before it differentiates them: it has done so.

        ``put_on(fn)`` has ``fn(gradient)`` called when the gradient of what is at ``slot`` is known.
        """
        ...


class OpTrace(AbstractContextManager[Any], Protocol):
    """A context in which functional calls are told of."""

    def gives(self, value: Any) -> None:
        """The model gives ``value`` to whoever has called it: its last operation is behind us."""
        ...
