"""Tensors that cannot be stored, and the words that their rows have instead."""

from __future__ import annotations

from typing import Any

import numpy as np

from tenterhook.errors import TenterhookError
from tenterhook.recording.files import first_line
from tenterhook.recording.shards import dtype_named

__all__ = ["NOT_KEPT", "not_kept", "plain_array"]

NOT_KEPT = "tensor not kept: "
"""How the note of a value begins, or goes on, whose tensor was asked for and could not be stored."""


def not_kept(tensor: Any, refusal: Exception) -> str:
    """Say why a tensor could not be stored.

    Args:
        tensor: which refused to be copied, or to be turned into an array.
        refusal: what was raised.
    """
    if isinstance(refusal, TenterhookError):
        return f"{NOT_KEPT}{first_line(refusal)}"
    return f"{NOT_KEPT}{type(tensor).__name__} raised {type(refusal).__name__}: {first_line(refusal)}"


def plain_array(array: Any) -> np.ndarray:
    """Give what a framework made of a tensor as an array that can be stored.

    Raises:
        ValueError: it is not of plain numbers.
    """
    array = np.asarray(array)
    dtype_named(array.dtype.name)
    return array
