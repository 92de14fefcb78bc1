"""Edit values that do not fit where they act, or that no edit can have, are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.errors import EditError, SelectionError, TenterhookWarning

X = torch.ones(3, 4)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("edit", "shape"),
    [
        (th.edits.add(torch.zeros(7)), (7,)),
        (th.edits.add(torch.zeros(7), dim=-1, index=slice(0, 3)), (7,)),
        (th.edits.add([1.0, 2.0]), (2,)),
        (th.edits.add(torch.zeros(2, 3, 8)), (2, 3, 8)),  # the value would grow
        (th.edits.scale(torch.zeros(7)), (7,)),
        (th.edits.replace(torch.zeros(7)), (7,)),
        (th.edits.interpolate(torch.zeros(3, 7), 0.5), (3, 7)),
        (th.edits.interpolate(torch.zeros(3, 8), torch.zeros(7)), (7,)),
    ],
)
def test_a_tensor_that_does_not_fit_is_told_with_the_module_and_both_shapes(
    edit: th.edits.EditValue, shape: tuple[int, ...]
) -> None:
    with pytest.raises(EditError) as told:
        _run(edit)
    words = str(told.value)
    assert f"{edit!r} at 1:output#0@0: a tensor of shape {shape} does not fit the value there, of shape (3, 8)" in words


def _run(edit: th.edits.EditValue) -> Any:
    net = model()
    return th.edit(net).output("1", edit).run(net, X)


@pytest.mark.parametrize("fitting", [torch.ones(8), torch.ones(3, 1), torch.ones(1, 1, 1)[0], [2.0] * 8, 1.5])
def test_what_can_be_broadcast_fits(fitting: Any) -> None:
    for make in (th.edits.add, th.edits.scale, th.edits.replace):
        assert _run(make(fitting)).shape == (3, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: th.edits.interpolate(torch.zeros(8), float("nan")), "interpolate: amount=nan"),
        (lambda: th.edits.interpolate(torch.zeros(8), float("inf")), "interpolate: amount=inf"),
        (lambda: th.edits.interpolate(torch.zeros(8), "half"), "interpolate: amount is a number or a tensor"),
        (lambda: th.edits.interpolate("zero", 0.5), "interpolate: towards is a number or a tensor"),
        (lambda: th.edits.patch(torch.zeros(8)), "patch draws from a recording, and this is Tensor"),
        (lambda: th.edits.mean_of(torch.zeros(8)), "mean_of draws from a recording, and this is Tensor"),
        (lambda: th.edits.zero(dim=-1, index=True), "index=True names no places"),
        (lambda: th.edits.zero(dim=-1, index=[0.5]), r"index=\[0.5\] names no places"),
        (lambda: th.edits.zero(dim=-1, index=2.0), "index=2.0 names no places"),
        (lambda: th.edits.zero(dim=-1, index="a"), "index='a' names no places"),
    ],
)
def test_what_no_edit_can_have(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(EditError, match=words):
        make()


@pytest.mark.parametrize("index", [[True, False] * 4, torch.tensor([0, 2, 4, 6]), [0, 2, 4, 6], slice(0, 8, 2)])
def test_places_are_taken_in_each_way_of_naming_them(index: Any, tmp_path: Path) -> None:
    edit = th.edits.scale(2.0, dim=-1, index=index)
    th.edits.save(edit, tmp_path / "e.json")
    net = model()
    wanted = th.edit(net).output("1", edit).run(net, X)
    assert torch.equal(th.edit(net).output("1", th.edits.load(tmp_path / "e.json")).run(net, X), wanted)
    assert not torch.equal(wanted, net(X))


@pytest.mark.parametrize(
    ("edit", "change", "words"),
    [
        (
            th.edits.interpolate(0.0, 0.5),
            {"amount": float("nan")},
            "holds an edit that cannot be: interpolate: amount=nan",
        ),
        (
            th.edits.interpolate(0.0, 0.5),
            {"amount": "half"},
            "holds an edit that cannot be: interpolate: amount is a number",
        ),
        (th.edits.clip_norm(1.0), {"max_norm": -1}, "holds an edit that cannot be: clip_norm: max_norm=-1"),
        (th.edits.noise(1.0), {"std": None}, "holds an edit that cannot be: noise: std"),
        (th.edits.clamp(0.0, 1.0), {"min": 9.0}, "holds an edit that cannot be: clamp: min=9.0 is above max=1.0"),
        (th.edits.patch, {}, "holds an edit that cannot be: patch draws from a recording"),
        (th.edits.scale(1.0), {"colour": 1}, "does not hold edits as th.edits.save writes them"),
    ],
)
def test_a_file_with_such_a_value_is_refused(tmp_path: Path, edit: Any, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "edits.json"
    if edit is th.edits.patch:
        path.write_text('{"edit": "patch", "options": {"recording": 1.0}, "dim": [], "index": []}')
    else:
        th.edits.save(edit, path)
    data = json.loads(path.read_text())
    data["options"] |= change
    path.write_text(json.dumps(data))
    with pytest.raises(EditError) as told:
        th.edits.load(path)
    assert str(told.value).startswith(f"{path} {words}")


def test_a_module_stands_for_its_parameters_among_the_nearest_names() -> None:
    net = model()
    for kind in (th.edit(net), th.hooks(net)):
        with pytest.raises(SelectionError, match=r"nearest: '2\.\*' \(2 parameters\)"):
            kind.param_grad("2", th.edits.scale(2.0))
        with pytest.raises(SelectionError, match=r"nearest: '2\.\*' \(2 parameters\)"):
            kind.param_grad("3", th.edits.scale(2.0))


class Same(nn.Module):
    """A module that gives its parameter itself, and one that calls it many times."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self) -> torch.Tensor:
        return self.w


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same = Same()

    def forward(self, times: int) -> torch.Tensor:
        return torch.stack([self.same() for _ in range(times)]).sum()


@pytest.mark.parametrize(("times", "told"), [(32, False), (40, True)])
def test_calls_whose_gradient_is_let_go_of_are_told(times: int, told: bool) -> None:
    net = Many()
    with th.record(net) as rec:
        net(times).backward()
    assert len(rec["same"].backward_calls) == 32
    assert ("gave the same leaf" in str(rec.coverage)) == told
    with th.record(net) as rec:  # as many without a backward pass are an evaluation
        net(times)
    assert "gave the same leaf" not in str(rec.coverage)


def test_a_hook_that_missed_calls_warns() -> None:
    net = Many()
    with th.hooks(net) as hooks:
        hooks.backward("same", lambda module, grad_input, grad_output: None)
        net(40).backward()
        with pytest.warns(TenterhookWarning, match="the same leaf .* in 40 calls before a backward pass"):
            net(1)
