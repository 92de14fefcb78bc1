"""Outputs that are leaves: one tensor, one gradient, and every call that returned it sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th


class Table(nn.Module):
    """Returns its parameter as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return self.weight


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self) -> Tensor:
        return (self.table() * 2 + self.table() * 3).sum()


class HandsOn(nn.Module):
    """Hands its input on, in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (self.same(x) * 2 + self.same(x) * 3).sum()


def _gradients(rec: Any, path: str) -> list[tuple[int, int, list[float]]]:
    """(step, call, gradient) as they came."""
    rows = rec.query(
        f"select step, call, tensor from values where path = '{path}' and kind = 'grad_output' and tensor is not null order by seq"
    ).to_pylist()
    return sorted((row["step"], row["call"], rec._sink._tensors[row["tensor"]].tolist()) for row in rows)


@pytest.mark.parametrize("kind", ["parameter", "input"])
def test_both_calls_that_return_a_leaf_see_its_gradient(kind: str) -> None:
    net, arguments = (Twice(), ()) if kind == "parameter" else (HandsOn(), (torch.ones(3, requires_grad=True),))
    with th.record(net, kinds=["grad_output"], tensors=True) as rec:
        net(*arguments).backward()
    path = "table" if kind == "parameter" else "same"
    assert _gradients(rec, path) == [(0, 0, [5.0] * 3), (0, 1, [5.0] * 3)]
    assert rec.coverage.missing == []


def test_a_batch_that_comes_later_goes_to_its_own_call() -> None:
    table = Table()
    optimizer = torch.optim.SGD(table.parameters(), lr=0)
    with th.record(table, kinds=["grad_output"], tensors=True) as rec:
        for _ in range(2):
            for factor in (1, 2, 3):
                (table() * factor).sum().backward()
            optimizer.step()
    assert _gradients(rec, "") == [(step, call, [call + 1.0] * 3) for step in (0, 1) for call in (0, 1, 2)]


def test_each_pass_through_a_kept_graph_is_seen_by_both() -> None:
    net = Twice()
    with th.record(net, kinds=["grad_output"], tensors=True) as rec:
        loss = net()
        loss.backward(retain_graph=True)
        loss.backward()
    assert _gradients(rec, "table") == sorted([(0, 0, [5.0] * 3), (0, 1, [5.0] * 3)] * 2)


def test_nothing_is_left_on_the_leaf() -> None:
    net = Twice()
    with th.record(net):
        for _ in range(5):
            net()
        net().backward()
    assert not net.table.weight._backward_hooks


def test_calls_without_end_in_one_step_do_not_pile_up() -> None:
    table = Table()
    with th.record(table, kinds=["grad_output"]) as rec:
        rec.step()
        for _ in range(500):
            table()
        (port,) = (table.weight._backward_hooks or {}).values()
        assert len(port.taps) <= 64
