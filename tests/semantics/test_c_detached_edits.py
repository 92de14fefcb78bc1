"""Section C, row 67: an edit that returns a detached value stops training upstream; that is told, once, with the module's name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.errors import TenterhookWarning


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def _no_grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.no_grad()(fn)


def _detach_in_place(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.detach_()


DETACHED = "its new value was detached: what comes before is not trained by it"
DETACHING = {
    "detach": lambda module, args, output: output.detach() * 2,
    "no_grad": _no_grad(lambda module, args, output: output * 2),
    "constant": lambda module, args, output: torch.zeros_like(output),
    "in place": _detach_in_place,
}


@pytest.mark.parametrize("how", DETACHING)
def test_detached_output_is_told_once(how: str):
    """67, D: one warning with module and callback; upstream has no gradient, downstream has one."""
    model = _model()
    with th.hooks(model) as hooks:
        hooks.forward("0", DETACHING[how])
        with pytest.warns(
            TenterhookWarning, match=r"forward of 0 \(.*\): the new value is detached.*\n.*allow=\"detached\""
        ) as said:
            out = model(torch.randn(4, 2))
            model(torch.randn(4, 2))
        out.sum().backward()
        assert DETACHED in str(hooks)
    assert str(hooks).count(DETACHED) == len(said) == 1
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


def test_detached_input_and_part_of_a_nested_output_are_told():
    """67, D: the same for a new input, by keyword too, and for one slot of a dict."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"a": self.lin(x) * scale, "b": x * scale}

    model = nn.ModuleList([nn.Linear(2, 2), Heads()])
    x = torch.randn(1, 2)

    def run() -> dict[str, torch.Tensor]:
        h = model[0](x)
        return model[1](h, scale=h.mean())

    with th.hooks(model) as hooks:
        hooks.forward("1", lambda module, args, output: {**output, "b": output["b"].detach()})
        with pytest.warns(TenterhookWarning, match=r'forward of 1 .* at \["b"\]'):
            run()
    with th.hooks(model) as hooks:
        hooks.forward_pre(
            "1", lambda module, args, kwargs: (args, {"scale": kwargs["scale"].detach()}), with_kwargs=True
        )
        with pytest.warns(TenterhookWarning, match=r"forward_pre of 1 .*scale"):
            run()


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (DETACHING["detach"], {"allow": "detached"}),
        (lambda module, args, output: output * 2, {}),
        (lambda module, args, output: output + output.detach(), {}),
        (lambda module, args, output: output.mul_(2), {}),
        (lambda module, args, output: None, {}),
    ],
    ids=["allowed", "times 2", "partly", "in place", "observer"],
)
def test_nothing_is_said_where_nothing_is_cut_or_it_is_meant(fn: Callable[..., Any], options: dict[str, Any]):
    """67, D: no false alarm."""
    model = _model()
    with warnings.catch_warnings(), th.hooks(model) as hooks:
        warnings.simplefilter("error")
        hooks.forward("0", fn, **options)
        model(torch.randn(4, 2)).sum().backward()
        assert DETACHED not in str(hooks)


def test_nothing_is_said_where_no_gradient_is_tracked():
    """67, D: under no_grad, in inference mode and for frozen layers there is nothing to cut."""
    model = _model()
    x = torch.randn(4, 2)
    with warnings.catch_warnings(), th.hooks(model) as hooks:
        warnings.simplefilter("error")
        hooks.forward("*", DETACHING["detach"])
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)
        model.requires_grad_(False)
        model(x)


def test_value_and_gradient_of_an_edit_are_exact():
    """67, W: ``o * 2``: tanh(2 w x) and its derivative, 1.8303... times the input's share, to the last bit."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh())
    nn.init.constant_(model[0].weight, 0.3)
    x = torch.tensor([[0.7]], requires_grad=True)
    with th.hooks(model) as hooks:
        hooks.forward("0", lambda module, args, output: output * 2)
        out = model(x)
        out.sum().backward()
    weight = torch.tensor([[0.3]], requires_grad=True)
    truth_x = torch.tensor([[0.7]], requires_grad=True)
    truth = torch.tanh(truth_x @ weight.T * 2)
    truth.sum().backward()
    assert torch.equal(out, truth)
    assert torch.equal(x.grad, truth_x.grad)
    assert torch.equal(model[0].weight.grad, weight.grad)
