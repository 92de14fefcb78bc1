"""Switches of a process that sessions share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tenterhook._fork_locks import ForkLock

__all__ = ["Switch"]


class Switch:
    """A switch of the process that several sessions hold at a time, closed in any order: the last one sets it back."""

    def __init__(self, set_off: Callable[[], Callable[[], None] | None]) -> None:
        self._set_off = set_off
        self._set_back: Callable[[], None] | None = None
        self._holders = 0
        self._lock = ForkLock()

    def hold(self, stack: contextlib.ExitStack) -> bool:
        """Switch off until ``stack`` is closed; False where it was off already, by somebody else's hand."""
        with self._lock:
            if not self._holders:
                self._set_back = self._set_off()
            self._holders += 1
            stack.callback(self._release)
            return self._set_back is not None

    def _release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders and self._set_back is not None:
                set_back, self._set_back = self._set_back, None
                set_back()
