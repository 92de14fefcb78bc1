"""What is to be around the second run of a checkpointed region; the same for every framework."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

__all__ = ["AroundT", "Reruns"]

AroundT = TypeVar("AroundT", bound=Callable[[], AbstractContextManager[object]])


class Reruns:
    """One run of a region, and what was asked for its second one; a :class:`tenterhook.backends.Region`."""

    def __init__(self) -> None:
        self._around: dict[object, tuple[Any, Any]] = {}

    def on_rerun(self, key: object, around: AroundT, attachment: Any = None) -> AroundT:
        """Have it run inside ``around()`` whenever it is run again; a key's first registration holds and is returned."""
        return self._around.setdefault(key, (around, attachment))[0]

    def __contains__(self, key: object) -> bool:
        return key in self._around

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Return the context in which it is to run again."""
        with contextlib.ExitStack() as stack:
            # What was taken off last is put back first: so each finds the neighbours that it had.
            for around, attachment in sorted(
                self._around.values(), key=lambda one: -one[1].removed if one[1] is not None else 0
            ):
                if attachment is not None:
                    stack.enter_context(attachment.in_place())
                stack.enter_context(around())
            yield
