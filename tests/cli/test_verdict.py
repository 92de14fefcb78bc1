"""What the head of ``tenterhook show`` says of the numbers: masks, what is not finite, and activations that are stuck."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.analysis.masks import is_meant, signs_of
from tests.cli.commands import tenterhook
from tests.cli.recordings import write_measured

INF = math.inf


class Attention(nn.Module):
    """Scores, masked in some way, and their softmax."""

    def __init__(self, mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(-1, -2)
        return self.mask(scores, torch.ones(scores.shape[-2:], dtype=torch.bool).tril()).softmax(-1) @ x


def in_place(scores: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    scores = scores.clone()
    scores[..., ~keep] = -INF
    return scores


MASKS = {
    "masked_fill": lambda scores, keep: scores.masked_fill(~keep, -INF),
    "masked_fill_": lambda scores, keep: scores.clone().masked_fill_(~keep, -INF),
    "setitem": in_place,
    "where": lambda scores, keep: torch.where(keep, scores, -INF),
    "full": lambda scores, keep: scores + torch.full(keep.shape, -INF).triu(1),
    "log": lambda scores, keep: keep.float().log().expand_as(scores) + scores,
    "baddbmm": lambda scores, keep: torch.baddbmm(torch.full(scores.shape, -INF).triu(1), scores, scores),
}


def verdict(path: Path, *args: str) -> tuple[str, dict[str, Any]]:
    head = tenterhook("show", str(path), *args, width=400).out.partition("\n\n")[0]
    return head, json.loads(tenterhook("show", str(path), *args, "--json").out)["data"]["overview"]


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_is_no_fault(tmp_path: Path, mask: str) -> None:
    net = Attention(MASKS[mask])
    with th.record(net, to=tmp_path / "a.thk", ops=True):
        net(torch.randn(2, 4, 4))
    head, found = verdict(tmp_path / "a.thk")
    assert "first !" not in head
    assert found["masks"] == found["nonfinite"] > 0
    assert f", all finite but for {found['masks']} mask{'s' if found['masks'] > 1 else ''} of -inf " in head
    assert f" masks   the first is {found['first_mask']['address']}; " in head


@pytest.mark.parametrize("mask", MASKS)
def test_a_nan_behind_masks_is_the_first(tmp_path: Path, mask: str) -> None:
    net = nn.Sequential(Attention(MASKS[mask]), Attention(lambda scores, keep: scores.masked_fill(scores < INF, -INF)))
    with th.record(net, to=tmp_path / "a.thk", ops=True):
        net(torch.randn(2, 4, 4))  # the second masks whole rows
    _, found = verdict(tmp_path / "a.thk")
    assert found["first_nonfinite"]["address"] == "1/softmax:output#0@0"
    assert set(found["first_nonfinite"]["counts"]) == {"nan"}


def test_the_logarithm_of_zero_is_a_fault_and_a_nan_behind_it_is_named_too(tmp_path: Path) -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logged = x.log()
            return (logged - logged).masked_fill(x > 2, -INF)

    net = Loss()
    with th.record(net, to=tmp_path / "a.thk", ops=True):
        net(torch.tensor([0.0, 0.5, 3.0]))
    head, found = verdict(tmp_path / "a.thk")
    assert " first ! (root)/log:output#0@0 has 1 -inf; " in head
    assert "-inf alone may be a mask" not in head  # a function that computes makes none
    assert " then !  (root)/sub:output#0@0 has 1 nan\n" in head
    assert found["masks"] == 0


def test_what_a_fault_is_handed_on_as_is_no_mask(tmp_path: Path) -> None:
    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x.log()

    net = nn.Sequential(Attention(MASKS["full"]), Gate())
    with th.record(net, to=tmp_path / "a.thk", ops=True) as rec:
        net(torch.ones(2, 4, 4))
        rec.step()
        net(torch.zeros(2, 4, 4))
    _, found = verdict(tmp_path / "a.thk")
    assert found["first_nonfinite"]["address"] == "1/log:output#0@1"
    masks = rec.query("select path from values where neginf_count > 0 and step = 0")
    assert found["masks"] == 2 * len(masks) > 0  # the second step adds its log(0), which x + log(x) hands on


@pytest.mark.parametrize(
    ("kind", "slot", "op", "statistics", "meant"),
    [
        ("output", "", "masked_fill", {"neginf_count": 3, "absmax": 7e4}, True),
        ("output", "", "add", {"neginf_count": 3, "absmax": 7.0}, True),
        ("output", "", "add", {"neginf_count": 3, "absmax": 6e4}, False),  # it may have overflowed
        ("output", "", "matmul", {"neginf_count": 3, "absmax": 7.0}, False),
        ("output", "", "log", {"neginf_count": 3, "absmax": 7.0}, False),
        ("output", "", "", {"neginf_count": 3, "absmax": 7.0}, False),
        ("output", "", "", {"neginf_count": 3, "absmax": 0.0, "zero_count": 9}, True),
        ("output", "", "", {"neginf_count": 3, "absmax": None, "zero_count": 0}, False),
        ("input", "attn_mask", "", {"neginf_count": 3, "absmax": None}, True),
        ("input", "x", "", {"neginf_count": 3, "absmax": 7.0}, False),
        ("grad_output", "", "masked_fill", {"neginf_count": 3, "absmax": 0.0, "zero_count": 9}, False),
        ("param", "weight", "", {"neginf_count": 3, "absmax": 0.0, "zero_count": 9}, False),
    ],
)
def test_what_a_mask_is(kind: str, slot: str, op: str, statistics: dict, meant: bool) -> None:
    assert is_meant(kind, slot, op, signs_of(statistics)) is meant
    for worse in ({"nan_count": 1}, {"posinf_count": 1}):
        assert not is_meant(kind, slot, op, signs_of({**statistics, **worse}))


def test_on_its_line_a_mask_has_no_mark(tmp_path: Path) -> None:
    mask = {"neginf_count": 2, "absmax": 0.0, "zero_count": 4}
    path = write_measured(tmp_path / "a.thk", [mask, {"neginf_count": 2}, {**mask, "nan_count": 1}])
    lines = tenterhook("show", str(path), "--as", "tree", width=120).out.splitlines()
    ends = [re.split("  +", line)[-1] for line in lines if re.match("([├└] )?m[012] ", line)]
    assert ends == ["2 -inf", "! 2 -inf", "! 1 nan, 2 inf"]
    assert "first ! m1:output#0@0 has 2 -inf" in "\n".join(lines)
    assert "then !  m2:output#0@0 has 1 nan" in "\n".join(lines)


def activations(act: nn.Module, *biases: float) -> nn.Module:
    """A layer with these biases, and an activation."""
    net = nn.Sequential(nn.Linear(4, len(biases)), act)
    with torch.no_grad():
        net[0].bias.copy_(torch.tensor(biases))
    return net


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (activations(nn.ReLU(), -99, -99), "1 activation gives only zeros, in every call: 1 (ReLU)"),
        (activations(nn.ReLU(inplace=True), -99, -99), "1 activation gives only zeros, in every call: 1 (ReLU)"),
        (activations(nn.ReLU(), -99, 99), None),
        (activations(nn.Sigmoid(), -99, 99), "1 activation gives only values near 0 or 1, in every call: 1 (Sigmoid)"),
        (activations(nn.Sigmoid(), 0, 99), None),
        (activations(nn.Tanh(), -99, 99), "1 activation gives only values near -1 or 1, in every call: 1 (Tanh)"),
        (activations(nn.Tanh(), 0, 0), None),
        (nn.Sequential(nn.Linear(4, 2), nn.Dropout(1.0)), None),  # zeros that are meant
    ],
)
def test_activations_that_pass_nothing_on_are_named(tmp_path: Path, net: nn.Module, words: str | None) -> None:
    with th.record(net, to=tmp_path / "a.thk"):
        for _ in range(3):
            net(torch.rand(5, 4))
    head, found = verdict(tmp_path / "a.thk")
    assert [line for line in head.splitlines() if line.startswith(" stuck !")] == (
        [f" stuck ! {words}"] if words else []
    )
    assert [one["calls"] for one in found["stuck"]] == ([3] if words else [])


def test_one_call_that_lets_something_through_is_enough(tmp_path: Path) -> None:
    net = nn.Sequential(nn.ReLU())
    with th.record(net, to=tmp_path / "a.thk", ops=True):
        for x in (-torch.ones(3), torch.ones(3)):
            net(x)
    assert verdict(tmp_path / "a.thk")[1]["stuck"] == []


def test_a_function_that_gives_only_zeros_is_named(tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x - 9)

    net = Net()
    with th.record(net, to=tmp_path / "a.thk", ops=True):
        net(torch.rand(3))
    assert " stuck ! 1 activation gives only zeros, in every call: (root)/relu\n" in verdict(tmp_path / "a.thk")[0]
