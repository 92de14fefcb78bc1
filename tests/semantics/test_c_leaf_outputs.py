"""Section C, rows 09 and 44: outputs that are leaves, a parameter or the model's own input, whose hooks outlive the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th


class Table(nn.Module):
    """Returns its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))

    def forward(self) -> Tensor:
        return self.weight


class Net(nn.Module):
    """Two calls that return the same parameter, and two that return the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.same = nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        return (self.same(x) * self.table() + self.same(x) * self.table() * 2).sum()


def _x() -> Tensor:
    return torch.ones(4, requires_grad=True)


def _rows(rec: Any, step: int) -> list[tuple[str, int, int]]:
    rows = [row for row in rec.table("values").to_pylist() if row["kind"] == "grad_output" and row["step"] == step]
    return sorted((row["path"], row["call"], row["pass"]) for row in rows if row["path"])


BOTH = [("same", 0, 0), ("same", 1, 0), ("table", 0, 0), ("table", 1, 0)]


def test_each_call_that_returns_the_same_leaf_has_its_gradient() -> None:
    """Two calls a step, and the calls of a step that is over get nothing any more."""
    net = Net()
    with th.record(net, kinds=["grad_output"], tensors=True, on_error="raise") as rec:
        for step in range(3):
            net(_x()).backward()
            rec.step()
            assert _rows(rec, step) == BOTH
    for call in rec["table"].calls[:2]:
        assert torch.equal(call.grad_output, torch.full((4,), 3.0))


@pytest.mark.parametrize("kind", ["backward", "backward_pre"])
def test_backward_hooks_fire_for_each_call_that_returns_the_same_leaf(kind: str) -> None:
    net = Net()
    with th.hooks(net) as hooks:
        handle = getattr(hooks, kind)("*", lambda *arguments: None)
        for _ in range(3):
            net(_x()).backward()
        assert [site.fired for site in handle.sites] == [6, 6]
    assert not net.table.weight._backward_hooks


def test_two_forwards_before_one_backward() -> None:
    net = Net()
    with th.hooks(net) as hooks:
        handle = hooks.backward_pre("table", lambda module, grad_output: None)
        (net(_x()) + net(_x())).backward()
        assert handle.fired == 4
        net(_x()).backward()
        assert handle.fired == 6


def test_calls_without_a_backward_pass_do_not_pile_up() -> None:
    """An evaluation with gradients on: the next backward pass is that of the newest calls, not of thousands."""
    net = Net()
    with th.record(net, kinds=["grad_output"]), th.hooks(net) as hooks:
        handle = hooks.backward_pre("table", lambda module, grad_output: None)
        for _ in range(100):
            net(_x())
        (port,) = (net.table.weight._backward_hooks or {}).values()
        assert len(port.taps) <= 64
        net(_x()).backward()
        assert 2 <= handle.fired <= 32


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_leaf_that_is_returned_in_a_checkpointed_region_has_one_gradient(reentrant: bool) -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Identity()
            self.body = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda value: self.body(self.same(value)), x, use_reentrant=reentrant)

    net = Region()
    with th.record(net, kinds=["grad_output"], on_error="raise") as rec, th.hooks(net) as hooks:
        handle = hooks.backward("same", lambda *arguments: None)
        net(_x()).sum().backward()
    assert handle.fired == 1
    assert [row[0] for row in _rows(rec, 0)] == ["body", "same"]
