"""Distributed tensors: which part of the whole this process holds.

DTensors are known by their class's name, so that ``torch.distributed.tensor`` is not imported for programs without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

__all__ = [
    "is_dtensor",
    "local_part",
    "process",
    "replicated",
    "shard_like",
    "shard_note",
    "shard_offset",
    "sharded_parameters",
    "sketch_offset",
]


def process() -> tuple[int, int] | None:
    """Return rank and world size of this process; None where no process group is initialised."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def sharded_parameters(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Return, by the id of the whole one that stands in a module now, the shards that FSDP2 puts back there after its use."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        if not hasattr(type(module), "_get_fsdp_state"):  # of the class: asking a module for what it has not takes long
            continue
        get_state: Any = module._get_fsdp_state
        state = get_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for parameter in (one for group in groups if group is not None for one in group.fsdp_params):
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                found[id(whole)] = parameter.sharded_param
    return found


def is_dtensor(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "to_local")


def local_part(tensor: Any) -> torch.Tensor:
    """Return what this process holds, without a graph."""
    with torch.no_grad():
        local = tensor.to_local()
        return local.wait() if hasattr(local, "wait") else local  # a collective may still be on its way


def _place(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | str:
    """Return shape and first index of this process's part, or why the whole cannot be put together of the parts."""
    placements = tensor.placements
    if any(placement.is_partial() for placement in placements):
        return "this rank's summand, not yet reduced"
    if not all(placement.is_replicate() or type(placement).__name__ == "Shard" for placement in placements):
        return "this rank's shard, interleaved with others: no sketch"
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    shape, offset = _part(tensor.shape, mesh, None if here is None else tuple(here), tuple(placements))
    if len(offset) != len(tensor.shape):
        return "nothing: no part of it is on this rank"
    return tuple(shape), tuple(offset)


@lru_cache(maxsize=256)
def _part(
    shape: torch.Size, mesh: Any, here: tuple[int, ...] | None, placements: tuple[Any, ...]
) -> tuple[Sequence[int], Sequence[int]]:
    """Ask torch once for each layout: it numbers all rows of a part in a tensor and asks that for its first, which takes time.

    A mesh is equal to one in whose process group, initialised anew, this process has another rank: ``here`` tells them apart.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    return compute_local_shape_and_global_offset(shape, mesh, placements)


def shard_offset(tensor: Any) -> tuple[int, ...] | None:
    """Return the index, in the whole tensor, of the first element that this process holds; None for a whole tensor."""
    if not is_dtensor(tensor) or not any(placement.is_shard() for placement in tensor.placements):
        return None
    place = _place(tensor)
    return None if isinstance(place, str) else place[1]


def shard_note(tensor: Any) -> str | None:
    """Say what was measured of a distributed tensor; None where that is all of it."""
    place = _place(tensor)
    if isinstance(place, str):
        return f"statistics of {place}"
    if not any(placement.is_shard() for placement in tensor.placements):
        return None
    return "statistics of this rank's shard" + (
        "" if sketch_offset(tensor) is not None else ", not contiguous: no sketch"
    )


def sketch_offset(tensor: Any) -> int | None:
    """Return the flat index of the part's first element in the whole; None where the part is not one flat range of it."""
    place = _place(tensor)
    if isinstance(place, str):
        return 0 if any(placement.is_partial() for placement in tensor.placements) else None
    part, offset = place
    whole = tuple(tensor.shape)
    split = next((at for at, (size, of) in enumerate(zip(part, whole, strict=True)) if size != of), len(whole))
    if (
        0 not in part
        and split < len(whole)
        and (any(size != 1 for size in part[:split]) or part[split + 1 :] != whole[split + 1 :])
    ):
        return None
    flat = 0
    for start, of in zip(offset, whole, strict=True):
        flat = flat * of + start
    return flat


def shard_like(tensor: Any, local: torch.Tensor) -> Any:
    """Return a distributed tensor of the place of ``tensor`` with other values."""
    return type(tensor).from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def replicated(whole: torch.Tensor, like: Any) -> Any:
    """Return a distributed tensor, on the mesh of ``like``, of which each process has the whole; the same everywhere."""
    from torch.distributed.tensor import Replicate  # noqa: PLC0415

    return type(like).from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
