"""Section B, row 55: of numbers that are not finite the first is named that made them, and masks are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.analysis.nonfinite import find_nonfinite

KINDS = ["input", "output", "grad_input", "grad_output"]
BORN_HERE = {
    "output": "its input was finite, so it arose in this module or in its parameters",
    "grad_input": "its grad_output was finite, so it arose in this module or in its parameters",
}


class Fn(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(x)


def _guarded(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.sqrt(), torch.zeros_like(x))


def _overflow(x: Tensor) -> Tensor:
    return x * 1e38 * 10


# What runs, on what, and the first place with what it holds.
CASES: dict[str, tuple[list[nn.Module], Tensor, str, dict[str, int]]] = {
    "handed on by others": (
        [Fn(torch.sqrt), nn.Linear(2, 2), nn.ReLU()], torch.tensor([[-1.0, 4.0]]), "0:output#0@0", {"nan": 1},
    ),
    "in the middle": (
        [nn.Linear(2, 2), Fn(torch.zeros_like), Fn(torch.log), nn.Tanh()], torch.ones(1, 2), "2:output#0@0", {"-inf": 2},
    ),
    "too large": ([nn.Identity(), Fn(_overflow), nn.Softmax(-1)], torch.tensor([[1.0, 2.0]]), "1:output#0@0", {"+inf": 2}),
    "repaired later": ([Fn(torch.sqrt), Fn(torch.nan_to_num)], torch.tensor([-1.0, 4.0]), "0:output#0@0", {"nan": 1}),
    "in a dict": (
        [Fn(lambda x: {"a": x, "b": [x.sqrt()]}), Fn(lambda out: out["b"][0])], torch.tensor([-1.0]),
        '0:output["b"][0]#0@0', {"nan": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_first_producer_is_named_and_nobody_else(name: str) -> None:
    """Row 55: its inputs are finite and its output is not; those that hand it on and one that repairs it are not named."""
    parts, x, address, counts = CASES[name]
    net = nn.Sequential(*parts)
    with th.record(net, kinds=KINDS, on_error="raise") as rec, torch.no_grad():
        net(x)
    found = find_nonfinite(rec.recording, several=False)
    assert found.first is not None
    assert (found.first.address, found.first.counts) == (address, counts)
    assert found.first.origin.startswith(BORN_HERE["output"])
    assert ("did not reach" in found.first.origin) == bool(net(x).isfinite().all())


def test_what_was_repaired_did_not_reach_the_output() -> None:
    """Row 55: the finding stays with its producer; what the model gave is finite, and its row says so."""
    net = nn.Sequential(Fn(torch.sqrt), Fn(torch.nan_to_num))
    with th.record(net, kinds=KINDS, on_error="raise") as rec:
        net(torch.tensor([-1.0, 4.0]))
    [row] = rec.query(
        "select nan_count, posinf_count, neginf_count from values where path = '' and kind = 'output'"
    ).to_pylist()
    assert list(row.values()) == [0, 0, 0]
    found = find_nonfinite(rec.recording, several=False)
    assert found.first is not None and found.first.address == "0:output#0@0"
    assert found.first.origin.endswith("; it did not reach the model's output")
    touched = rec.query("select distinct path from values where nan_count > 0 and kind = 'output'").to_pylist()
    assert touched == [{"path": "0"}]


MASK = torch.tensor([False, True])


@pytest.mark.parametrize(
    ("fn", "places"),
    [
        (lambda x: torch.softmax(x.masked_fill(MASK, float("-inf")), -1), 1),
        (lambda x: torch.softmax(torch.where(MASK, float("-inf"), x), -1), 1),
        (lambda x: torch.softmax(x + torch.zeros(2).masked_fill(MASK, float("-inf")), -1), 2),
    ],
    ids=["masked_fill", "where", "added"],
)
def test_minus_infinities_of_a_mask_are_no_finding(fn: Callable[[Tensor], Tensor], places: int) -> None:
    """Row 55: they are meant, counted as masks, and the result is finite."""
    net = nn.Sequential(Fn(fn))
    with th.record(net, ops=True, on_error="raise") as rec:
        out = net(torch.tensor([[1.0, 2.0]]))
    assert out.tolist() == [[1.0, 0.0]]
    found = find_nonfinite(rec.recording, several=False)
    assert (found.first, found.first_born, found.masks) == (None, None, places)


def test_a_module_whose_whole_output_is_a_mask_is_told_with_that_doubt() -> None:
    """Row 55, D: a module that hands out -inf among other numbers is named, and that it may be a mask is said; a NaN is none."""
    net = nn.Sequential(Fn(lambda x: x.masked_fill(MASK, float("-inf"))), nn.Softmax(-1))
    with th.record(net, kinds=KINDS, on_error="raise") as rec:
        net(torch.tensor([[1.0, 2.0]]))
    found = find_nonfinite(rec.recording, several=False)
    assert found.first is not None and found.first.address == "0:output#0@0"
    assert found.first.origin.endswith("-inf alone may be a mask that it makes; it did not reach the model's output")


def test_a_nan_of_the_backward_pass_is_named_with_the_module_and_its_function() -> None:
    """Row 55: ``where`` over ``sqrt``: forward 0.0, gradient NaN; with functions recorded it is known which one made it."""
    net = nn.Sequential(nn.Identity(), Fn(_guarded))
    x = torch.zeros(1, requires_grad=True)
    with th.record(net, kinds=KINDS, on_error="raise") as rec:
        out = net(x * 1)
        out.sum().backward()
    assert out.tolist() == [0.0]
    found = find_nonfinite(rec.recording, several=False)
    assert found.first is not None
    assert (found.first.address, found.first.counts) == ("1:grad_input.x#0@0", {"nan": 1})
    assert found.first.origin == BORN_HERE["grad_input"]
    with th.record(net, kinds=["output", "grad_output"], ops=True, on_error="raise") as rec:
        net(torch.zeros(1, requires_grad=True) * 1).sum().backward()
    gradients = rec.query(
        "select path, nan_count from values where kind = 'grad_output' and path in ('1/where', '1/sqrt', '0') order by seq"
    ).to_pylist()
    # what came to sqrt's output is a finite 0; what left it, to the module before, is NaN
    assert [(row["path"], row["nan_count"]) for row in gradients] == [("1/where", 0), ("1/sqrt", 0), ("0", 1)]
    found = find_nonfinite(rec.recording, several=False)
    assert found.first is not None and found.first.address == "0:grad_output#0@0"
    assert found.first.origin == "what was recorded before it is finite: the gradient before it was that of 1/sqrt"


@pytest.mark.parametrize("kinds", [["output"], ["input", "output", "grad_output"]])
def test_a_function_that_made_a_nan_is_named_with_what_came_before_it(kinds: list[str]) -> None:
    """Row 55: what a function is given is not recorded, so nobody is told to ask for it; what came before it was finite."""
    net = nn.Sequential(nn.Identity(), Fn(lambda x: torch.sqrt(x - 3)))
    with th.record(net, kinds=kinds, ops=True, on_error="raise") as rec:
        net(torch.ones(2))
    found = find_nonfinite(rec.recording, several=False)
    assert found.first is not None and found.first.address == "1/sqrt:output#0@0"
    assert found.first.origin == "what was recorded before it is finite: the output before it was that of 1/sub"


def test_what_may_have_happened_between_samples_is_said() -> None:
    """Row 55, D: where the steps before the first that is not finite were not recorded it may have come from there."""
    net = nn.Sequential(nn.Identity())
    with th.record(net, every=4, on_error="raise") as rec:
        for step in range(6):
            net(torch.tensor([float("nan") if step > 1 else 1.0]))
    found = find_nonfinite(rec.recording, several=False)
    assert found.first is not None and found.first.step == 4
    assert found.first.origin.endswith("; steps 1 to 3 before it were not recorded")


def test_a_function_that_makes_nan_of_a_mask_is_told_with_that_mask() -> None:
    """Row 55: a row of attention that is masked all over; what came before holds -inf that are meant, and is not called finite."""
    net = nn.Sequential(Fn(lambda x: torch.softmax(x.masked_fill(torch.ones(2, dtype=torch.bool), float("-inf")), -1)))
    with th.record(net, ops=True, on_error="raise") as rec:
        net(torch.ones(1, 2))
    found = find_nonfinite(rec.recording, several=False)
    assert found.first is not None and found.first.address == "0/softmax:output#0@0"
    assert found.first.origin == (
        "what was recorded before it is finite, but for masks: the output before it was that of 0/masked_fill"
    )


@pytest.mark.parametrize("kind", ["param_grad", "update"])
def test_what_does_not_flow_names_nothing_before_it(kind: str) -> None:
    """Row 55: gradients and updates of parameters have others before them, from which they did not come."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e38)
    with th.record(net, kinds=[kind], on_error="raise") as rec:
        (net(torch.ones(1, 2)).sum() * float("nan")).backward()
        optimizer.step()
    found = find_nonfinite(rec.recording, several=False)
    assert found.first is not None and f":{kind}" in found.first.address
    assert found.first.origin == "what was recorded before it is finite"


def test_steps_of_which_only_parameters_were_recorded_count_as_recorded() -> None:
    """Row 55: without calls, too, nobody is told that the steps before were not recorded."""
    net = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with th.record(net, kinds=["param"], on_error="raise") as rec:
        for step in range(4):
            optimizer.zero_grad()
            (net(torch.ones(1, 2)).sum() * (float("nan") if step == 1 else 1.0)).backward()
            optimizer.step()
    found = find_nonfinite(rec.recording, several=False)
    assert found.first is not None and found.first.step in (1, 2)
    assert found.first.origin == "the parameter itself is not finite"
