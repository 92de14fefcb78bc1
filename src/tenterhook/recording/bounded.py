"""A queue that is bounded by bytes: whoever puts waits, so a slow disk slows the run and memory stays flat."""

from __future__ import annotations

import time
from collections import deque
from threading import Condition
from typing import Generic, TypeVar

__all__ = ["BoundedQueue"]

T = TypeVar("T")


class BoundedQueue(Generic[T]):
    """Items with their sizes, from many threads to one.

    An item counts until `release` says that it is dealt with. One that is larger than the limit passes when it is
    alone. Whoever takes is woken for an item that is the first, that hurries, or with which `enough` bytes are there: each
    waking takes the interpreter from the thread that puts.

    Attributes:
        waited: seconds that putting had to wait, in all.
    """

    def __init__(self, limit: int, enough: int = 1) -> None:
        self.waited = 0.0
        self._limit = limit
        self._enough = enough
        self._come = 0  # size of the items that nobody has taken
        self._called = False  # whoever takes is to be woken
        self._idle = False  # whoever takes waits without end
        self._items: deque[T] = deque()
        self._held = 0
        self._closed = False
        self._changed = Condition()

    @property
    def held(self) -> int:
        """Size of all items that are not released yet."""
        return self._held

    def put(self, item: T, size: int, *, hurries: bool = True) -> bool:
        """Add an item, waiting for room. Gives False when the queue was shut in the meantime.

        Args:
            item: what is put.
            size: bytes that it takes.
            hurries: whether it is to be taken now; else when there is enough, or when the time of who takes is over.
        """
        with self._changed:
            if self._held and self._held + size > self._limit and not self._closed:
                self._call()
                start = time.perf_counter()
                self._changed.wait_for(lambda: self._closed or not self._held or self._held + size <= self._limit)
                self.waited += time.perf_counter() - start
            if self._closed:
                return False
            self._held += size
            self._come += size
            self._items.append(item)
            if hurries or self._idle or self._come >= self._enough:
                self._call()
            return True

    def _call(self) -> None:
        self._called = True
        self._changed.notify_all()

    def take(self, timeout: float | None) -> list[T]:
        """Give all items there are, waiting up to `timeout` seconds to be called; perhaps none when the time is over."""
        with self._changed:
            self._idle = timeout is None
            self._changed.wait_for(lambda: self._called or self._closed or (self._idle and self._items), timeout)
            self._idle = self._called = False
            self._come = 0
            items = list(self._items)
            self._items.clear()
            return items

    def release(self, size: int) -> None:
        """Say that items of this size are dealt with."""
        with self._changed:
            self._held -= size
            self._changed.notify_all()

    def shut(self) -> list[T]:
        """Take nothing more; wake all who wait. Gives what was still in it."""
        with self._changed:
            self._closed = True
            items = list(self._items)
            self._items.clear()
            self._changed.notify_all()
            return items
