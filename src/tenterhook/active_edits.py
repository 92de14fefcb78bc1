"""Which editing sessions are open, so that a recording can say what was done to the model while it was made."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

__all__ = ["EditWatch", "closed", "edits_on", "opened", "watching_edits"]


class _Session(Protocol):
    """An editing session."""

    def describe(self) -> list[dict[str, Any]]:
        """Say what it does, one dictionary of plain data for each edit."""
        ...

    def modules(self) -> list[Any]:
        """Return the modules of its model."""
        ...


EditWatch = list[_Session]
"""The sessions that were open at some time during a recording."""

_open: list[weakref.ref[_Session]] = []  # of one that is dropped while it is open nothing more can be told
_watches: list[EditWatch] = []


def opened(session: _Session) -> None:
    """An editing session has begun."""
    _open.append(weakref.ref(session, _open.remove))
    for watch in _watches:
        watch.append(session)


def closed(session: _Session) -> None:
    """An editing session has ended."""
    _open[:] = [ref for ref in _open if ref() is not session]


@contextlib.contextmanager
def watching_edits() -> Iterator[EditWatch]:
    """Give the list of sessions that are open now or are opened meanwhile."""
    watch: EditWatch = [session for ref in _open if (session := ref()) is not None]
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches[:] = [one for one in _watches if one is not watch]


def edits_on(watch: EditWatch, modules: Iterable[Any]) -> list[dict[str, Any]]:
    """Describe the edits of those sessions whose model shares a module with these."""
    mine = {id(module) for module in modules if module is not None}
    return [
        described
        for session in watch
        if not mine.isdisjoint(map(id, session.modules()))
        for described in session.describe()
    ]
