from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """One process of one."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def loaded_compiler() -> None:
    """The first compilation of a process patches nn.Module for good; that is not ours to answer for."""
    torch.compile(nn.Identity(), backend="eager")(torch.ones(1))
