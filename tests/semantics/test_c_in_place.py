"""Section C, row 01: gradients before in-place operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _record(model: nn.Module, select: Any = None, **options: Any) -> Any:
    return th.record(model, select, **({"tensors": True, "on_error": "raise"} | options))


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU(inplace=True), nn.LeakyReLU(0.1, inplace=True), nn.Dropout(0.5, inplace=True), nn.Hardswish(inplace=True)],
    ids=lambda one: type(one).__name__,
)
def test_gradient_before_an_in_place_layer(activation: nn.Module):
    """01, W: no error, and the gradient of layer ``0`` is, bit for bit, what ``retain_grad`` gives."""
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 2))
    x = torch.randn(8, 4, requires_grad=True)
    torch.manual_seed(1)
    hidden = model[0](x)
    hidden.retain_grad()
    model[2](type(activation)(**_arguments(activation))(hidden * 1)).square().sum().backward()
    torch.manual_seed(1)
    with _record(model, kinds=["grad_output", "grad_input"]) as rec:
        model(x).square().sum().backward()
    assert torch.equal(rec["0"].grad_output, hidden.grad)
    assert torch.equal(rec["1"].grad_input["input"], hidden.grad)


def _arguments(activation: nn.Module) -> dict[str, float]:
    return {name: value for name in ("p", "negative_slope") if (value := getattr(activation, name, None)) is not None}


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 4), (2, 3, 4)),  # a view of a matrix product
        (nn.Flatten(), (2, 2, 3)),
        (nn.MaxPool1d(2), (2, 3, 4)),
        (nn.Unflatten(1, (2, 2)), (3, 4)),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, nn.Module) else None,
)
@pytest.mark.parametrize("edit", [False, True])
def test_gradient_of_a_layer_whose_output_is_a_view(layer: nn.Module, shape: tuple[int, ...], edit: bool):
    """01, W: an in-place layer after a view cuts the view and its hooks out of the graph; its gradient comes all the same."""
    model = nn.Sequential(nn.Linear(shape[-1], shape[-1]), layer, nn.ReLU(inplace=True))
    x = torch.randn(shape, requires_grad=True)
    hidden = layer(model[0](x) * 1)
    hidden = hidden * 1
    hidden.retain_grad()
    torch.relu(hidden).square().sum().backward()
    truth = x.grad.clone()
    x.grad = None
    got: list[Any] = []
    with _record(model, kinds=["grad_output", "grad_input"]) as rec, th.hooks(model) as hooks:
        hooks.backward_pre(
            "1", lambda module, grad_output: got.append(grad_output[0]) or ((grad_output[0] * 2,) if edit else None)
        )
        model(x).square().sum().backward()
    assert torch.equal(got[0], hidden.grad)
    assert torch.equal(rec["1"].grad_output, hidden.grad)
    assert torch.equal(rec["2"].grad_input["input"], hidden.grad)
    assert torch.allclose(x.grad, truth * 2 if edit else truth)
    assert rec.coverage.complete


def test_gradient_of_a_slice_changed_in_place():
    """01, W: a transposed slice as output: the gradient has the slice's shape, and 0 where the rest went elsewhere."""

    class Slice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, 1:].T

    model = nn.Sequential(nn.Linear(3, 3), Slice())
    with _record(model, "1") as rec:
        out = model(torch.randn(2, 3))
        out.mul_(torch.tensor([[2.0], [3.0]]))
        out.sum().backward()
    assert rec["1"].grad_output.tolist() == [[2, 2], [3, 3]]


def test_view_that_is_not_used_has_no_gradient_of_others():
    """01, D: an unused view of a tensor that is used otherwise gets none, changed in place later or not."""

    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.view(-1), x * 2

    model = nn.Sequential(nn.Linear(3, 3), Both())
    with _record(model, "1") as rec:
        model(torch.randn(2, 3))[1].sum().backward()
    assert rec["1"].grad_output[0] is None
    assert rec["1"].grad_output[1].tolist() == [[1, 1, 1]] * 2


def test_in_place_operator_in_a_functional_block_and_residual_add():
    """01, W: ``+=`` on a block's output, nested containers; outputs and gradients equal those without a recording."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.body(x)
            out += x
            return nn.functional.relu_(out)

    model = nn.Sequential(Residual(), Residual())
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    truth = model(x)
    truth.square().sum().backward()
    expected = [x.grad.clone(), *(parameter.grad.clone() for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    with _record(model, kinds=["input", "output", "grad_output", "grad_input"]) as rec, th.hooks(model) as hooks:
        hooks.backward("**", lambda module, grad_input, grad_output: None)
        out = model(x)
        out.square().sum().backward()
    assert torch.equal(out, truth)
    assert all(torch.equal(one, other.grad) for one, other in zip(expected, [x, *model.parameters()], strict=True))
    assert torch.equal(rec[""].grad_output, 2 * truth.detach())
    assert rec.coverage.complete
