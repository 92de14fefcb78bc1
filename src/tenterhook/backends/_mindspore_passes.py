"""Backward passes of MindSpore: which one runs in this thread, and what waits for its end."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable

from tenterhook.backends._mindspore_checkpoint import begin_rerun, forget_regions

__all__ = ["Pass", "after_pass", "begin_pass", "end_pass", "in_pass", "run_after_pass", "running_pass"]


class Pass:
    """One running backward pass."""

    __slots__ = ("_rerun", "at_end", "recomputing", "token")

    _tokens = itertools.count()

    def __init__(self) -> None:
        self.token = next(self._tokens)
        # Whether a checkpointed region is being run again, with a pass of its own that is part of this one
        self.recomputing = False
        self.at_end: list[Callable[[], None]] = []
        self._rerun: contextlib.ExitStack | None = None

    def begin_rerun(self) -> None:
        """A checkpointed region begins to run again."""
        self.end_rerun()
        self._rerun = begin_rerun()

    def end_rerun(self) -> None:
        """Its forward is over."""
        if self._rerun is not None:
            rerun, self._rerun = self._rerun, None
            rerun.close()


_passes: dict[int, list[Pass]] = {}  # thread -> passes that are running in it, the innermost last
_waiting: list[Callable[[], None]] = []


def running_pass() -> Pass | None:
    """Return the backward pass that this code runs in."""
    running = _passes.get(threading.get_ident())
    return running[-1] if running else None


def in_pass() -> bool:
    """Whether this code runs in a backward pass."""
    return threading.get_ident() in _passes


def begin_pass() -> Pass:
    """A backward pass begins in this thread."""
    this = Pass()
    _passes.setdefault(threading.get_ident(), []).append(this)
    return this


def end_pass() -> None:
    """The innermost backward pass of this thread has ended, or has failed."""
    thread = threading.get_ident()
    running = _passes[thread]
    try:
        running.pop().end_rerun()
    finally:
        if not running:
            del _passes[thread]
            forget_regions()
            run_after_pass()


def after_pass(fn: Callable[[], None]) -> None:
    """Call ``fn`` once this thread is out of all backward passes."""
    _waiting.append(fn)


def run_after_pass() -> None:
    """Do what has waited for the end of a backward pass."""
    while _waiting:
        _waiting.pop()()
