"""What a module does to the alias of its input, done to the input itself."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["hand_back"]

_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]


def hand_back(tensor: torch.Tensor, alias: torch.Tensor, version: int | None) -> str | None:
    """Give ``tensor`` the memory that was put under ``alias``; returns what was done to that and cannot be done to it."""
    if tensor.layout is not torch.strided or _functorch.is_functorch_wrapped_tensor(alias):
        return None
    if type(alias) is not torch.Tensor:
        return None  # a class of its own decides what lies under it
    try:
        moved = alias.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # no memory of its own (fake, meta, a transform's)
        return None
    if moved:
        tensor.data = alias.data
        return None
    if alias.shape != tensor.shape or alias.stride() != tensor.stride():
        if version is not None and alias._version == version:
            tensor.data = alias.data
            return None
        return "changes the shape of its input in place (unsqueeze_, t_, resize_ ...)"
    return None
