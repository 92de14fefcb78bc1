"""Section B, rows 11 and 42: the gradient of a parameter that several checkpointed regions share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def _x() -> torch.Tensor:
    return torch.tensor([[0.3, -0.7]], requires_grad=True)


class Shared(nn.Module):
    """A layer in three regions and outside; a head that shares its weight, outside or in a region of its own."""

    def __init__(self, reentrant: bool, head: str):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.lin = nn.Linear(2, 2)
        self.tail = nn.Linear(2, 2)
        self.where = head
        if head != "none":
            self.head = nn.Linear(2, 2)
            self.head.weight = self.lin.weight

    def region(self, fn: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(fn, x, use_reentrant=self.reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "region":
            x = self.region(self.head, x)
        for _ in range(3):
            x = self.region(lambda value: self.region(self.lin, value).tanh(), x)
        x = self.tail(self.lin(x))
        return self.head(x) if self.where == "outside" else x


def _gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@REENTRANT
@pytest.mark.parametrize("head", ["none", "outside", "region"])
@pytest.mark.parametrize("accumulated", [False, True])
def test_param_grad_fires_once_a_pass_with_the_whole_gradient(reentrant: bool, head: str, accumulated: bool):
    """11 and 42, W: whatever number of regions a parameter is used in, nested ones and the outside included."""
    model = Shared(reentrant, head)
    got: list[tuple[str, torch.Tensor]] = []
    clean = _gradients(model, _x())
    with th.hooks(model) as hooks:
        handle = hooks.param_grad(
            "**", lambda name, gradient: got.append((name, gradient.clone())), accumulated=accumulated
        )
        for _ in range(2):
            seen = _gradients(model, _x())
            assert sorted(name for name, _ in got) == sorted(clean)
            for name, gradient in got:
                assert torch.equal(gradient, seen[name])
                assert torch.equal(gradient, clean[name])
            got.clear()
    assert handle.fired == 2 * len(clean)
    assert all(not (parameter._backward_hooks or {}) for parameter in model.parameters())


@REENTRANT
def test_a_gradient_that_came_in_parts_is_replaced_as_a_whole(reentrant: bool):
    """The new gradient is what is in ``.grad``, added to what was there; edits see it in order."""
    model = Shared(reentrant, "outside")
    clean = _gradients(model, _x())
    with th.hooks(model) as hooks:
        hooks.param_grad("lin.weight", lambda name, gradient: gradient.clamp(-0.1, 0.1))
        hooks.param_grad("lin.weight", lambda name, gradient: gradient * 2)
        seen = _gradients(model, _x())
        clipped = clean["lin.weight"].clamp(-0.1, 0.1) * 2
        assert torch.equal(seen["lin.weight"], clipped)
        assert all(torch.equal(seen[name], clean[name]) for name in clean if name != "lin.weight")
        model(_x()).square().sum().backward()
        assert torch.equal(model.lin.weight.grad, clipped + clipped)


@REENTRANT
@pytest.mark.parametrize("where", ["in the region", "outside"])
def test_a_pass_that_fails_leaves_no_part_behind(reentrant: bool, where: str):
    """The next pass has its own gradient, and nothing of the one that raised."""
    model = Shared(reentrant, "none")
    clean = _gradients(model, _x())
    got: dict[str, torch.Tensor] = {}

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("boom")

    with th.hooks(model) as hooks:
        hooks.param_grad("**", lambda name, gradient: got.__setitem__(name, gradient.clone()))
        x = _x().requires_grad_()
        if where == "in the region":
            handle = model.lin.bias.register_hook(fail)
            with pytest.raises(ValueError, match="boom"):
                model(x).sum().backward()
            handle.remove()
        else:
            before = x * 1
            before.register_hook(fail)
            with pytest.raises(ValueError, match="boom"):
                checkpoint(model.lin, before, use_reentrant=reentrant).sum().backward()
        got.clear()
        seen = _gradients(model, _x())
    assert all(torch.equal(got[name], clean[name]) and torch.equal(seen[name], clean[name]) for name in clean)
