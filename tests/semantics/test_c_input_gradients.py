"""Section C, row 76: the gradient of an input through a module, and that of the whole tensor; modules that work in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th


def _linear(weight: float) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.constant_(linear.weight, weight)
    return linear


def _record(model: nn.Module, select: Any = None) -> Any:
    return th.record(model, select, kinds=["output", "grad_input", "grad_output"], tensors=True, on_error="raise")


@pytest.mark.parametrize("leaf", [True, False])
def test_through_the_module_and_in_total(leaf: bool):
    """76, W: for ``7 (l(x) + 10 x) / 7`` and weight 3: 3 through the module, 13 in total, 7 at an output used 7 times."""
    model = nn.Sequential(_linear(3.0))
    x = torch.ones(1, 1, requires_grad=True)
    if not leaf:
        x = x.clone()
    got: list[Any] = []
    total: list[float] = []
    with _record(model, "0") as rec, th.hooks(model) as hooks:
        hooks.backward("0", lambda module, grad_input, grad_output: got.append((grad_input[0], grad_output[0])))
        hooks.tensor(x, lambda gradient: total.append(gradient.item()))
        (model[0](x) + 10 * x).sum().backward()
        (7 * model[0](x)).sum().backward()
    assert [(one.item(), other.item()) for one, other in got] == [(3, 1), (21, 7)]
    assert [call.grad_input["input"].item() for call in rec["0"].calls] == [3, 21]
    assert [call.grad_output.item() for call in rec["0"].calls] == [1, 7]
    assert total == [13, 21]


def test_input_given_to_two_modules_and_twice_to_one():
    """76, W: each module has its own share; a tensor given twice to one has it at the first place.

    An alias for each place would take ``query is key`` away from attention, which then computes in another way.
    """
    model = nn.ModuleDict({"a": _linear(2.0), "b": nn.Bilinear(1, 1, 1, bias=False)})
    nn.init.constant_(model["b"].weight, 5.0)
    x = torch.full((1, 1), 3.0, requires_grad=True)
    with _record(model) as rec:
        (model["a"](x) + model["b"](x, x)).sum().backward()
    assert rec["a"].grad_input["input"].item() == 2
    assert rec["b"].grad_input["input1"].item() == 30
    places = rec.query("select slot from values where path = 'b' and kind = 'grad_input'").to_pylist()
    assert places == [{"slot": "input1"}]
    assert x.grad.item() == 32


def test_keyword_and_nested_inputs():
    """76, W: keyword inputs and tensors in containers have their gradients by name."""

    class Mix(nn.Module):
        def forward(self, x: torch.Tensor, *, more: dict[str, list[torch.Tensor]], scale: float = 1.0) -> torch.Tensor:
            return x + 2 * more["h"][0] * scale + 0 * more["h"][1].detach()

    model = Mix()
    x, y, z = (torch.ones(2, requires_grad=True) for _ in range(3))
    got: list[Any] = []
    with _record(model) as rec, th.hooks(model) as hooks:
        hooks.backward("", lambda module, grad_input, grad_output: got.append(grad_input))
        model(x, more={"h": [y, z]}, scale=3.0).sum().backward()
    for seen in (rec[""].grad_input, got[0]):
        assert seen["x"].tolist() == [1, 1]
        assert seen['more["h"][0]'].tolist() == [6, 6]
        assert seen['more["h"][1]'] is None
    assert z.grad is None


def test_in_place_module_as_first_child():
    """76, W: of a container whose first child works on its input in place, both have the gradient before that, inner first."""
    model = nn.Sequential(nn.Sequential(nn.ReLU(inplace=True), _linear(3.0)))
    x = torch.tensor([[2.0], [-2.0]], requires_grad=True)
    hidden = x * 1
    order: list[str] = []
    with _record(model) as rec, th.hooks(model) as hooks:
        hooks.backward("**", lambda name, module, grad_input, grad_output: order.append(name), with_name=True)
        out = model(hidden)
        out.sum().backward()
    assert hidden.tolist() == [[2], [0]]  # the caller sees the change, as without us
    for path in ("", "0", "0.0"):
        assert rec[path].grad_input["input"].tolist() == [[3], [0]]
    assert rec["0.1"].grad_input["input"].tolist() == [[3], [3]]
    assert order == ["0.1", "0.0", "0", ""]
    assert x.grad.tolist() == [[3], [0]]
    assert rec.coverage.complete


def test_in_place_dropout_and_batch_norm_chain():
    """76, W: ``Dropout(inplace=True)``: the gradient before it is what autograd gives without a session."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5, inplace=True), nn.Hardtanh(inplace=True), nn.Linear(4, 1))
    x = torch.randn(16, 4)
    torch.manual_seed(3)
    hidden = model[0](x) * 1
    hidden.retain_grad()
    dropped = nn.functional.dropout(hidden, 0.5)
    dropped.retain_grad()
    model[3](nn.functional.hardtanh(dropped)).square().sum().backward()
    torch.manual_seed(3)
    with _record(model) as rec:
        model(x).square().sum().backward()
    assert torch.equal(rec["1"].grad_input["input"], hidden.grad)
    assert torch.equal(rec["2"].grad_input["input"], dropped.grad)
    assert torch.equal(rec["0"].grad_output, hidden.grad)


