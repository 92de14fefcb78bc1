"""`th.HookPoint`: hook points for anybody's own code."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from typing import Any

import pytest

import tenterhook as th
from tenterhook.errors import HookError


def test_callbacks_run_in_order_and_prepend_comes_first() -> None:
    point, order = th.HookPoint("after_batch"), []
    for name in "bc":
        point.register(lambda value, name=name: order.append(name))
    point.register(lambda value: order.append("a"), prepend=True)
    assert point(1) == 1
    assert order == ["a", "b", "c"]
    assert len(point) == 3


def test_a_value_goes_through_the_chain_and_the_other_arguments_stay() -> None:
    point = th.HookPoint("loss")
    point.register(lambda value, step: value + step)
    point.register(lambda value, step: None)
    point.register(lambda value, step: value * 10)
    assert point(1, 2) == 30
    assert point(1, step=4) == 50


def test_a_point_without_callbacks_or_arguments() -> None:
    point = th.HookPoint("tick")
    assert (point(), point("value"), bool(point), len(point)) == (None, "value", True, 0)
    handle = point.register(lambda: None)
    assert point() is None
    assert handle.fired == 1


def test_a_value_with_nothing_to_replace_is_refused() -> None:
    point = th.HookPoint("tick")
    point.register(lambda: 3)
    with pytest.raises(HookError, match=r"'tick'.*no argument"):
        point()


def test_falsy_values_replace() -> None:
    point = th.HookPoint("value")
    point.register(lambda value: 0)
    assert point(5) == 0


def test_removal_takes_effect_at_once_and_additions_from_the_next_call() -> None:
    point, ran = th.HookPoint("p"), []
    handles: dict[str, Any] = {}

    def first(value: int) -> None:
        ran.append("first")
        handles["second"].remove()
        handles["first"].remove()
        handles["late"] = point.register(lambda value: ran.append("late"))

    handles["first"] = point.register(first)
    handles["second"] = point.register(lambda value: ran.append("second"))
    point(1)
    assert ran == ["first"]
    point(1)
    assert ran == ["first", "late"]
    assert [handles[name].live for name in ("first", "second", "late")] == [False, False, True]


def test_an_error_names_point_and_callback_and_ends_the_call() -> None:
    point, ran = th.HookPoint("after_batch"), []

    def broken(value: int) -> None:
        raise KeyError("mine")

    handle = point.register(broken)
    point.register(ran.append)
    with pytest.raises(KeyError, match="mine") as caught:
        point(1)
    assert ran == []
    if sys.version_info >= (3, 11):
        (note,) = caught.value.__notes__
        assert "broken" in note
        assert "after_batch" in note
    handle.remove()
    assert point(2) == 2
    assert ran == [2]


def test_a_callback_that_calls_the_point_is_not_called_for_that() -> None:
    point, ran = th.HookPoint("p"), []

    def again(value: int) -> None:
        ran.append(("again", value))
        if value < 3:
            point(value + 1)

    point.register(again)
    point.register(lambda value: ran.append(("other", value)))
    point(1)
    assert ran == [("again", 1), ("other", 2), ("other", 1)]


def test_handles_are_context_managers_and_count() -> None:
    point = th.HookPoint("p")
    with point.register(lambda value: None) as handle:
        point(1)
        point(2)
        assert handle.live
    point(3)
    assert (handle.fired, handle.live, len(point)) == (2, False, 0)
    handle.remove()


@pytest.mark.parametrize("fn", [3, None, "name"])
def test_what_is_no_function_is_refused(fn: Any) -> None:
    with pytest.raises(HookError, match="hook point 'p'"):
        th.HookPoint("p").register(fn)


def test_declared_arguments_are_checked_at_registration() -> None:
    point = th.HookPoint("p", arguments=("loss", "batch"))
    with pytest.raises(HookError, match="loss, batch"):
        point.register(lambda loss: None)
    point.register(lambda loss, batch: loss + 1)
    assert point(1, None) == 2


def test_copies_and_pickles_have_no_callbacks() -> None:
    point = th.HookPoint("p", arguments=("value",))
    handle = point.register(lambda value: None)
    for other in (copy.deepcopy(point), copy.copy(point), pickle.loads(pickle.dumps(point))):
        assert (other.name, other.arguments, len(other)) == ("p", ("value",), 0)
        assert other(1) == 1
    assert handle.fired == 0


def test_a_handle_does_not_keep_the_point() -> None:
    point = th.HookPoint("p")
    handle = point.register(lambda value: None)
    reference = weakref.ref(point)
    gc.disable()
    try:
        del point
        assert reference() is None
    finally:
        gc.enable()
    assert not handle.live
    handle.remove()


def test_threads_call_register_and_remove_at_once() -> None:
    point = th.HookPoint("p")
    steady = point.register(lambda value: value + 1)
    wrong: list[Any] = []

    def work() -> None:
        for number in range(300):
            with point.register(lambda value: None):
                if point(number) != number + 1:
                    wrong.append(number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert steady.fired == 1200
    assert len(point) == 1
