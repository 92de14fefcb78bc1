"""Gradients of parameters that no backward pass has shown: those that an optimizer is given.

In MindSpore the gradients of parameters are what a gradient function returns, and a hook on a parameter sees those of the
passes that run while it is on. Others come from elsewhere (from before the session, another process, compiled code): they
are met where they are used, at the optimizer's call, which is given them in the order of its parameters.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mindspore

from tenterhook.errors import UnsupportedError

__all__ = ["Wanted", "clip_together", "offer", "offer_together"]

_local = threading.local()  # .given: the parameters and gradients of the optimizer whose call begins in this thread
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


def offer_together(optimizer: Any, args: tuple[Any, ...], tell: Callable[[], None]) -> tuple[Any, ...]:
    """Run ``tell`` while an optimizer's gradients can be changed together; returns its arguments, with changed ones in them."""
    parameters = getattr(optimizer, "parameters", ())
    gradients = args[0] if args else ()
    if not isinstance(gradients, (tuple, list)) or len(gradients) != len(parameters):
        tell()
        return args
    outer = getattr(_local, "given", None)
    now = list(gradients)
    _local.given = parameters, now
    try:
        tell()
    finally:
        _local.given = outer
    if all(one is other for one, other in zip(now, gradients, strict=True)):
        return args
    return (type(gradients)(now), *args[1:])


def clip_together(parameters: Sequence[Any], max_norm: float) -> None:
    """Scale the gradients of parameters that an optimizer is being given so that their common norm is at most ``max_norm``.

    Raises:
        UnsupportedError: no optimizer is being called with gradients in the order of its parameters.
    """
    if not parameters:
        return
    given = getattr(_local, "given", None)
    if given is None:
        raise UnsupportedError(
            "clip_norm(together=True) needs the gradients that an optimizer is called with, one for each of its parameters, and "
            "this call has none\n  use mindspore.ops.clip_by_global_norm on what value_and_grad returns"
        )
    chosen = {id(parameter) for parameter in parameters}
    held, gradients = given
    places = [
        place
        for place, parameter in enumerate(held)
        if id(parameter) in chosen and isinstance(gradients[place], mindspore.Tensor)
    ]
    if places:
        clipped = mindspore.ops.clip_by_global_norm(tuple(gradients[place] for place in places), max_norm)
        for place, gradient in zip(places, clipped, strict=True):
            gradients[place] = gradient
