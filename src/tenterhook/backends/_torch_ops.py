"""Functional calls of torch, seen through a function mode that is on only while a followed model runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from tenterhook.backends import OpListener, to_user
from tenterhook.backends._torch_unseen import hiding
from tenterhook.backends._user_code import folder_of, line_of_user

__all__ = ["OpMode", "is_builtin_forward"]

_C: Any = torch._C
_TORCH = folder_of(torch)
_line_of_user = partial(line_of_user, _TORCH)
_OURS = str(Path(__file__).parents[1]) + os.sep
# of attributes, and what the native path of another session asks: neither gives a tensor
_ATTRIBUTES = frozenset({"__get__", "__set__", "__delete__", "is_neg"})


class OpMode(TorchFunctionMode):
    """Tells a listener of the functional calls of one thread.

    Attributes of tensors (``x.T``, ``x.shape``) are no calls, and what torch itself calls of its private functions
    (``_make_dual``) is left out; ``torch.sparse.mm`` is such a function, called by the user.
    """

    def __init__(self, listener: OpListener) -> None:
        super().__init__()
        self._listener = listener

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and tell of it; torch has taken this mode off meanwhile."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "") or type(func).__name__
        plain = _plain(name)
        caller = sys._getframe(1).f_code.co_filename
        private = plain[0] == "_" and caller.startswith(_TORCH)
        if private or name in _ATTRIBUTES or caller.startswith(_OURS):  # the last: another session measures
            return func(*args, **kwargs)
        begun = hiding(self._listener.begins)(plain.lstrip("_") or plain, _line_of_user)
        if begun is None:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            hiding(self._listener.ends)(begun, None, error)
            raise
        hiding(self._listener.ends)(begun, args[0] if name == "__setitem__" else result, None)
        return result

    def gives(self, value: Any) -> None:
        """Nothing is left to do: a function's own result is what is differentiated."""

    def __enter__(self) -> Self:
        """Put this mode on top of those of the user's, which are off while code of ours runs."""
        return to_user(super().__enter__, (), {})

    def __exit__(self, *exception: object) -> None:
        """Take this mode off the stack, and only this one."""
        to_user(self._leave, (), {})

    def _leave(self) -> None:
        above = []
        while _C._len_torch_function_stack():
            mode = _C._pop_torch_function_stack()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            _C._push_on_torch_function_stack(mode)


def _plain(name: str) -> str:
    """Take an operator's underscores (``__add__``) and an overload (``add.Tensor``) off; ``add_`` works in place and stays."""
    name = name.partition(".")[0]
    return name[2:-2] if len(name) > 4 and name[:2] == name[-2:] == "__" else name


def is_builtin_forward(module: nn.Module) -> bool:
    code: Any = getattr(_innermost(type(module).forward), "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCH)


def _innermost(function: Callable[..., Any]) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function
