"""Tensors that refuse what others allow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["RefusesOperations", "fake"]


class RefusesOperations(Tensor):
    """Refuses whatever is done with it, as a class of the user's may."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, tensor: Tensor) -> Any:
        return Tensor._make_subclass(cls, tensor)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise PermissionError("not this one\nnor any other")


def fake() -> Tensor:
    """Make a tensor that has no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(3)
