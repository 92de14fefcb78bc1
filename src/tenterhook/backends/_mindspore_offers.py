"""Gradients of parameters that no backward pass has shown: those that an optimizer is given.

In MindSpore the gradients of parameters are what a gradient function returns, and a hook on a parameter sees those of the
passes that run while it is on. Others come from elsewhere (from before the session, another process, compiled code): they
are met where they are used, at the optimizer's call, which is given them in the order of its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import mindspore

__all__ = ["Wanted", "offer"]

_wanted: dict[int, list[Wanted]] = {}  # by the identity of the parameter


class Wanted:
    """A callback that wants the gradient of a parameter, wherever it shows first.

    Args:
        parameter: the parameter.
        fn: gets the gradient; returns None, or another one in its place.
        edits: runs before those that do not.
    """

    __slots__ = ("__weakref__", "_ref", "edits", "fn", "shown")

    def __init__(self, parameter: mindspore.Parameter, fn: Callable[[Any], Any], *, edits: bool) -> None:
        self.fn = fn
        self.edits = edits
        self.shown = False  # by a backward pass, since the optimizer was called last
        self._ref = weakref.ref(parameter)
        others = _wanted.setdefault(id(parameter), [])
        others.insert(sum(other.edits for other in others) if edits else len(others), self)

    def __call__(self, gradient: Any) -> Any:
        """Take the gradient from a backward pass."""
        self.shown = True
        return self.fn(gradient)

    def wants(self, parameter: Any) -> bool:
        """Whether it is this parameter's."""
        return self._ref() is parameter

    def remove(self) -> None:
        """Want it no more. A second call does nothing."""
        for key, those in list(_wanted.items()):
            if self in those:
                those.remove(self)
                if not those:
                    del _wanted[key]


def offer(optimizer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Show an optimizer's gradients to those who have not seen them; returns its arguments, with replaced ones in them."""
    parameters = getattr(optimizer, "parameters", ())
    gradients = args[0] if args else ()
    if not _wanted or not isinstance(gradients, (tuple, list)) or len(gradients) != len(parameters):
        return args
    replaced = {}
    for place, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        for one in list(_wanted.get(id(parameter), ())):
            if one.wants(parameter) and not one.shown and isinstance(gradient, mindspore.Tensor):
                new = one.fn(replaced.get(place, gradient))
                if new is not None:
                    replaced[place] = new
            one.shown = False
    if not replaced:
        return args
    kept = type(gradients)(replaced.get(place, gradient) for place, gradient in enumerate(gradients))
    return (kept, *args[1:])
