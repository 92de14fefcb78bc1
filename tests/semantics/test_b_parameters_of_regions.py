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
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


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


class Direct(nn.Module):
    """Uses a layer's weight without calling the layer: in regions and, before or after them, outside."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.where = where
        self.layer = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)

    def use(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.layer.weight).tanh()

    def region(self, fn: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(fn, x, use_reentrant=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "outside first":
            return self.other(self.use(self.region(self.use, x)))
        if self.where == "region first":
            return self.other(self.region(self.use, self.use(x)))
        if self.where == "nested":
            return self.use(self.region(lambda value: self.use(self.region(self.use, value)), x))
        if self.where == "two regions":
            return self.other(self.region(self.use, self.region(self.use, x)))
        return self.layer(self.region(self.use, x))  # "called outside"


DIRECT = pytest.mark.parametrize("where", ["outside first", "region first", "nested", "two regions", "called outside"])


@DIRECT
@pytest.mark.parametrize("accumulated", [False, True])
def test_a_parameter_that_is_used_directly_in_a_region_has_one_gradient_a_pass(where: str, accumulated: bool):
    """11, W: no module is called in the region, so that no hook of ours runs in it; the backward pass tells all the same."""
    model = Direct(where)
    clean = _gradients(model, _x())
    got: list[torch.Tensor] = []
    with th.hooks(model) as hooks:
        handle = hooks.param_grad(
            "layer.weight", lambda name, gradient: got.append(gradient.clone()), accumulated=accumulated
        )
        for _ in range(2):
            seen = _gradients(model, _x())
    assert handle.fired == len(got) == 2
    assert all(torch.equal(gradient, clean["layer.weight"]) for gradient in got)
    assert torch.equal(seen["layer.weight"], clean["layer.weight"])


@DIRECT
def test_a_parameter_that_is_used_directly_in_a_region_is_recorded_once(where: str):
    """11, W, same kind: one row a pass, of the whole gradient, and what is asked for is edited once."""
    model = Direct(where)
    clean = _gradients(model, _x())
    with th.record(model, kinds=["param_grad"], tensors=True) as rec:
        _gradients(model, _x())
    rows = [row for row in rec.table("values").to_pylist() if row["path"] == "layer" and "weight" in row["slot"]]
    assert len(rows) == 1
    assert rows[0]["absmax"] == clean["layer.weight"].abs().max().item()
    with th.edit(model) as edit:
        edit.param_grad("layer.weight", th.edits.scale(2.0))
        seen = _gradients(model, _x())
    assert torch.equal(seen["layer.weight"], clean["layer.weight"] * 2)
    assert all(torch.equal(seen[name], clean[name]) for name in clean if name != "layer.weight")


def test_a_graph_from_before_the_hook_is_known_once_a_session_was_there():
    """11, W, same kind: the region was run in another session than the one that differentiates it."""
    model = Direct("outside first")
    clean = _gradients(model, _x())
    model.zero_grad()
    with th.hooks(model):
        out = model(_x()).square().sum()
    with th.hooks(model) as hooks:
        handle = hooks.param_grad("layer.weight", lambda name, gradient: None)
        out.backward()
    assert handle.fired == 1
    assert torch.equal(model.layer.weight.grad, clean["layer.weight"])


@pytest.mark.parametrize("kind", ["hooks", "record"])
def test_the_order_of_gradients_does_not_depend_on_regions_of_other_models(kind: str):
    """11 and 36, W: a region of another model that is alive somewhere delays nothing in this one."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    other = Shared(True, "outside")

    def order() -> list[tuple[str, str]]:
        seen: list[tuple[str, str]] = []
        if kind == "hooks":
            with th.hooks(model) as hooks:
                hooks.param_grad("**", lambda name, gradient: seen.append(("param_grad", name)))
                hooks.backward("**", lambda module, grad_input, grad_output: seen.append((type(module).__name__, "")))
                _gradients(model, _x())
        else:
            with th.record(model, kinds=["param_grad", "grad_output", "grad_input"]) as rec:
                _gradients(model, _x())
            rows = sorted(rec.table("values").to_pylist(), key=lambda row: row["seq"])
            seen += [(row["path"], row["kind"] + row["slot"]) for row in rows]
        return seen

    alone = order()
    with th.record(other):
        alive = other(_x())
        assert order() == alone
    assert order() == alone
    alive.sum().backward()


def test_nothing_of_checkpointing_is_replaced_outside_of_sessions():
    """What tells of regions is there for a session's length, also where sessions overlap."""
    from torch.utils.checkpoint import CheckpointFunction

    bare = CheckpointFunction.__dict__["forward"]
    model = Shared(True, "none")
    first, second = th.record(model).start(), th.record(model).start()
    assert CheckpointFunction.__dict__["forward"] is not bare
    first.close()
    assert CheckpointFunction.__dict__["forward"] is not bare
    second.close()
    assert CheckpointFunction.__dict__["forward"] is bare
