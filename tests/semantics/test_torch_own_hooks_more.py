"""PyTorch's own promises on hooks (SEMANTICS.md §4): state, nodes, saved values; under no session, an empty one, and recordings."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Two(nn.Module):
    """A child, and a second output that may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(self.child(x).split(1, dim=-1))


def _x() -> Tensor:
    return torch.ones(1, 2, requires_grad=True)


def test_state_dict_hooks_of_a_child_see_its_prefix(session: Any):
    """Pre hooks before the parameters are read, post hooks after; a method as hook; all can be removed."""

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(2, 2)
            self.seen: list[str] = []
            self.child.register_load_state_dict_pre_hook(self.before_load)

        def before_load(self, module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
            assert module is self.child
            self.seen.append(prefix)

    model = Owner()
    pre: list[str] = []
    post: list[list[str]] = []
    with session(model):
        first = model.child.register_state_dict_pre_hook(lambda module, prefix, keep_vars: pre.append(prefix))
        second = model.child.register_state_dict_post_hook(
            lambda module, state, prefix, metadata: post.append(list(state))
        )
        state = model.state_dict()
        first.remove()
        second.remove()
        model.load_state_dict(model.state_dict())
    assert pre == ["child."]
    assert post == [list(state)] == [["child.weight", "child.bias"]]
    assert model.seen == ["child."]


def test_load_hooks_may_rename_keys_and_a_strict_load_shows_what_is_left(session: Any):
    model = nn.Sequential(nn.Linear(2, 2))
    old = {f"0.old_{name.partition('.')[2]}": value for name, value in model.state_dict().items()}
    with session(model):

        def rename(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            for key in [key for key in state if key.startswith(f"{prefix}old_")]:
                state[key.replace("old_", "")] = state.pop(key)

        handle = model[0].register_load_state_dict_pre_hook(rename)
        model.load_state_dict(dict(old))
        handle.remove()
        with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight.*\n.*Unexpected key.*0\.old_weight"):
            model.load_state_dict(dict(old))
        handle = model.register_load_state_dict_post_hook(lambda module, keys: keys.unexpected_keys.clear())
        with pytest.raises(RuntimeError, match="Missing key") as failed:
            model.load_state_dict(dict(old))
        assert "Unexpected" not in str(failed.value)
        handle.remove()


def test_a_parametrisation_by_hooks_goes_on_working(session: Any):
    """spectral_norm of old is a forward-pre hook of torch's own, with state."""

    def run(open_session: Any) -> list[Tensor]:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some versions call it deprecated
            model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2)), nn.Tanh())
        with open_session(model):
            out = model(_x())
            out.sum().backward()
            out = model(_x())
        return [out, model[0].weight_orig.grad, model[0].weight_u]

    assert all(map(torch.equal, run(session), run(lambda model: _nothing())))


def _nothing() -> Any:
    return contextlib.nullcontext()


def test_node_prehooks_of_several_outputs_have_none_for_those_unused(session: Any):
    model = Two()
    got: list[list[Any]] = []
    with session(model):
        first, second = model(_x())
        assert first.grad_fn is second.grad_fn
        first.grad_fn.register_prehook(
            lambda gradients: got.append([None if one is None else one.item() for one in gradients])
        )
        first.sum().backward(retain_graph=True)
        (first + 2 * second).sum().backward()
    assert got == [[1.0, None], [1.0, 2.0]]


def test_tensor_hooks_are_never_called_with_none(session: Any):
    """A function that has no gradient for one of its inputs, which needs none."""

    class HasNone(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x * 1, y * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            return gradients[0], None

    model = Two()
    came: list[Any] = []
    with session(model):
        outputs = HasNone.apply(model(_x())[0], torch.ones(1, 1))
        for output in outputs:
            output.register_hook(came.append)
        sum(outputs).sum().backward()
    assert [one.item() for one in came] == [1.0, 1.0]


def test_a_kept_gradient_makes_no_cycle(session: Any):
    model = Two()
    gc.collect()
    gc.disable()
    try:
        with session(model):
            out = model(_x())[0]
            out.retain_grad()
            out.sum().backward()
            assert out.grad is not None
            gone = weakref.ref(out)
            del out
            assert gone() is None
    finally:
        gc.enable()


def test_a_pack_hook_that_works_in_place_is_an_error_of_torchs(session: Any):
    model = nn.Sequential(nn.Tanh())
    with (
        session(model),
        pytest.raises(RuntimeError, match="modifying its input in place"),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.mul_(2), lambda tensor: tensor),
    ):
        model(_x() * 2)


def test_saved_values_have_hooks_of_their_own(session: Any):
    model = nn.Sequential(nn.Tanh())
    seen: list[str] = []
    x = _x()
    with session(model):
        out = model(x)
        out.grad_fn._raw_saved_result.register_hooks(
            lambda tensor: (seen.append("pack"), tensor)[1], lambda tensor: (seen.append("unpack"), tensor)[1]
        )
        out.sum().backward()
    assert seen == ["pack", "unpack"]
    torch.testing.assert_close(x.grad, 1 - torch.tanh(x.detach()) ** 2)


def test_full_backward_hooks_in_double_backward_see_each_pass(session: Any):
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    got: list[tuple[float, float]] = []
    with session(model):
        model[0].register_full_backward_hook(
            lambda module, grad_input, grad_output: got.append((grad_input[0].item(), grad_output[0].item()))
        )
        x = torch.ones(1, 1, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        gradient.sum().backward()
    assert got[0] == (18.0, 6.0)
    assert x.grad.item() == 18.0


def test_fused_and_quantised_copies_keep_hooks_of_the_user(session: Any):
    """Fusing keeps forward-pre hooks on the first module and forward hooks on the last."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU()).eval()
    seen: list[str] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append("pre"))
    model[2].register_forward_hook(lambda module, args, output: seen.append("post"))
    fused = torch.ao.quantization.fuse_modules(model, ["0", "1", "2"])
    x = torch.ones(1, 1, 2, 2)
    bare = fused(x)
    kept = seen[:]
    assert {"pre", "post"} == set(kept)
    seen.clear()
    with session(fused):
        assert torch.equal(fused(x), bare)
    assert seen == kept
