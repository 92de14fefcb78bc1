"""What of the user's is switched off while code of ours runs, and is on again while a callback of his does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from typing_extensions import Self

__all__ = ["Unseen", "to_user"]


class _Current(threading.local):
    unseen: Unseen | None = None


_current = _Current()


class Unseen:
    """A context in which what is done goes unseen by what the user has put there to look at his program; one for each thread.

    To be derived from, by a class that says what that is.
    """

    __slots__ = ()

    def hide(self) -> None:
        """Switch it off."""
        raise NotImplementedError

    def show(self) -> None:
        """Switch it on, as it was."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.hide()
        _current.unseen = self
        return self

    def __exit__(self, *exception: object) -> None:
        _current.unseen = None
        self.show()


def to_user(fn: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Call a callback of the user's, which is seen."""
    unseen = _current.unseen
    if unseen is None:
        return fn(*arguments, **keywords)
    unseen.__exit__()
    try:
        return fn(*arguments, **keywords)
    finally:
        unseen.__enter__()
