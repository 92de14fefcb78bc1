"""Functional calls of MindSpore, seen through its dispatch mode, which is on only while a followed model runs.

The mode is marked experimental by MindSpore, and sees operations below differentiation: their values, never their
gradients. It misses some (see ``MISSES``), and where an operation fails inside it, the process may abort as it ends.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import mindspore
from mindspore.utils.ms_dispatch import MsDispatchMode

from tenterhook.backends import OpListener

__all__ = ["MISSES", "OpMode", "is_builtin_construct"]

MISSES = (
    "functional calls are those that MindSpore's dispatch mode (experimental) shows: kernels by their own names, a compound "
    "function as its parts, no gradients, no indexing, and without pynative_synchronize no cat, zeros and ones"
)

_MINDSPORE = str(Path(mindspore.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent.parent) + os.sep
_INTERNAL = frozenset({"typeof", "make_range", "shape", "rank"})
_MOST_FRAMES = 100


class OpMode(MsDispatchMode):
    """Tells a listener of the operations of one thread."""

    def __init__(self, listener: OpListener) -> None:
        super().__init__()
        self._listener = listener

    def __ms_dispatch__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operation and tell of it."""
        name = _name(func, args)
        begun = None if name in _INTERNAL else self._listener.begins(name, _line_of_user)
        if begun is None:
            return func(*args)
        try:
            result = func(*args)
        except BaseException as error:
            self._listener.ends(begun, None, error)
            raise
        self._listener.ends(begun, _values(result), None)
        return result


def _name(func: Any, args: tuple[Any, ...]) -> str:
    # older operations come as (primitive, name, real arguments)
    name = (
        args[1]
        if len(args) > 1 and isinstance(args[0], mindspore.ops.Primitive) and type(args[1]) is str
        else func.name
    )
    return re.sub(r"(Ext)?(View)?$", "", name).lower() or name


def _values(result: Any) -> Any:
    """Take a result out of differentiation, which has yet to be told of it; the memory is shared."""
    if isinstance(result, mindspore.Tensor):
        return mindspore.Tensor(result.asnumpy())
    if isinstance(result, (tuple, list)):
        return type(result)([_values(part) for part in result])
    return result


def _line_of_user() -> str | None:
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        name = frame.f_code.co_filename
        if not name.startswith((_MINDSPORE, _OURS)):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def is_builtin_construct(cell: mindspore.nn.Cell) -> bool:
    """Whether MindSpore wrote the cell's construct."""
    construct: Any = type(cell).construct
    while hasattr(construct, "__wrapped__"):
        construct = construct.__wrapped__
    code = getattr(construct, "__code__", None)
    return code is not None and code.co_filename.startswith(_MINDSPORE)
