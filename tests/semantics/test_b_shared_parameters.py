"""Section B, row 10: a parameter that several modules have is recorded once, also where only some of them are selected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tests.semantics.asking import ignore

KINDS = ["param", "param_grad", "update"]


class Tied(nn.Module):
    """A head that has the embedding's weight, under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.emb(tokens))


class Deep(nn.Module):
    """Two blocks of which the second has both parameters of the first's layer, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.two = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        self.two[0].weight, self.two[0].bias = self.one[0].weight, self.one[0].bias

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


class Under(nn.Module):
    """One weight under two names of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first + self.second


CASES: list[tuple[type[nn.Module], Any, Tensor, list[str]]] = [
    (Tied, "head", torch.tensor([1, 2]), ["head.weight"]),
    (Tied, "emb, head", torch.tensor([1, 2]), ["emb.weight"]),
    (Deep, "two.*", torch.ones(2, 3), ["two.0.bias", "two.0.weight", "two.1.bias", "two.1.weight"]),
    (Deep, "**", torch.ones(2, 3), ["one.0.bias", "one.0.weight", "two.1.bias", "two.1.weight"]),
    (Under, "**", torch.ones(2, 3), ["first"]),
]


@pytest.mark.parametrize(("make", "select", "x", "expected"), CASES)
def test_a_shared_parameter_is_recorded_once_with_the_first_selected_module_that_has_it(
    make: type[nn.Module], select: str, x: Tensor, expected: list[str]
) -> None:
    """Row 10: of a head alone its weight, though the embedding had it first; the values are those of the parameter."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = {name: one.detach().clone() for name, one in model.named_parameters(remove_duplicate=False)}
    with th.record(model, select, kinds=KINDS, tensors=True, on_error="raise") as rec:
        model(x).square().sum().backward()
        gradients = {name: one.grad.clone() for name, one in model.named_parameters(remove_duplicate=False)}  # type: ignore[union-attr]
        optimizer.step()
    rows = {(row["kind"], f"{row['path']}.{row['slot']}".lstrip(".")): row for row in rec.table("values").to_pylist()}
    assert sorted(rows) == sorted((kind, name) for kind in KINDS for name in expected)
    for (kind, name), row in rows.items():
        after = model.get_parameter(name).detach()
        truth = {"param": before[name], "param_grad": gradients[name], "update": after - before[name]}[kind]
        assert torch.equal(rec.recording.tensor(row["tensor"]), truth)
    assert rec.coverage.complete


def test_a_shared_parameter_has_one_name_in_hooks_whichever_is_asked_for() -> None:
    """Row 10, same kind: each of its names selects it, under the first."""
    model = Tied()
    seen: list[str] = []
    with th.hooks(model) as hooks:
        for names in ("head.weight", "**.weight", ["emb.weight", "head.weight"]):
            assert hooks.param_grad(names, lambda name, gradient: seen.append(name)).paths == ["emb.weight"]
        model(torch.tensor([1, 2])).sum().backward()
    assert seen == ["emb.weight"] * 3


def test_what_is_missing_of_a_shared_parameter_is_told_with_the_module_that_was_asked_for() -> None:
    """Row 10, same kind: a frozen weight, of which the head alone was selected."""
    model = Tied()
    model.emb.weight.requires_grad_(False)
    with th.record(model, "head", kinds=["param_grad"]) as rec, th.hooks(model) as hooks:
        hooks.forward("head", ignore)
        model(torch.tensor([1, 2]))
    assert dict(rec.coverage.missing) == {"head": "no gradient of weight: requires_grad=False"}


def test_a_parameter_that_gets_shared_during_the_session_is_followed() -> None:
    """Row 10, same kind: tied between two steps; each parameter is recorded with whoever has it first then."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with th.record(model, "1", kinds=["param_grad"], on_error="raise") as rec:
        for tied in (False, True):
            if tied:
                model[1].weight = model[0].weight
            model(torch.ones(1, 2)).sum().backward()
            rec.step()
    rows = rec.table("values").to_pylist()
    assert [(row["step"], row["path"], row["slot"]) for row in rows] == [(0, "1", "weight"), (1, "1", "weight")]
