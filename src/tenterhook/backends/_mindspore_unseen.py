"""Operations of ours on MindSpore tensors, kept from graphs and from the dispatch modes that watch the user's.

MindSpore can switch its dispatch modes off for newer kernels only: older ones go to the modes in every case. A mode of ours lets
them pass. One of the user's cannot be told to, so where there is one (:func:`may_compute`), we compute nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from mindspore._c_expression import _DisableMsDispatchMode, _DispatchGuardStack
from mindspore.graph.api import _no_grad

__all__ = ["aside", "is_unseen", "may_compute", "ours", "unseen"]

_T = TypeVar("_T")


class _Thread(threading.local):
    depth = 0  # how often unseen() is entered
    modes = 0  # how many dispatch modes of ours are on


_here = _Thread()


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Keep operations of ours from graphs and from the modes that watch the user's operations."""
    _here.depth += 1
    try:
        with _DisableMsDispatchMode(), _no_grad():
            yield
    finally:
        _here.depth -= 1


def is_unseen() -> bool:
    """Whether what runs now in this thread is ours, and to be told to nobody."""
    return _here.depth > 0


def ours(change: int) -> None:
    """Note that a dispatch mode of ours has been entered (1) or left (-1)."""
    _here.modes += change


def may_compute() -> bool:
    """Whether nobody would see operations of ours: every dispatch mode of this thread is one of ours."""
    return _DispatchGuardStack.depth() <= _here.modes


def aside(fn: Callable[[], _T]) -> _T:
    """Call a function where no dispatch mode is on; an operation that fails within one ends the process at its exit."""
    if not _DispatchGuardStack.has_dispatch_guard():
        return fn()
    found: list[_T] = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join()
    return found[0]
