"""Section B, row 43: with a GradScaler hooks see scaled gradients; a recording that is given the scaler holds the true ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th

SCALE = 1024.0


def _scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, **options)


def _gradients(rec: Any) -> dict[str, list[float]]:
    rows = rec.table("values").to_pylist()
    return {
        f"{row['path']}:{row['kind']} {row['slot']}".strip(): rec.recording.tensor(row["tensor"]).flatten().tolist()
        for row in rows
        if "grad" in row["kind"]
    }


@pytest.mark.parametrize("given", [True, False])
def test_recorded_gradients_are_unscaled_exactly(given: bool):
    """43, W: 3.0 with the scaler, 3072.0 without; parameter gradients and gradients of inputs alike."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.constant_(model[0].weight, 2.0)
    scaler = _scaler()
    x = torch.full((1, 1), 3.0, requires_grad=True)
    with th.record(
        model,
        kinds=["grad_output", "grad_input", "param_grad"],
        tensors=True,
        scaler=scaler if given else None,
        on_error="raise",
    ) as rec:
        scaler.scale(model(x).sum()).backward()
    factor = 1 if given else SCALE
    seen = _gradients(rec)
    assert seen["0:param_grad weight"] == [3 * factor]
    assert seen["0:grad_output"] == [1 * factor]
    assert seen["0:grad_input input"] == [2 * factor]
    assert x.grad.item() == 2 * SCALE  # what flows is left alone
    assert {row["note"] for row in rec.table("values").to_pylist()} == {"unscaled by 1024" if given else None}


def test_half_precision_does_not_underflow():
    """43, W: a gradient that float16 holds only while it is scaled is recorded as float32, and its infinities stay."""
    model = nn.Sequential(nn.Identity(), nn.Identity())
    scaler = _scaler()
    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    true = torch.tensor([1e-8, 1.0])
    with th.record(model, kinds=["grad_output"], tensors=True, scaler=scaler, on_error="raise") as rec:
        out = model(x)
        out.backward((true * SCALE).half() * torch.tensor([1.0, 65000.0]).half())
    gradient = rec["0"].grad_output
    assert gradient.dtype == torch.float32
    assert gradient[0].item() == (true * SCALE).half()[0].float().item() / SCALE
    assert gradient[1].item() == float("inf")
    assert true.half()[0].item() == 0


def test_each_pass_is_divided_by_its_own_scale():
    """43, W: the scale grows between steps; each backward is unscaled by the one that it was scaled with."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = _scaler(growth_interval=1)
    with th.record(model, kinds=["param_grad", "grad_output"], scaler=scaler, on_error="raise") as rec:
        for _ in range(3):
            scaler.scale(model(torch.full((1, 1), 3.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    rows = rec.table("values").to_pylist()
    assert [row["mean"] for row in rows if row["kind"] == "param_grad"] == [3, 3, 3]
    assert [row["mean"] for row in rows if row["kind"] == "grad_output"] == [1, 1, 1]
    assert [row["note"] for row in rows if row["kind"] == "param_grad"] == [
        "unscaled by 1024", "unscaled by 2048", "unscaled by 4096",
    ]  # fmt: skip
    assert [row["step"] for row in rows if row["kind"] == "param_grad"] == [0, 1, 2]


def test_scaler_that_is_off_changes_nothing():
    """43, W: a disabled scaler scales by 1."""
    model = nn.Linear(1, 1, bias=False)
    scaler = _scaler(enabled=False)
    with th.record(model, kinds=["param_grad"], scaler=scaler, on_error="raise") as rec:
        scaler.scale(model(torch.full((1, 1), 3.0)).sum()).backward()
    (row,) = rec.table("values").to_pylist()
    assert (row["mean"], row["note"]) == (3, None)


def test_something_else_than_a_scaler_is_refused():
    """43, P: a number, or the scale itself, is no scaler; the error says what to pass."""
    with pytest.raises(th.TenterhookError, match=r"scaler= needs a GradScaler.*got float\n.*pass the scaler"):
        th.record(nn.Linear(1, 1), scaler=1024.0)
