"""Parameters that are replaced, frozen, pruned, merged or moved during a session are recorded as they are then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import tenterhook as th

KINDS = ["param", "param_grad", "update"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc(x)))


def _train(net: nn.Module, lr: float = 0.1) -> None:
    """A step whose optimizer knows the parameters of the day."""
    optimizer = torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=lr)
    net(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _new_tensor(net: Net) -> None:
    net.fc.weight = nn.Parameter(torch.full((3, 3), 7.0))


def _other_shape(net: Net) -> None:
    net.fc.weight = nn.Parameter(torch.full((4, 3), 2.0))
    net.fc.bias = nn.Parameter(torch.zeros(4))
    net.head.weight = nn.Parameter(torch.ones(1, 4))


def _moved_by_replacing(net: Net) -> None:
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        net.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _data(net: Net) -> None:
    net.fc.weight.data = torch.full((3, 3), 5.0)


def _pruned(net: Net) -> None:
    prune.l1_unstructured(net.fc, "weight", 0.5)


def _parametrized(net: Net) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    parametrize.register_parametrization(net.fc, "weight", Double())


def _merged(net: Net) -> None:
    """As a low-rank adapter is merged: another tensor with the sum."""
    net.fc.weight = nn.Parameter(net.fc.weight.detach() + torch.ones(3, 1) @ torch.ones(1, 3))


def _removed(net: Net) -> None:
    net.fc.bias = None


CHANGES: list[Callable[[Net], None]] = [
    _new_tensor, _other_shape, _moved_by_replacing, _data, _pruned, _parametrized, _merged, _removed,
]  # fmt: skip


def _rows(rec: Any, step: int) -> dict[tuple[str, str], Any]:
    rows = rec.query(f"select path, slot, kind, seq, tensor, note from values where step = {step}").to_pylist()
    return {(f"{row['path']}.{row['slot']}", row["kind"]): row for row in rows}


def _own(net: Net) -> dict[str, Tensor]:
    return {name: one for name, one in net.named_parameters() if "parametrizations" not in name}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_recorded_is_what_the_module_has(change: Callable[[Net], None]) -> None:
    torch.manual_seed(0)
    net = Net()
    expected: list[dict[tuple[str, str], Tensor]] = []
    with th.record(net, kinds=KINDS, tensors=True) as rec:
        for step in range(3):
            if step == 1:
                change(net)
            before = {name: one.detach().clone() for name, one in _own(net).items()}
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(torch.ones(2, 3)).square().sum().backward()
            found = {(name, "param"): value for name, value in before.items()}
            found |= {(name, "param_grad"): one.grad.clone() for name, one in _own(net).items() if one.grad is not None}
            optimizer.step()
            found |= {(name, "update"): one.detach() - before[name] for name, one in _own(net).items()}
            optimizer.zero_grad()
            expected.append(found)
    assert rec.recording.manifest.partial is None
    for step, found in enumerate(expected):
        rows = _rows(rec, step)
        assert set(rows) >= set(found)
        for (name, kind), value in found.items():
            stored = rec._sink._tensors[rows[name, kind]["tensor"]]
            assert torch.equal(stored, value), (step, name, kind)
        if change is not _parametrized:  # where the parameter is that of a module which was not there
            assert set(rows) == set(found)


def test_a_replaced_parameter_is_let_go() -> None:
    net = Net()
    gc.collect()
    gc.disable()
    try:
        with th.record(net, kinds=KINDS):
            _train(net)
            old = weakref.ref(net.fc.weight)
            _new_tensor(net)
            _train(net)
            assert old() is None
            new = weakref.ref(net.fc.weight)
            _train(net)
            net.fc.weight = None
            assert new() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("sampling", [{}, {"every": 2}])
def test_no_hook_is_left_on_a_parameter(sampling: dict[str, Any]) -> None:
    net = Net()
    old = net.fc.weight
    with th.record(net, kinds=KINDS, **sampling):
        _train(net)
        _new_tensor(net)
        for _ in range(3):
            _train(net)
        assert not old._backward_hooks
    assert not any(one._backward_hooks for one in net.parameters())


def test_freezing_and_thawing_is_followed() -> None:
    net = Net()
    net.fc.weight.requires_grad_(False)
    with th.record(net, "fc", kinds=KINDS) as rec:
        _train(net)
        assert dict(rec.coverage.missing) == {"fc": "no gradient of weight: requires_grad=False"}
        net.fc.weight.requires_grad_(True)
        net.fc.bias.requires_grad_(False)
        _train(net)
    assert [(row["step"], row["slot"]) for row in rec.query(
        "select step, slot from values where kind = 'param_grad' order by seq"
    ).to_pylist()] == [(0, "bias"), (1, "weight")]  # fmt: skip
    assert rec.coverage.missing == []


@pytest.mark.parametrize("change", [_new_tensor, _other_shape, _merged])
def test_an_update_across_a_replacement_is_told_and_not_made_up(change: Callable[[Net], None]) -> None:
    net = Net()
    with th.record(net, kinds=KINDS) as rec:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(2, 3)).sum().backward()
        change(net)
        optimizer.step()
        _train(net)
    row = _rows(rec, 0)["fc.weight", "update"]
    assert row["note"] == "the parameter was replaced during the step"
    assert _rows(rec, 1)["fc.weight", "update"]["note"] is None
    assert rec.recording.manifest.partial is None


def test_another_shape_by_data_is_told() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with th.record(net, kinds=KINDS) as rec:
        net(torch.ones(2, 3)).sum().backward()
        net.head.bias.grad = None
        net.head.bias.data = torch.zeros(5)
        optimizer.step()
    assert _rows(rec, 0)["head.bias", "update"]["note"] == "the parameter got another shape during the step"
    assert rec.recording.manifest.partial is None


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (_new_tensor, "fc.weight", "parameter 'fc.weight' is no longer the one hooked: it was replaced"),
        (_removed, "fc.bias", "parameter 'fc.bias' is no longer there"),
    ],
)
def test_hooks_tell_that_their_parameter_was_replaced(change: Callable[[Net], None], name: str, words: str) -> None:
    net = Net()
    with th.hooks(net) as hooks:
        hooks.param_grad(name, lambda name, gradient: None)
        assert "no longer" not in str(hooks)
        change(net)
        _train(net)
        assert words in str(hooks)
        assert hooks.fired == 0
    assert words in str(hooks)


def test_hooks_follow_a_parameter_that_gets_another_name() -> None:
    net = Net()
    with th.hooks(net) as hooks:
        hooks.param_grad("fc.weight", lambda name, gradient: None)
        _pruned(net)
        _train(net)
        assert hooks.fired == 1
        assert "no longer" not in str(hooks)


def test_the_parameters_of_a_module_that_takes_the_place_of_another_have_gradients_too() -> None:
    net = Net()
    with th.record(net, kinds=KINDS) as rec:
        _train(net)
        net.fc = nn.Linear(3, 3)
        for _ in range(2):
            _train(net)
    rows = rec.table("values").to_pylist()
    found = {(row["step"], row["kind"], row["slot"]) for row in rows if row["path"] == "fc" and row["dtype"] != "none"}
    assert found == {(step, kind, slot) for step in range(3) for kind in KINDS for slot in ("weight", "bias")}
