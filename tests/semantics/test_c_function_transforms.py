"""Section C, row 47: ``torch.func``: calls are seen, values measured without ``.item()``, results unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import tenterhook as th

# torch compiles decompositions for forward mode with its own deprecated torch.jit.script
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is")

ALL = ["input", "output", "grad_input", "grad_output", "param_grad"]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def _loss(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda parameters, x: functional_call(model, parameters, (x,)).sum()


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": lambda model, x: grad(_loss(model))(_parameters(model), x[0]),
    "vmap of grad": lambda model, x: vmap(grad(_loss(model)), (None, 0))(_parameters(model), x),
    "vmap": lambda model, x: vmap(model)(x),
    "vmap of vmap": lambda model, x: vmap(vmap(model))(x.view(2, 2, 2)),
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),)),
    "vjp": lambda model, x: vjp(model, x)[1](torch.ones(4, 1)),
    "jacrev": lambda model, x: jacrev(model)(x[0]),
    "jacfwd": lambda model, x: jacfwd(model)(x[0]),
    "hessian": lambda model, x: hessian(lambda one: model(one).sum())(x[0]),
    "functional_call": lambda model, x: functional_call(model, _parameters(model), (x,)),
}


@pytest.mark.parametrize("kinds", [None, ALL], ids=["default", "all kinds"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_run_as_they_do_without_a_session(transform: str, kinds: list[str] | None):
    """47, W: same results to the last bit, and the calls, shapes and statistics of what ran are recorded."""
    model, x = _model(), torch.randn(4, 2)
    run = TRANSFORMS[transform]
    truth = run(model, x)
    with th.record(model, kinds=kinds, tensors=True, on_error="raise") as rec, th.hooks(model) as hooks:
        seen = hooks.forward("**", lambda module, args, output: None)
        hooks.backward("**", lambda module, grad_input, grad_output: None)
        result = run(model, x)
    leaves = list(zip(tree_leaves(truth), tree_leaves(result), strict=True))
    assert all(torch.equal(one, other) for one, other in leaves)
    calls = [call for call in rec.order() if call.phase == "forward"]
    assert sorted({call.path for call in calls}) == ["", "0", "1", "2"]
    assert seen.fired == len(calls) == 4
    outputs = [row for row in rec.table("values").to_pylist() if row["kind"] == "output"]
    assert len(outputs) == 4
    assert all(row["mean"] is not None and row["digest"] is not None for row in outputs)


@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "vjp", "jacrev"])
def test_output_gradients_come_under_reverse_mode(transform: str):
    """47, W: one gradient for each call, in the order that nests."""
    model, x = _model(), torch.randn(4, 2)
    with th.record(model, on_error="raise") as rec, th.hooks(model) as hooks:
        handle = hooks.backward("1", lambda module, grad_input, grad_output: None)
        TRANSFORMS[transform](model, x)
    assert [call.path for call in rec.order() if call.phase == "backward"] == ["", "2", "1", "0"]
    assert handle.fired == 1
    assert rec.coverage.complete


def test_per_sample_shape_is_told_apart_from_the_batch_in_the_statistics():
    """47, D: under ``vmap`` a call has the shape of one sample; statistics and tensor are of the batch, and the note says so."""
    model, x = _model(), torch.randn(4, 2)
    for transform in ("vmap", "vmap of grad"):
        with th.record(model, tensors=True, on_error="raise") as rec:
            TRANSFORMS[transform](model, x)
        (row,) = [row for row in rec.table("values").to_pylist() if row["path"] == "" and row["kind"] == "output"]
        truth = model(x)
        assert row["shape"] == [1]
        assert row["note"] == "statistics over the whole vmap batch"
        assert row["numel"] == 4
        assert row["mean"] == pytest.approx(truth.mean().item(), abs=1e-6)
        assert torch.allclose(rec[""].output, truth)


def test_the_gradient_of_an_output_under_vmap_of_grad_is_that_of_one_sample():
    """47, W: one call, of shape ``(1,)``, whose gradient is 1 for each sample."""
    model, x = _model(), torch.randn(4, 2)
    with th.record(model, tensors=True, on_error="raise") as rec, th.hooks(model) as hooks:
        shapes: list[tuple[int, ...]] = []
        hooks.backward_pre("2", lambda module, grad_output: shapes.append(tuple(grad_output[0].shape)))
        TRANSFORMS["vmap of grad"](model, x)
    rows = [row for row in rec.table("values").to_pylist() if (row["path"], row["kind"]) == ("2", "grad_output")]
    assert [(row["call"], row["shape"], row["mean"], row["note"]) for row in rows] == [
        (0, [1], 1.0, "statistics over the whole vmap batch")
    ]
    assert shapes == [(1,)]


def test_gradients_of_a_backward_pass_after_vmap():
    """47, W: ``vmap`` inside, an ordinary backward outside: gradients reach the call, for the whole batch."""
    model, x = _model(), torch.randn(4, 2)
    with th.record(model, tensors=True, on_error="raise") as rec:
        vmap(model)(x).sum().backward()
    assert rec["2"].grad_output.flatten().tolist() == [1, 1, 1, 1]
    assert rec["0"].grad_output.shape == (4, 3)
    assert rec.coverage.complete


def test_forward_mode_has_no_gradients_and_says_so():
    """47, D: ``jvp`` and ``jacfwd`` run no backward pass."""
    model, x = _model(), torch.randn(4, 2)
    model.requires_grad_(False)
    for transform in ("jvp", "jacfwd"):
        with th.record(model, on_error="raise") as rec:
            TRANSFORMS[transform](model, x)
        assert dict(rec.coverage.missing)["1"].startswith("no gradient: ")


def test_an_edit_applies_inside_a_transform():
    """47, W: a forward hook's new value is differentiated by ``grad`` and by ``vmap(grad)``."""
    model, x = _model(), torch.randn(4, 2)
    tripled = nn.Sequential(model[0], model[1], nn.Linear(3, 1))
    tripled[2].load_state_dict({name: value * 3 for name, value in model[2].state_dict().items()})
    for per_sample in (False, True):

        def run(net: nn.Module, per_sample: bool = per_sample) -> torch.Tensor:
            gradient = grad(lambda one: net(one).sum())
            return vmap(gradient)(x) if per_sample else gradient(x[0])

        with th.hooks(model) as hooks:
            hooks.forward("2", lambda module, args, output: output * 3)
            edited = run(model)
        assert torch.allclose(edited, run(tripled))


def test_dual_tensors_of_forward_mode_keep_their_tangents():
    """47, W: ``forward_ad`` without ``torch.func``: tangents go through recorded modules, aliases included."""
    from torch.autograd import forward_ad

    model, x = _model(), torch.randn(4, 2, requires_grad=True)

    def tangent() -> torch.Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent.clone()

    truth = tangent()
    with th.record(model, kinds=ALL, on_error="raise"):
        assert torch.equal(tangent(), truth)
