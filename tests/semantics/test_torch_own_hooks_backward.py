"""The user's own torch backward hooks on modules behave inside a session as they do outside of one."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

KINDS = pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])


def _register(module: nn.Module, kind: str, hook: Any) -> Any:
    return getattr(module, f"register_{kind}_hook")(hook)


class TwoInputs(nn.Module):
    def forward(self, *inputs: Any) -> Any:
        tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
        return sum(factor * one for factor, one in enumerate(tensors, start=2))


@KINDS
def test_counts_removal_and_replacement(session: Any, kind: str):
    model = nn.Sequential(nn.Sigmoid())
    counts = {"first": 0, "second": 0}

    def counting(name: str) -> Any:
        def hook(module: nn.Module, *gradients: Any) -> None:
            counts[name] += 1
            assert all(isinstance(one, tuple) and len(one) == 1 for one in gradients)

        return hook

    x = torch.zeros(2, requires_grad=True)
    with session(model):
        first = _register(model[0], kind, counting("first"))
        model(x).sum().backward()
        assert counts == {"first": 1, "second": 0}
        second = _register(model[0], kind, counting("second"))
        model(x).sum().backward()
        assert counts == {"first": 2, "second": 1}
        second.remove()
        model(x).sum().backward()
        assert counts == {"first": 3, "second": 1}
        first.remove()
        x.grad = None
        _register(model[0], kind, lambda module, *gradients: (gradients[0][0] * 3,))
        model(x).sum().backward()
        assert x.grad.tolist() == [0.75, 0.75]


def test_pre_hook_may_zero_the_gradient_and_the_post_hook_sees_it(session: Any):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    seen: list[Any] = []
    model[0].register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 0,))
    model[0].register_full_backward_hook(
        lambda module, grad_input, grad_output: seen.append((grad_input[0], grad_output[0]))
    )
    x = torch.ones(1, 2, requires_grad=True)
    with session(model):
        model(x).sum().backward()
    ((grad_input, grad_output),) = seen
    assert grad_output.tolist() == [[0, 0]]
    assert grad_input.tolist() == [[0, 0]]
    assert x.grad.tolist() == [[0, 0]]


def test_batch_norm_and_functions_of_c(session: Any):
    model = nn.Sequential(nn.BatchNorm1d(3))
    shapes: list[Any] = []
    with session(model):
        model[0].register_full_backward_hook(
            lambda module, grad_input, grad_output: shapes.append(
                (len(grad_input), grad_input[0].shape, grad_output[0].shape)
            )
        )
        model(torch.randn(4, 3, requires_grad=True)).square().sum().backward()
    assert shapes == [(1, (4, 3), (4, 3))]


def test_wrong_number_of_gradients_is_refused(session: Any):
    model = nn.Sequential(nn.Sigmoid())
    x = torch.zeros(2, requires_grad=True)
    with session(model):
        handle = model[0].register_full_backward_hook(
            lambda module, grad_input, grad_output: (grad_input[0], grad_input[0])
        )
        with pytest.raises(RuntimeError, match="got 2, but expected 1"):
            model(x).sum().backward()
        handle.remove()
        model[0].register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0],) * 2)
        with pytest.raises(RuntimeError, match="got 2, but expected 1"):
            model(x).sum().backward()


def test_flags_of_inputs_are_kept(session: Any):
    model = nn.Sequential(TwoInputs())
    flags: list[list[bool]] = []
    model[0].register_full_backward_hook(lambda *_: None)
    model[0].register_forward_pre_hook(lambda module, args: flags.append([one.requires_grad for one in args]))
    with session(model):
        model[0](torch.ones(1, requires_grad=True), torch.ones(1))
        model[0](torch.ones(1), torch.ones(1, requires_grad=True))
    assert flags == [[True, False], [False, True]]


def test_inputs_without_gradient_and_other_arguments_have_none(session: Any):
    model = nn.ModuleDict({"a": TwoInputs()})
    seen: list[Any] = []
    model["a"].register_full_backward_hook(
        lambda module, grad_input, grad_output: seen.append(
            [
                None if one is None else one.item() or None for one in grad_input
            ]  # 0 or None, as the version of torch has it
        )
    )
    with session(model):
        one, other = torch.ones(1, requires_grad=True), torch.ones(1)
        model["a"](one, other).backward()
        model["a"](other, one).backward()  # the last argument alone needs one
        model["a"]("text", one, None, 3).backward()
    assert seen == [[2, None], [None, 3], [None, 2, None, None]]


def test_input_that_needs_no_gradient(session: Any):
    model = nn.Sequential(nn.Linear(2, 1))
    seen: list[Any] = []
    handle = model[0].register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_input))
    with session(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the hook will fire without gradients of inputs
        model(torch.ones(1, 2)).sum().backward()
        assert seen == [(None,)]
        handle.remove()
        model[0].register_full_backward_hook(lambda module, grad_input, grad_output: (torch.ones(1, 2),))
        with pytest.raises(RuntimeError, match="should always return None"):
            model(torch.ones(1, 2)).sum().backward()


def test_in_place_changes_around_a_hooked_module_are_errors_of_torchs(session: Any):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_full_backward_hook(lambda *_: None)
    with session(model):
        out = model[0](torch.ones(1, 2, requires_grad=True))
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            out.add_(1)
        mixed = nn.Sequential(nn.ReLU(inplace=True))
        mixed[0].register_full_backward_hook(lambda *_: None)
    with session(mixed), pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        mixed(torch.ones(2, requires_grad=True) * 1)


def test_legacy_hooks_warn_as_before_and_do_not_mix(session: Any):
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor | None = None) -> Any:
            return a * 2 if b is None else (a * 2, b * 3)

    model = nn.Sequential(Two())
    x = torch.ones(2, requires_grad=True)
    with session(model):
        model[0].register_backward_hook(lambda *_: None)
        with pytest.warns(FutureWarning, match="outputs are generated by different autograd Nodes"):
            model[0](x, x)
        with pytest.raises(RuntimeError, match="regular backward hooks and full backward hooks"):
            model[0].register_full_backward_hook(lambda *_: None)


def test_hook_on_one_of_several_outputs_and_sizes(session: Any):
    class Outputs(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + y, torch.cat([x, y])

    model = nn.ModuleList([Outputs()])
    shapes: list[Any] = []

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        shapes.append(
            [[None if one is None else tuple(one.shape) for one in side] for side in (grad_input, grad_output)]
        )

    with session(model):
        model[0].register_full_backward_hook(hook)
        first, second = model[0](torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True))
        second.sum().backward()
        first, second = model[0](torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True))
        (first.sum() + second.sum()).backward()
    assert shapes == [[[(2,), (2,)], [None, (4,)]], [[(2,), (2,)], [(2,), (4,)]]]


def test_double_backward_through_hooked_modules(session: Any):
    model = nn.Sequential(nn.Tanh())
    counts: list[int] = []
    x = torch.tensor([0.5], requires_grad=True)
    truth = torch.autograd.functional.hessian(lambda one: torch.tanh(one).sum(), x.detach())
    model[0].register_full_backward_hook(lambda *_: counts.append(1))
    with session(model):
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert len(counts) == 1
        gradient.sum().backward()
    assert torch.allclose(x.grad, truth.flatten())


# --- state dicts, copies, lifetime ---------------------------------------------------------------------------------------
def test_state_dict_hooks(session: Any):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    told: list[Any] = []

    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = model

        def before(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            told.append(("before", type(module).__name__, prefix))

    owner = Owner()
    keys = list(owner.state_dict())
    with session(owner):
        handles = [
            model.register_load_state_dict_pre_hook(owner.before),
            model.register_load_state_dict_post_hook(lambda module, incompatible: incompatible.missing_keys.clear()),
        ]
        assert list(owner.state_dict()) == keys
        state = owner.state_dict()
        owner.load_state_dict(state)
        assert told == [("before", "Sequential", "child.")]
        del state["child.0.bias"]
        owner.load_state_dict(state)  # the post hook takes the missing key off the list
        for handle in handles:
            handle.remove()
        with pytest.raises(RuntimeError, match=r"Missing key.*child\.0\.bias"):
            owner.load_state_dict(state)


def _doubling(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def test_hooks_of_the_user_are_copied_and_pickled_along(session: Any):
    model = nn.Sequential(nn.Identity())
    model[0].register_forward_hook(_doubling)
    x = torch.ones(1)
    with session(model):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other(x).item() == 2
            other[0].register_forward_hook(_doubling)
            assert other(x).item() == 4
        assert model(x).item() == 2


def test_old_pickles_without_newer_hook_tables_accept_hooks(session: Any):
    state = nn.Linear(1, 1).__getstate__() if hasattr(nn.Linear, "__getstate__") else dict(nn.Linear(1, 1).__dict__)
    for name in (
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
        "_backward_pre_hooks",
        "_state_dict_pre_hooks",
    ):
        state.pop(name, None)
    old = nn.Linear.__new__(nn.Linear)
    old.__setstate__(state)
    model = nn.Sequential(old)
    fired: list[str] = []
    with session(model):
        old.register_forward_hook(lambda *_: fired.append("forward"))
        old.register_full_backward_pre_hook(lambda *_: fired.append("backward"))
        model(torch.ones(1, 1, requires_grad=True)).sum().backward()
    assert fired == ["forward", "backward"]


def test_a_module_with_hooks_of_the_user_dies_without_the_garbage_collector(session: Any):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].register_load_state_dict_pre_hook(lambda module, *_: None)
    model[0].register_forward_hook(lambda *_: None)
    with session(model) as opened:
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    alive = weakref.ref(model[0])
    del opened
    gc.collect()
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
