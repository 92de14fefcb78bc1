"""Minus infinities that are meant: the masks of attention and of sampling, told apart from numbers that went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["SIGNS", "Signs", "is_handed_on", "is_meant", "signs_of"]

_PUT = frozenset({
    "fill", "fill_", "fill_diagonal_", "full", "full_like", "index_fill", "index_fill_", "index_put", "index_put_",
    "masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_", "new_full", "new_tensor", "select_scatter",
    "setitem", "tensor", "tensor_setitem", "where",
})  # fmt: skip
"""Functions that put numbers where they are told to: they compute none."""

_HAND_ON = frozenset({
    "add", "add_", "addmm", "amax", "amin", "baddbmm", "broadcast_to", "bfloat16", "cat", "chunk", "clone", "concat",
    "contiguous", "cast", "copy_", "cpu", "cuda", "cummax", "detach", "diagonal", "double", "expand", "expand_as", "flatten",
    "float", "gather", "getitem", "half", "iadd", "index_select", "log_softmax", "masked_select", "max", "maximum", "min",
    "minimum", "movedim", "mul", "mul_", "narrow", "permute", "radd", "repeat", "reshape", "rmul", "rsub", "select", "sort",
    "split", "squeeze", "stack", "sub", "sub_", "swapaxes", "t", "tile", "to", "topk", "transpose", "tril", "tril_", "triu",
    "triu_", "type", "type_as", "unbind", "unflatten", "unsqueeze", "view",
})  # fmt: skip
"""Functions whose result holds -inf where an argument does, and of finite arguments only where it overflows."""

_NEAR_OVERFLOW = 1e4
"""Where a float16 has overflowed below -65504, others of its tensor are large, too."""

SIGNS = f"""
    nan_count > 0 or posinf_count > 0 as born,
    coalesce(absmax = 0 and zero_count > 0, false) as zeros,
    coalesce(absmax, 0) < {_NEAR_OVERFLOW} as small
"""
"""The fields of `Signs` as columns of a query over `values`."""


class Signs(NamedTuple):
    """What is asked of a value that is not finite.

    Attributes:
        born: whether it has a NaN or +inf.
        zeros: whether its finite numbers are zeros.
        small: whether they are far from what makes a float overflow.
    """

    born: bool
    zeros: bool
    small: bool


def signs_of(statistics: Mapping[str, Any]) -> Signs:
    """Read the signs of a value from its statistics."""
    largest = statistics.get("absmax")
    return Signs(
        born=bool(statistics.get("nan_count") or statistics.get("posinf_count")),
        zeros=largest == 0 and bool(statistics.get("zero_count")),
        small=(largest or 0) < _NEAR_OVERFLOW,
    )


def is_meant(kind: str, slot: str, op: str, signs: Signs) -> bool:
    """Tell whether the -inf of a value that is not finite are meant.

    A value with a NaN or with +inf is never meant. Of those with -inf alone these are: what is zero everywhere else, as masks
    that are added are; what a function gives that puts numbers where it is told to (``masked_fill``, ``where``) or hands on those
    that it is given (``triu``, ``add``), unless its finite numbers are so large that it may have overflowed; and an
    input that is called a mask. A gradient never is, nor what a module computes.

    Args:
        kind: the kind of the value.
        slot: where in a nested value it is.
        op: the function that gave it; empty for a module.
        signs: those of the value.
    """
    if kind not in ("input", "output") or signs.born:
        return False
    if kind == "input":
        return signs.zeros or "mask" in slot.lower()
    return signs.zeros or op in _PUT or (op in _HAND_ON and signs.small)


def is_handed_on(op: str, signs: Signs) -> bool:
    """Tell whether -inf that are meant are so only if an argument of the function was a mask."""
    return op in _HAND_ON and not signs.zeros
