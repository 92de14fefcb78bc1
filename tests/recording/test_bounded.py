"""The queue between a run and the thread that writes: whom it wakes, and when whoever puts has to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tenterhook.recording.bounded import BoundedQueue

LONG = 60.0  # seconds that no test here waits for
MOMENT = 0.2


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def started(pool: ThreadPoolExecutor, work: Callable[..., object], *arguments: object) -> Future[object]:
    """Begin work in another thread, and see to it that it waits."""
    running = threading.Event()

    def begin() -> object:
        running.set()
        return work(*arguments)

    future = pool.submit(begin)
    running.wait()
    with pytest.raises(TimeoutError):
        future.result(MOMENT)
    return future


def test_who_waits_without_end_is_woken_by_the_first_item(elsewhere: ThreadPoolExecutor) -> None:
    queue: BoundedQueue[str] = BoundedQueue(1000, enough=100)
    taken = started(elsewhere, queue.take, None)
    queue.put("a", 1, hurries=False)
    assert taken.result(LONG) == ["a"]


def test_who_waits_without_end_takes_at_once_what_came_before(elsewhere: ThreadPoolExecutor) -> None:
    queue: BoundedQueue[str] = BoundedQueue(1000, enough=100)
    queue.put("a", 1, hurries=False)
    assert elsewhere.submit(queue.take, None).result(LONG) == ["a"]


@pytest.mark.parametrize("sizes", [[99, 1], [100], [1, 1, 98], [500]])
def test_small_items_wait_until_there_is_enough(elsewhere: ThreadPoolExecutor, sizes: list[int]) -> None:
    queue: BoundedQueue[int] = BoundedQueue(1000, enough=100)
    taken = started(elsewhere, queue.take, LONG)
    for size in sizes[:-1]:
        queue.put(size, size, hurries=False)
    with pytest.raises(TimeoutError):
        taken.result(MOMENT)
    queue.put(sizes[-1], sizes[-1], hurries=False)
    assert taken.result(LONG) == sizes


def test_small_items_wait_until_the_time_is_over(elsewhere: ThreadPoolExecutor) -> None:
    queue: BoundedQueue[str] = BoundedQueue(1000, enough=100)
    taken = started(elsewhere, queue.take, 4 * MOMENT)
    queue.put("a", 1, hurries=False)
    assert taken.result(LONG) == ["a"]


def test_an_item_that_hurries_brings_those_before_it(elsewhere: ThreadPoolExecutor) -> None:
    queue: BoundedQueue[str] = BoundedQueue(1000, enough=100)
    taken = started(elsewhere, queue.take, LONG)
    queue.put("a", 1, hurries=False)
    queue.put("b", 0)
    assert taken.result(LONG) == ["a", "b"]


def test_what_has_been_taken_counts_no_more_towards_enough(elsewhere: ThreadPoolExecutor) -> None:
    queue: BoundedQueue[str] = BoundedQueue(1000, enough=100)
    queue.put("a", 99, hurries=False)
    assert queue.take(0) == ["a"]
    taken = started(elsewhere, queue.take, LONG)
    queue.put("b", 1, hurries=False)
    with pytest.raises(TimeoutError):
        taken.result(MOMENT)
    queue.put("c", 99, hurries=False)
    assert taken.result(LONG) == ["b", "c"]


def test_who_has_no_room_to_put_wakes_who_takes(elsewhere: ThreadPoolExecutor) -> None:
    queue: BoundedQueue[str] = BoundedQueue(10, enough=100)
    taken = started(elsewhere, queue.take, LONG)
    queue.put("a", 6, hurries=False)
    put = started(elsewhere, lambda: queue.put("b", 6, hurries=False))
    assert taken.result(LONG) == ["a"]
    queue.release(6)
    assert put.result(LONG) is True
    assert queue.waited > 0
    assert queue.held == 6


def test_shutting_wakes_both_ends_and_gives_what_was_left(elsewhere: ThreadPoolExecutor) -> None:
    queue: BoundedQueue[str] = BoundedQueue(10, enough=100)
    queue.put("a", 6, hurries=False)
    put = started(elsewhere, lambda: queue.put("b", 6, hurries=False))
    assert queue.shut() == ["a"]
    assert put.result(LONG) is False
    assert queue.take(None) == []
    assert queue.put("c", 1) is False
