"""Parts of a nested value that stand in for others for a while, in the caller's own containers."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from typing import Any

from tenterhook._nodes import node_of

__all__ = ["Placed", "place"]

_SETTERS: tuple[Any, ...] = tuple(
    one.__setitem__ for one in (dict, OrderedDict, UserDict, list, UserList, deque)
)  # a class with another one may do whatever it likes when something is put into it


class Placed:
    """A part that stands in a container of the caller's for the part that was there."""

    __slots__ = ("container", "old", "part")

    def __init__(self, container: Any, part: Any, old: Any) -> None:
        self.container = container
        self.part = part
        self.old = old
        _standing.append(self)

    def put_back(self) -> None:
        """Put the old part wherever the new one stands in the container by now."""
        _standing[:] = [one for one in _standing if one is not self]
        for key, part, put in _places(self.container):
            if part is self.part:
                put(key, self.old)
        for one in _standing:
            if one.old is self.part:  # it was put in the place of this one, and stays for longer
                one.old = self.old


_standing: list[Placed] = []


def place(value: Any, parts: dict[str, Any], placed: list[Placed]) -> bool:
    """Put parts into a container itself, by step; what they stand for is added to ``placed``.

    Returns:
        False where that would not do, and nothing was done: the container is not one to be changed in place.
    """
    if not _is_changeable(type(value)):
        return False
    node = node_of(type(value))
    old = {} if node is None else dict(node.flatten(value))
    wanted = [(old[step], part) for step, part in parts.items()]
    for before, part in wanted:
        for key, there, put in _places(value):
            if there is before:
                put(key, part)
        placed.append(Placed(value, part, before))
    return True


def _is_changeable(cls: type) -> bool:
    if hasattr(cls, "__setitem__"):
        return cls.__setitem__ in _SETTERS and not dataclasses.is_dataclass(cls)
    # that of a frozen class is its own
    return cls.__setattr__ in (object.__setattr__, types.SimpleNamespace.__setattr__) and not issubclass(cls, tuple)


def _places(container: Any) -> Iterator[tuple[Any, Any, Callable[[Any, Any], None]]]:
    """Yield each key, what is there, and what puts something else there."""
    if isinstance(container, (dict, UserDict)):
        for key in list(container):
            yield key, container[key], container.__setitem__
    elif hasattr(container, "__setitem__"):
        for index, part in enumerate(list(container)):
            yield index, part, container.__setitem__
    else:
        names = list(getattr(container, "__dict__", ()))
        names += [
            name
            for base in type(container).__mro__
            for name, one in vars(base).items()
            if type(one) is types.MemberDescriptorType and hasattr(container, name)
        ]
        for name in names:
            yield name, getattr(container, name), container.__setattr__
