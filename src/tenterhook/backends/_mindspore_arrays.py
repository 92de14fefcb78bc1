"""MindSpore tensors from recorded arrays and back; imported when the first is asked for."""

from __future__ import annotations

from typing import Any

import mindspore
import ml_dtypes
import numpy as np

from tenterhook.backends.mindspore import BACKEND
from tenterhook.recording.converters import Converter

__all__ = ["CONVERTER", "from_numpy"]


def from_numpy(array: np.ndarray) -> mindspore.Tensor:
    """Give a tensor of an array's numbers, in memory of its own: a recorded array is a view of a file."""
    if array.dtype == ml_dtypes.bfloat16:
        return mindspore.Tensor(array.astype(np.float32)).astype(
            mindspore.bfloat16
        )  # exact: float32 holds every bfloat16
    return mindspore.Tensor(array.copy())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, mindspore.Tensor)


CONVERTER = Converter(owns=_is_tensor, to_numpy=BACKEND.to_numpy, from_numpy=from_numpy)
"""The bridge between MindSpore and NumPy."""
