"""Section B, row 64: a run in another precision beside the first: dtypes differ, and by how much is told apart from that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th

X = torch.linspace(-1, 1, 32).reshape(8, 4)


def _net(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2)).to(dtype)


def _record(dtype: torch.dtype, context: Callable[[], AbstractContextManager[Any]]) -> Any:
    net = _net(dtype)
    with th.record(net, kinds=["output", "grad_output", "param_grad"], tensors=True, on_error="raise") as rec:
        with context():
            out = net(X.to(dtype))
        out.float().sum().backward()
    return rec


PRECISIONS: dict[str, tuple[torch.dtype, Callable[[], AbstractContextManager[Any]], float]] = {
    "autocast": (torch.float32, lambda: torch.autocast("cpu", torch.bfloat16), 0.02),
    "bfloat16": (torch.bfloat16, contextlib.nullcontext, 0.05),
    "float64": (torch.float64, contextlib.nullcontext, 1e-6),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_two_precisions_can_be_laid_side_by_side(name: str) -> None:
    """64, W (recording's part): addresses agree, each value has the dtype that flowed; what differs is small and not hidden by it."""
    plain, other = _record(torch.float32, contextlib.nullcontext), _record(*PRECISIONS[name][:2])
    pairs = {}
    for rec in (plain, other):
        for row in rec.table("values").to_pylist():
            key = row["path"], row["kind"], row["slot"], row["call"]
            pairs.setdefault(key, []).append((row["dtype"], rec.recording.tensor(row["tensor"]), row))
    assert all(len(pair) == 2 for pair in pairs.values())
    changed = {key for key, (one, two) in pairs.items() if one[0] != two[0]}
    assert ("0", "output", "", 0) in changed
    if name == "autocast":  # parameters and their gradients stay as they are
        assert not any(kind == "param_grad" for _, kind, *_ in changed)
        assert {pairs["0", "output", "", 0][1][0], pairs["3", "output", "", 0][1][0]} == {"bfloat16"}
    for key in [key for key in pairs if key[1] == "output"]:
        (_, one, first), (_, two, second) = pairs[key]
        difference = (one.double() - two.double()).abs().max().item()
        assert difference <= PRECISIONS[name][2]
        assert abs(first["mean"] - second["mean"]) <= PRECISIONS[name][2]
        assert first["digest"] != second["digest"]
