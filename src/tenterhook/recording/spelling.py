"""How the numbers of steps and calls are listed in messages."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from itertools import pairwise

__all__ = ["spelled"]

_LISTED = 6


def spelled(numbers: Iterable[int], near: int) -> str:
    """List numbers in few words, and none that is not among them.

    Args:
        numbers: at least one, in any order.
        near: what was asked for; of many without a pattern, the nearest are named.

    Returns:
        `3`, `0 to 500`, `0, 3, 4`, `0, 100, ..., 900`, or `57 from 0 to 900 (the nearest: 5, 9)`.
    """
    found = sorted(set(numbers))
    strides = {after - before for before, after in pairwise(found)}
    if len(found) > 2 and strides == {1}:
        return f"{found[0]} to {found[-1]}"
    if len(found) <= _LISTED:
        return ", ".join(map(str, found))
    if len(strides) == 1:
        return f"{found[0]}, {found[1]}, ..., {found[-1]}"
    place = bisect.bisect_left(found, near)
    nearest = ", ".join(map(str, found[max(0, place - 1) : place + 1]))
    return f"{len(found):,} from {found[0]} to {found[-1]} (the nearest: {nearest})"
