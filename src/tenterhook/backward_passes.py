"""Backward passes that are under way, the outermost of each thread among them.

Checkpointing with reentry differentiates each region in a pass of its own, inside of the pass that its user began. What
belongs to the latter, such as the gradient of a parameter that several regions share, comes in parts then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from tenterhook.backends import Backend

__all__ = ["OutermostPass", "OutermostPasses", "RunningPass"]

CallT = TypeVar("CallT")


class RunningPass(Generic[CallT]):
    """A backward pass that is running, and the calls in it of which something is still to come.

    To be held by the framework until the pass ends, so that one that fails is forgotten, too.
    """

    __slots__ = ("__weakref__", "calls")

    def __init__(self) -> None:
        self.calls: list[CallT] = []


class OutermostPass:
    """One backward pass, with those that run inside of it."""

    __slots__ = ("at_end", "sums")

    def __init__(self) -> None:
        self.at_end: list[Callable[[], None]] = []
        self.sums: dict[object, Any] = {}  # what comes in parts, by whatever key


class OutermostPasses:
    """The outermost passes of all threads, known from the first time on that one is asked for."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.running: dict[int, OutermostPass] = {}

    def current(self) -> OutermostPass | None:
        """Return that of this thread, None where the framework does not tell when it ends.

        To be asked for in a backward pass, first before any other begins inside of it.
        """
        thread = threading.get_ident()
        running = self.running.get(thread)
        if running is None and self._backend.at_backward_end(partial(self._end, thread)):
            running = self.running[thread] = OutermostPass()
        return running

    def forward_begins(self, thread: int) -> None:
        """A forward call outside of backward passes: one that is still open has failed."""
        if self.running and not self._backend.in_backward():
            failed = self.running.pop(thread, None)
            if failed is not None:
                failed.at_end.clear()  # what waits there refers to the pass

    def _end(self, thread: int) -> None:
        ended = self.running.pop(thread, None)
        if ended is not None:
            callbacks, ended.at_end = ended.at_end, []
            for callback in callbacks:
                callback()
