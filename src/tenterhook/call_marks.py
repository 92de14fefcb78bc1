"""Calls that are told apart for as long as they run."""

from __future__ import annotations

import weakref

__all__ = ["CallMarks"]


class CallMarks:
    """A set of calls, of each by the object that lives as long as it does."""

    __slots__ = ("__weakref__", "_refs")

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[object]] = {}

    def add(self, call: object) -> None:
        """Mark a call until it ends."""
        refs, key = self._refs, id(call)
        refs[key] = weakref.ref(call, lambda _: refs.pop(key, None))

    def __contains__(self, call: object) -> bool:
        ref = self._refs.get(id(call))
        return ref is not None and ref() is call

    def __len__(self) -> int:
        return len(self._refs)
