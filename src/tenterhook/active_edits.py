"""Which editing sessions are open, so that a recording can say what was done to the model while it was made."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

__all__ = ["EditWatch", "ModuleRef", "closed", "opened", "watching_edits"]

ModuleRef = Callable[[], Any]
"""A ``weakref.ref`` to a module. Python gives the same one for the same object, so it tells modules apart when they are gone, too."""


class _Session(Protocol):
    """An editing session."""

    def describe(self) -> list[dict[str, Any]]:
        """Say what it does, one dictionary of plain data for each edit."""
        ...

    def module_refs(self) -> Sequence[ModuleRef]:
        """Return references to the modules of its model, the root first."""
        ...


class EditWatch:
    """The edits of all sessions that were open at some time during a recording.

    A session is held while it is open; of one that has ended only what it did is kept, and what a thousand sessions in a loop
    did in the same way is one entry.
    """

    def __init__(self, sessions: Iterable[_Session]) -> None:
        self._open = list(sessions)
        self._modules: dict[int, Sequence[ModuleRef]] = {}  # id of the reference to a root -> those to its modules
        self._ended: dict[
            tuple[int, str, int], dict[str, Any]
        ] = {}  # root, edit, how manieth of a session -> what is said

    def began(self, session: _Session) -> None:
        """A session has been opened."""
        self._open.append(session)

    def ended(self, session: _Session) -> None:
        """A session has been closed."""
        if any(one is session for one in self._open):
            self._open = [one for one in self._open if one is not session]
            self._add(session, self._ended)

    def on(self, modules: Iterable[ModuleRef] | None) -> list[dict[str, Any]]:
        """Describe the edits of those sessions whose model shares a module with these, or of all; in the order in which they ended."""
        found = {key: dict(said) for key, said in self._ended.items()}
        for session in self._open:
            self._add(session, found)
        if modules is None:
            return list(found.values())
        mine = {id(ref) for ref in modules}
        shared = {root for root, refs in self._modules.items() if not mine.isdisjoint(map(id, refs))}
        return [said for (root, _, _), said in found.items() if root in shared]

    def _add(self, session: _Session, found: dict[tuple[int, str, int], dict[str, Any]]) -> None:
        refs = session.module_refs()
        root = id(refs[0])
        self._modules.setdefault(root, refs)
        seen: Counter[str] = Counter()
        for said in session.describe():
            edit = repr({name: value for name, value in said.items() if name != "ran"})
            key = root, edit, seen[edit]
            seen[edit] += 1
            known = found.setdefault(key, said)
            if known is not said:
                known["ran"] += said["ran"]


_open: list[weakref.ref[_Session]] = []  # of one that is dropped while it is open nothing more can be told
_watches: list[EditWatch] = []


def opened(session: _Session) -> None:
    """An editing session has begun."""
    _open.append(weakref.ref(session, _open.remove))
    for watch in _watches:
        watch.began(session)


def closed(session: _Session) -> None:
    """An editing session has ended."""
    _open[:] = [ref for ref in _open if ref() is not session]
    for watch in _watches:
        watch.ended(session)


@contextlib.contextmanager
def watching_edits() -> Iterator[EditWatch]:
    """Follow the sessions that are open now or are opened meanwhile."""
    watch = EditWatch(session for ref in _open if (session := ref()) is not None)
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches[:] = [one for one in _watches if one is not watch]
