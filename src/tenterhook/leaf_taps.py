"""Taps on gradients of leaves, which no graph takes with it: those of calls that can still be differentiated stay on."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from tenterhook.backends import Detachable
from tenterhook.errors import TenterhookWarning

__all__ = ["LeafTaps"]

_MOST = 32  # of one place; calls beyond them are taken to be without a backward pass, as in an evaluation


class LeafTaps:
    """The taps that one session or hook has put on leaves.

    An output that is a leaf, a parameter or the input itself, says nothing of the graph that its call belongs to. So the taps of
    all calls since the last backward pass stay: a gradient of the leaf is that of each of them. A call after it begins anew.

    Args:
        tell: is told in a sentence where a backward pass has come and calls had been let go of before it.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self._places: dict[tuple[int, Hashable], _Place] = {}
        self._tell = _warn if tell is None else tell

    def has(self, leaf: Any, place: Hashable) -> bool:
        """Whether there is a tap on ``leaf``, put on for a place."""
        return (id(leaf), place) in self._places

    def keep(self, leaf: Any, place: Hashable, tap: Detachable, turn: int) -> None:
        """Keep a tap.

        Args:
            leaf: the tensor.
            place: which of its uses: module and slot.
            tap: the new tap.
            turn: number of backward passes so far.
        """
        key = (id(leaf), place)
        known = self._places.get(key)
        if known is None or known.turn != turn:
            if known is not None:
                self._tell_of(known)
                known.remove()
            known = self._places[key] = _Place(weakref.ref(leaf, partial(_gone, weakref.ref(self), key)), turn)
        if len(known.taps) >= _MOST:
            known.taps.pop(0).remove()
            known.let_go += 1
        known.taps.append(tap)

    def remove(self, turn: int | None = None) -> None:
        """Take all of them off; after so many backward passes, where that is known."""
        places, self._places = self._places, {}
        for place in places.values():
            if turn is not None and place.turn != turn:
                self._tell_of(place)
            place.remove()

    def _tell_of(self, place: _Place) -> None:
        if place.let_go:
            self._tell(
                f"one module gave the same leaf (a parameter, or its own input) in {place.let_go + _MOST} calls before a backward "
                f"pass: its gradient was taken for that of the last {_MOST}"
            )

    def forget(self, key: tuple[int, Hashable]) -> None:
        """A leaf is gone, and another may get its number."""
        place = self._places.pop(key, None)
        if place is not None:
            place.remove()


class _Place:
    """The taps at one place, of one turn."""

    __slots__ = ("_leaf", "let_go", "taps", "turn")

    def __init__(self, leaf: weakref.ref[Any], turn: int) -> None:
        self._leaf = leaf  # kept for what it calls at the end
        self.turn = turn
        self.let_go = 0
        self.taps: list[Detachable] = []

    def remove(self) -> None:
        taps, self.taps = self.taps, []
        for tap in taps:
            tap.remove()


def _warn(words: str) -> None:
    warnings.warn(words, TenterhookWarning, stacklevel=2)


def _gone(owner: weakref.ref[LeafTaps], key: tuple[int, Hashable], leaf: object) -> None:
    taps = owner()
    if taps is not None:
        taps.forget(key)
