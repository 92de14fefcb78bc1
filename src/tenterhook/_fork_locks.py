"""A lock that a forked child can use: a thread of the parent may have held it, and does not exist in the child."""

from __future__ import annotations

import os
import threading
import weakref

from typing_extensions import Self

__all__ = ["ForkLock"]


class ForkLock:
    """A reentrant lock, free in a forked child unless the thread that forked holds it itself.

    What another thread was amid of when the process forked stays as it was in the child, so this is for changes that are over with
    one assignment, or whose halves do no harm.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Go on in a child of the process."""
        if self._lock.acquire(blocking=False):  # free, or this thread's own
            self._lock.release()
        else:
            self._lock = threading.RLock()


_all: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _forked() -> None:
    for lock in list(_all):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
