"""Backward passes that are under way."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["RunningPass"]

CallT = TypeVar("CallT")


class RunningPass(Generic[CallT]):
    """A backward pass that is running, and the calls in it of which something is still to come.

    To be held by the framework until the pass ends, so that one that fails is forgotten, too.
    """

    __slots__ = ("__weakref__", "calls")

    def __init__(self) -> None:
        self.calls: list[CallT] = []
