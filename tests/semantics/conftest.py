from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tenterhook as th


@pytest.fixture(params=["bare", "empty hooks", "recording", "recording all kinds"])
def session(request: pytest.FixtureRequest) -> Callable[[Any], AbstractContextManager[Any]]:
    """Give what opens a session on a model: none, one without a hook, and recordings of all modules."""
    if request.param == "bare":
        return lambda model: contextlib.nullcontext()
    if request.param == "empty hooks":
        return th.hooks
    if request.param == "recording":
        return lambda model: th.record(model, tensors=True, on_error="raise")
    kinds = ["input", "output", "grad_input", "grad_output", "param", "param_grad"]
    return lambda model: th.record(model, kinds=kinds, on_error="raise")


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
