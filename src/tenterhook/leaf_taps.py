"""Taps on leaves: tensors that are no results, so that what is put on them outlives every graph.

A module may return the same leaf in several calls (a table of parameters, an input that is handed on). It has one gradient
then, in which all of these calls have their part, and each of them is to see it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from tenterhook.backends import Detachable

__all__ = ["LeafTaps"]

_MOST = 64  # calls of one step that wait for the gradient of one leaf


class LeafTaps:
    """The taps of one session on leaves.

    A tap that has had its gradient stays until the next call puts on its own, since a graph that is kept may be gone
    through again; and then goes, since what comes after is of later calls. Those that still wait go with the step.
    """

    def __init__(self) -> None:
        self._groups: weakref.WeakValueDictionary[Hashable, _Group] = weakref.WeakValueDictionary()

    def put_on(
        self,
        key: Hashable,
        step: int,
        fn: Callable[[Any], Any],
        put: Callable[[Callable[[Any], Any]], Detachable | str],
    ) -> Detachable | str:
        """Put a tap on a leaf, and take off those in whose place it comes.

        Args:
            key: the leaf, and what it is waited for.
            step: in which the call is made.
            fn: called with the gradient.
            put: puts a function on the leaf's gradient; what it returns is returned.
        """
        group = self._groups.get(key)
        if group is None:
            group = _Group()
        group.clear(step)
        waiting = _Waiting(group, step, fn)
        tap = put(waiting)
        if not isinstance(tap, str):
            group.taps.append((weakref.ref(waiting), weakref.ref(tap)))
            self._groups[key] = group
        return tap

    def remove(self) -> None:
        """Take all of them off."""
        for group in list(self._groups.values()):
            group.clear(None)
        self._groups.clear()


class _Group:
    """The taps on one leaf; held by what they call, so that it goes with the leaf."""

    __slots__ = ("__weakref__", "taps")

    def __init__(self) -> None:
        self.taps: list[tuple[weakref.ref[_Waiting], weakref.ref[Detachable]]] = []

    def clear(self, step: int | None) -> None:
        """Take off the taps that have had their gradient, and those of other steps than this one."""
        kept = []
        for waiting_ref, tap_ref in self.taps:
            waiting, tap = waiting_ref(), tap_ref()
            if waiting is None or tap is None:
                continue
            if waiting.has_come or waiting.step != step:
                tap.remove()
            else:
                kept.append((waiting_ref, tap_ref))
        for _, tap_ref in kept[: 1 - _MOST] if len(kept) >= _MOST else ():
            tap = tap_ref()
            if tap is not None:
                tap.remove()
        self.taps = kept[1 - _MOST :]


class _Waiting:
    """What a tap calls."""

    __slots__ = ("__weakref__", "_fn", "_group", "has_come", "step")

    def __init__(self, group: _Group, step: int, fn: Callable[[Any], Any]) -> None:
        self._group = group
        self._fn = fn
        self.step = step
        self.has_come = False

    def __call__(self, gradient: Any) -> Any:
        self.has_come = True
        return self._fn(gradient)
