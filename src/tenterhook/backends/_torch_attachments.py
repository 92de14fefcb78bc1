"""Our hooks in a torch module's tables: put on, taken off, and put back into the same place for a while."""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from tenterhook._fork_locks import ForkLock
from tenterhook.backends import Suspendable
from tenterhook.errors import HookError

__all__ = ["Attachment", "iterated", "late_removals", "put_in_layer", "remove_late", "use_own_key"]

_removals = itertools.count(1)
_keys = itertools.count(-1, -1)  # torch counts from 0 up
_lock = ForkLock()  # reentrant: a signal's handler may take hooks off amid what holds it
_being_iterated: list[Any] = []  # hook tables that torch walks through while a call of ours runs
late_removals: list[Any] = []  # handles whose table was being walked through when they were to go


@contextlib.contextmanager
def iterated(table: Any) -> Iterator[None]:
    """After a call has raised torch walks through the table itself: a removal in there would hide the user's error."""
    remove_late(table)
    with _lock:
        _being_iterated.append(table)
    try:
        yield
    finally:
        with _lock:
            del _being_iterated[
                next(i for i, one in enumerate(_being_iterated) if one is table)
            ]  # equal is not the same


def remove_late(but: Any = None) -> None:
    """Take off the hooks that could not go when they were to."""
    if not late_removals:
        return
    with _lock:
        for handle in late_removals[:]:
            table = handle.hooks_dict_ref()
            if table is not but and not any(table is one for one in _being_iterated):
                late_removals.remove(handle)
                handle.remove()


class Attachment(Suspendable):
    """Our hooks on one module."""

    __slots__ = ("_borrowers", "_handles", "_resting", "_taken", "removed")

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles
        self._taken: list[_Taken] = []
        self._resting: list[tuple[Any, int, Any]] | None = None  # (table or table of flags, key, value) while suspended
        self._borrowers = 0  # recomputations, in any thread, for whose time the hooks are back
        self.removed = 0  # place in the order of removals: the last to be taken off is the first to be put back

    @property
    def live(self) -> bool:
        return bool(self._handles) and all(_is_live(handle) for handle in self._handles)

    def remove(self) -> None:
        with _lock:
            handles, self._handles = self._handles, []
            self._resting = None
            if not handles:
                return
            self.removed = next(_removals)
            self._taken = [taken for handle in handles if (taken := _Taken.of(handle)) is not None]
            for handle in handles:
                table = handle.hooks_dict_ref()
                if any(table is one for one in _being_iterated):
                    late_removals.append(handle)
                else:
                    handle.remove()
            remove_late()

    def put_first(self) -> None:
        """Move the hooks in front of all others."""
        for handle in self._handles:
            table = handle.hooks_dict_ref()
            if table is not None and handle.id in table:
                table.move_to_end(handle.id, last=False)

    def suspend(self) -> bool:
        """Take the hooks off until :meth:`resume`, at less than the cost of removing them and putting on new ones.

        Returns:
            False where that cannot be done now, and nothing was: one is not in place, or torch walks through a table.
        """
        with _lock:
            if _being_iterated or self._resting is not None or not self.live:
                return False
            resting: list[tuple[Any, int, Any]] = []
            for handle in self._handles:
                for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
                    table = reference()
                    if table is not None and handle.id in table:
                        resting.append((reference, handle.id, table.pop(handle.id)))
            self._resting = resting
            return True

    def resume(self) -> None:
        """Put the hooks on again, after those that are on by now, but ahead of ours that belong to later layers."""
        with _lock:
            resting, self._resting = self._resting, None
            for reference, key, value in resting or ():
                table = reference()
                if table is not None:
                    table[key] = value
                    if (
                        layer := getattr(value, "layer", None)
                    ) is not None:  # hooks of later layers came meanwhile, or stayed
                        put_in_layer(table, key, layer)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the hooks in their place among the others for the length of a ``with``, also if they have been removed.

        Raises:
            HookError: they were taken off by somebody else, and cannot come back.
        """
        with _lock:
            borrowed = self._borrowers > 0 or not self._handles
            if borrowed:
                if not self._borrowers:
                    taken, self._taken = self._taken, []
                    self._handles = [one.put_back() for one in reversed(taken)]
                self._borrowers += 1
        try:
            if not self.live:
                raise HookError(
                    "a hook that changed a value in a checkpointed region was taken off by somebody else before the region was "
                    "run again for its gradient, which would be wrong now\n  leave the hooks of others on until backward has run"
                )
            yield
        finally:
            if borrowed:
                with _lock:
                    self._borrowers -= 1
                    if not self._borrowers:
                        self.remove()


def _is_live(handle: Any) -> bool:
    table = handle.hooks_dict_ref()
    return table is not None and handle.id in table


class _Taken:
    """A hook that was taken out of its table, and which hooks came after it there."""

    __slots__ = ("flags", "followers", "handle", "hook")

    def __init__(self, handle: Any, hook: Any, flags: list[tuple[Any, Any]], followers: list[int]) -> None:
        self.handle = handle
        self.hook = hook
        self.flags = flags  # (dictionary reference, value): with_kwargs, always_call
        self.followers = followers

    @classmethod
    def of(cls, handle: Any) -> _Taken | None:
        table: OrderedDict[int, Any] | None = handle.hooks_dict_ref()
        if table is None or handle.id not in table:
            return None
        keys = list(table)
        flags = [
            (reference, extra[handle.id])
            for reference in handle.extra_dict_ref
            if (extra := reference()) is not None and handle.id in extra
        ]
        return cls(handle, table[handle.id], flags, keys[keys.index(handle.id) + 1 :])

    def put_back(self) -> Any:
        table = self.handle.hooks_dict_ref()
        if table is not None:
            table[self.handle.id] = self.hook
            for reference, value in self.flags:
                extra = reference()
                if extra is not None:
                    extra[self.handle.id] = value
            for key in self.followers:
                if key in table:
                    table.move_to_end(key)
        return self.handle


def use_own_key(handle: Any) -> None:
    """Move a hook of ours, just put on, to a key that torch gives to no hook.

    A class that copies or pickles itself in a way of its own takes our hooks along. What is loaded in another process would keep the
    flags that go with the key there, and a hook that torch gives the same number would be called as ours was asked to be.
    """
    table, flags = handle.hooks_dict_ref(), [reference() for reference in handle.extra_dict_ref]
    old, key = handle.id, next(_keys)
    while key in table or any(key in one for one in flags):  # loaded with the module
        key = next(_keys)
    first = next(iter(table)) == old
    for one in flags:
        if old in one:
            one[key] = one[old]
    table[key] = table.pop(old)
    if first:
        table.move_to_end(key, last=False)
    for one in flags:
        one.pop(old, None)
    handle.id = key


def put_in_layer(table: Any, key: int, layer: int) -> None:
    """Move a new hook of ours ahead of those of ours that belong to later layers; hooks of others keep their places."""
    behind = False
    for other in list(table):
        behind = behind or getattr(table[other], "layer", layer) > layer
        if behind and other != key:
            table.move_to_end(other)