@pytest.mark.parametrize(
    "view", [lambda x: x.view(-1), lambda x: x[1:], lambda x: x.T], ids=["view", "slice", "transposed"]
)
def test_in_place_module_on_a_view(view: Any):
    """76, W: the input is a view of something else: the gradient has the view's shape and is that before the change."""

    class Triple(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(3)

    model = nn.Sequential(Triple())
    leaf = torch.ones(2, 3, requires_grad=True)
    given = view(leaf * 1)
    weight = torch.arange(given.numel(), dtype=torch.float32).view(given.shape)
    with _record(model, "0") as rec:
        (model[0](given) * weight).sum().backward()
    assert torch.equal(rec["0"].grad_input["x"], 3 * weight)
    assert torch.equal(view(leaf.grad), 3 * weight)


def test_input_that_is_used_elsewhere_after_an_in_place_module():
    """76, W: what uses the tensor later uses what the module made of it: that gradient goes through the module."""
    model = nn.Sequential(nn.Hardtanh(-10, 10, inplace=True))
    x = torch.ones(2, requires_grad=True)
    hidden = x * 1
    with _record(model, "0") as rec:
        out = model(hidden)
        (2 * out + 5 * hidden).sum().backward()
    assert rec["0"].grad_input["input"].tolist() == [7, 7]
    assert x.grad.tolist() == [7, 7]


def test_input_that_was_used_before_an_in_place_module_is_said_to_be():
    """76, D: the gradient is then that of the tensor as it came, earlier uses included, and the record says so."""

    class Triple(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(3)

    model = nn.Sequential(Triple())
    x = torch.ones(2, requires_grad=True)
    hidden = x * 1
    with _record(model, "0") as rec:
        before = 5 * hidden
        (model(hidden) + before).sum().backward()
    (row,) = [row for row in rec.table("values").to_pylist() if row["kind"] == "grad_input"]
    assert rec["0"].grad_input["x"].tolist() == [8, 8]
    assert "earlier uses of it included" in row["note"]


def test_replaced_gradient_of_an_input_changes_the_share_through_the_module_only():
    """76, W: an edit of ``grad_input`` leaves what the tensor gets from elsewhere alone."""
    model = nn.Sequential(_linear(3.0))
    x = torch.ones(1, 1, requires_grad=True)
    with th.hooks(model) as hooks:
        hooks.backward("0", lambda module, grad_input, grad_output: (grad_input[0] * 100,))
        (model(x) + 10 * x).sum().backward()
    assert x.grad.item() == 310


def test_no_aliases_where_no_gradient_is_tracked():
    """76, W: under ``no_grad`` the module gets the very input, also one that turns gradients on for itself."""

    class Force(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return torch.autograd.grad(x.square().sum(), x)[0]

    model = Force()
    x = torch.tensor([3.0], requires_grad=True)
    with _record(model), torch.no_grad():
        assert model(x).item() == 6
