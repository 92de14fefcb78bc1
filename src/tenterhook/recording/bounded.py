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
    alone.

    Attributes:
        waited: seconds that putting had to wait, in all.
    """

    def __init__(self, limit: int) -> None:
        self.waited = 0.0
        self._limit = limit
        self._items: deque[T] = deque()
        self._held = 0
        self._closed = False
        self._changed = Condition()

    @property
    def held(self) -> int:
        """Size of all items that are not released yet."""
        return self._held

    def put(self, item: T, size: int) -> bool:
        """Add an item, waiting for room. Gives False when the queue was shut in the meantime."""
        with self._changed:
            if self._held and self._held + size > self._limit and not self._closed:
                start = time.perf_counter()
                self._changed.wait_for(lambda: self._closed or not self._held or self._held + size <= self._limit)
                self.waited += time.perf_counter() - start
            if self._closed:
                return False
            self._held += size
            self._items.append(item)
            self._changed.notify_all()
            return True

    def take(self, timeout: float | None) -> list[T]:
        """Give all items there are, waiting up to `timeout` seconds for one; none at all when the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed, timeout)
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
