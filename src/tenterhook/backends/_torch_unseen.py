"""Modes of the user's that look at all that torch does (``TorchFunctionMode``, ``TorchDispatchMode``): what we do goes past them.

Modes that torch itself runs for its tracers are left on, so that these know of the tensors that we make.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from tenterhook.backends._unseen import Unseen

__all__ = ["call_unseen", "hiding", "unseen"]

_C: Any = torch._C
_functions: Callable[[], int] = _C._len_torch_function_stack
_dispatchers: Callable[[], int] = _C._len_torch_dispatch_stack

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def unseen() -> Unseen | None:
    """Return a context in which no mode of the user's is on; None where none is anyway."""
    return _WithoutModes() if _functions() or _dispatchers() else None


def hiding(fn: FunctionT) -> FunctionT:
    """Have what a function does go past the modes that are on."""

    @functools.wraps(fn)
    def hidden(*args: Any, **kwargs: Any) -> Any:
        return call_unseen(fn, *args, **kwargs)

    return cast("FunctionT", hidden)


def call_unseen(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function so that what it does goes past the modes that are on."""
    without = unseen()
    if without is None:
        return fn(*args, **kwargs)
    with without:
        return fn(*args, **kwargs)


class _WithoutModes(Unseen):
    __slots__ = ("_off",)

    def __init__(self) -> None:
        self._off: list[tuple[Callable[[Any], None], Any]] = []

    def hide(self) -> None:
        while _functions():
            self._off.append((_C._push_on_torch_function_stack, _C._pop_torch_function_stack()))
        while count := _dispatchers():
            if getattr(_C._get_dispatch_stack_at(count - 1), "_mode_key", None) is not None:
                break  # torch's own, which lie below all others
            self._off.append((_C._push_on_torch_dispatch_stack, _C._pop_torch_dispatch_stack(None)))

    def show(self) -> None:
        while self._off:
            push, mode = self._off.pop()
            push(mode)
