"""Finding live objects of a class, which no framework lists."""

from __future__ import annotations

import gc
from itertools import chain
from typing import Any

__all__ = ["instances_of"]


def instances_of(*bases: type) -> list[Any]:
    """List all live objects of these classes and of those derived from them; goes through all objects, so ask rarely.

    The list of all objects is never there while another thread can run: it would hold tuples that other threads are still filling,
    and Python refuses to go on with one that somebody else holds (``SystemError: bad argument to internal function``). Which classes
    there are is found within one call of a function in C, and the objects as what refers to these classes.
    By ``type(one)``: ``isinstance`` would run ``__class__`` properties of foreign proxies.
    """
    derived = set(bases)
    waiting = list(bases)
    while waiting:
        new = [one for one in type.__subclasses__(waiting.pop()) if one not in derived]
        derived.update(new)
        waiting += new
    present = derived.intersection(set(map(type, chain.from_iterable(map(gc.get_objects, (None,))))))
    return [one for one in gc.get_referrers(*present) if type(one) in present] if present else []
