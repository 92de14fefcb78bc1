"""What one registration of :func:`tenterhook.edit` says: which value, changed how, in which calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from typing_extensions import TypedDict

from tenterhook._slots import split_slot
from tenterhook.address import Address
from tenterhook.backends import Backend
from tenterhook.edit_values import EditValue
from tenterhook.errors import HookError
from tenterhook.handles import name_of
from tenterhook.replacing import allowed

__all__ = ["EVERY", "Numbers", "Rule", "Where", "described", "value_function"]

EVERY = "**"
"""As a slot: every tensor of the value by itself."""

Numbers: TypeAlias = "int | Iterable[int] | None"
"""Which calls or steps: one number, several (a range), or all."""

ValueFunction = Callable[[Any, Address], Any]


class Where(TypedDict, total=False):
    """The keywords that say where exactly an edit applies.

    Attributes:
        slot: which part of a nested value, ``"[0]"``; ``"**"`` for every tensor in it, each by itself.
        call: in which calls of a step, counted from 0.
        step: in which steps, counted from 0 since the session began (see :meth:`tenterhook.Editor.step`).
        allow: what may change: ``"structure"``, ``"shape"``, ``"dtype"``, ``"device"``; ``"detached"`` silences the warning
            about a value that cuts the graph.
    """

    slot: str | None
    call: Numbers
    step: Numbers
    allow: str | Collection[str]


@dataclass(frozen=True, slots=True)
class Rule:
    """One registration: what is done, to which value, in which calls."""

    kind: str
    value: Any  # as the user gave it: a function, an edit value, None
    slot: str | None
    call: frozenset[int] | None
    step: frozenset[int] | None
    allow: frozenset[str]

    @classmethod
    def of(
        cls,
        kind: str,
        value: Any,
        *,
        slot: str | None = None,
        call: Numbers = None,
        step: Numbers = None,
        allow: str | Collection[str] = (),
    ) -> Rule:
        """Read what the user gave.

        Raises:
            HookError: a number that none can be, or something unknown in ``allow``.
            SelectionError: the slot is malformed.
        """
        if slot not in (None, EVERY):
            split_slot(slot.removeprefix("."))
        return cls(kind, value, slot, _chosen(call, "call"), _chosen(step, "step"), allowed(allow))

    def matches(self, call: int | None, step: int) -> bool:
        """Whether it is meant for this call of this step."""
        return (self.call is None or call is None or call in self.call) and (self.step is None or step in self.step)

    def takes(self, slot: str) -> bool:
        """Whether it is meant for the tensor at this slot of a gradient."""
        if self.slot in (None, EVERY):
            return True
        wanted, slot = (self.slot or "").removeprefix("."), slot.removeprefix(".")
        return slot == wanted or (slot.startswith(wanted) and slot[len(wanted)] in ".[")

    @property
    def times(self) -> list[str]:
        """In which calls and steps, as words: ``["call 0", "step 2, 3"]``; empty where in all."""
        return [f"{name} {_numbers(chosen)}" for name, chosen in (("call", self.call), ("step", self.step)) if chosen]


def value_function(value: Any, backend: Backend, what: str) -> ValueFunction:
    """Return a function of value and address for what the user gave as an edit.

    Raises:
        HookError: it is no function of one or two arguments, and no edit value.
    """
    if isinstance(value, EditValue):
        return _named(lambda tensor, address: value.apply(tensor, address, backend), value)
    if not callable(value):
        raise HookError(
            f"{what} needs a function or an edit value, got {type(value).__name__}\n"
            "  give fn(value), fn(value, address), or one of th.edits: th.edits.replace(tensor)"
        )
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # some callables of C show no signature; they get the value alone
        return _named(lambda tensor, address: value(tensor), value)
    needed = [
        one
        for one in parameters
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    taken = [one for one in parameters if one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD)]
    missing = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    if len(needed) > 2 or not taken or missing:
        raise HookError(
            f"{what} calls fn(value) or fn(value, address), but {name_of(value)}{inspect.signature(value)} does not take that\n"
            "  bind the other arguments with functools.partial or a lambda"
        )
    return value if len(needed) == 2 else _named(lambda tensor, address: value(tensor), value)


def described(value: Any) -> str:
    """Return an edit's name for tables and messages."""
    return "" if value is None else repr(value) if isinstance(value, EditValue) else name_of(value)


def _named(fn: ValueFunction, value: Any) -> ValueFunction:
    fn.__qualname__ = described(value)  # in the note of an error it is the user's
    return fn


def _chosen(numbers: Any, what: str) -> frozenset[int] | None:
    if numbers is None:
        return None
    chosen = [numbers] if isinstance(numbers, int) else list(numbers)
    if not chosen or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in chosen):
        raise HookError(
            f"{what}={numbers!r} is no number of a {what}\n  they count from 0: {what}=0, {what}=range(2, 5)"
        )
    return frozenset(chosen)


def _numbers(chosen: frozenset[int]) -> str:
    found = sorted(chosen)
    return ", ".join(map(str, found[:4])) + (", ..." if len(found) > 4 else "")
