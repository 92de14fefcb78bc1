"""Calls that are told apart for as long as they run."""

from __future__ import annotations

import weakref

__all__ = ["CallMarks"]


class CallMarks(dict[int, "weakref.ref[object]"]):
    """A set of calls, of each by the object that lives as long as it does.

    A dictionary, since its length is asked for at each call of a module: that must not be Python code.
    """

    __slots__ = ("__weakref__",)

    def add(self, call: object) -> None:
        """Mark a call until it ends."""
        key = id(call)
        self[key] = weakref.ref(call, lambda _: self.pop(key, None))

    def __contains__(self, call: object) -> bool:
        ref = self.get(id(call))
        return ref is not None and ref() is call
