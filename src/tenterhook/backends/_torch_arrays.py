"""Torch tensors from recorded arrays and back; imported when the first is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tenterhook.backends.torch import BACKEND
from tenterhook.errors import UnsupportedError
from tenterhook.recording.converters import Converter

__all__ = ["CONVERTER", "from_numpy"]

_SAME_SIZE = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16)}


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """Give a tensor of an array's numbers, in memory of its own: a recorded array is a view of a file.

    Args:
        array: of NumPy's or ml_dtypes' dtypes.

    Raises:
        UnsupportedError: torch has no such dtype.
    """
    dtype = getattr(torch, array.dtype.name, None)
    copy = array.copy()
    try:
        return torch.from_numpy(copy)
    except TypeError as error:
        if not isinstance(dtype, torch.dtype) or array.itemsize not in _SAME_SIZE:
            raise UnsupportedError(f"torch has no dtype {array.dtype.name}; use .as_numpy()") from error
    plain, carrier = _SAME_SIZE[array.itemsize]
    return torch.from_numpy(copy.view(plain)).to(carrier).view(dtype)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


CONVERTER = Converter(owns=_is_tensor, to_numpy=BACKEND.to_numpy, from_numpy=from_numpy)
"""The bridge between torch and NumPy."""
