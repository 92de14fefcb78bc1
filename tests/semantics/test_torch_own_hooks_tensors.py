"""The user's own hooks on tensors and graph nodes behave inside a session as they do outside of one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn


class Mul(nn.Module):
    """``x * weight``, its output the tensor that the tests put hooks on."""

    def __init__(self, weight: float = 2.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def _leaf(value: float = 1.0) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True)


def test_counts_removal_and_replacement(session: Any):
    model = Mul()
    x = _leaf(3.0)
    counts = [0, 0]

    def counting(place: int, factor: float) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            counts[place] += 1
            assert gradient.item() == factor

        return hook

    with session(model):
        z = model(x) + 0
        z.register_hook(counting(0, 1))
        z.backward(retain_graph=True)
        assert counts == [1, 0]
        second = z.register_hook(counting(1, 1))
        z.backward(retain_graph=True)
        assert counts == [2, 1]
        second.remove()
        z.backward(retain_graph=True)
        assert counts == [3, 1]
        x.grad = None
        z.register_hook(lambda gradient: gradient * 10)
        z.register_hook(lambda gradient: gradient + 1)
        z.backward()
        assert x.grad.item() == 22


def test_hook_on_a_modules_output_sees_the_gradient_and_may_replace_it(session: Any):
    model = nn.Sequential(Mul(), Mul(3.0))
    x = _leaf()
    seen: list[float] = []
    with session(model):
        hidden = model[0](x)
        hidden.register_hook(lambda gradient: seen.append(gradient.item()))
        hidden.register_hook(lambda gradient: gradient * 10)
        hidden.register_hook(lambda gradient: seen.append(gradient.item()))
        model[1](hidden).backward()
    assert seen == [3, 30]
    assert x.grad.item() == 60


def test_callable_objects_without_a_name_and_wrong_returns(session: Any):
    class Hook:
        def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    model = Mul()
    x = _leaf()
    with session(model):
        out = model(x)
        out.register_hook(Hook())
        out.backward()
        assert x.grad.item() == 4
        out = model(x)
        out.register_hook(lambda gradient: "text")
        with pytest.raises(TypeError):
            out.backward()


def test_hooks_are_not_called_for_what_is_not_used(session: Any):
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, x * 3

    model = Two()
    called: list[str] = []
    with session(model):
        first, second = model(_leaf())
        first.register_hook(lambda gradient: called.append("first"))
        second.register_hook(lambda gradient: called.append("second"))
        second.backward()
    assert called == ["second"]


def test_order_of_tensor_node_and_accumulation_hooks(session: Any):
    model = Mul()
    order: list[str] = []
    with session(model):
        weight = model.weight
        out = model(_leaf(3.0))
        weight.register_hook(lambda gradient: order.append("tensor"))
        node = weight.view_as(weight).grad_fn.next_functions[0][0]
        node.register_prehook(lambda gradients: order.append("node pre"))
        node.register_hook(lambda *_: order.append("node post"))
        weight.register_post_accumulate_grad_hook(lambda one: order.append(f"accumulated {one.grad.item():g}"))
        out.backward()
        assert order == ["tensor", "node pre", "accumulated 3", "node post"]
        order.clear()
        torch.autograd.grad(model(_leaf(3.0)), weight)
        assert order == ["tensor"]


def test_post_accumulate_hook_may_step_and_clear(session: Any):
    model = Mul()

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.5 * parameter.grad
        parameter.grad = None

    with session(model):
        handle = model.weight.register_post_accumulate_grad_hook(step)
        model(_leaf(1.0)).backward()
        assert model.weight.item() == 1.5
        assert model.weight.grad is None
        handle.remove()
        model(_leaf(1.0)).backward()
        assert model.weight.grad.item() == 1


def test_post_accumulate_hook_is_for_leaves(session: Any):
    model = Mul()
    with session(model):
        out = model(_leaf())
        with pytest.raises(RuntimeError, match="leaf"):
            out.register_post_accumulate_grad_hook(lambda one: None)


def test_retain_grad_accumulates_and_sees_what_hooks_made(session: Any):
    model = Mul()
    x = _leaf()
    with session(model):
        out = model(x)
        out.retain_grad()
        out.register_hook(lambda gradient: gradient * 2)
        out.register_hook(lambda gradient: gradient * 3)
        (out * 1).backward(retain_graph=True)
        assert out.grad.item() == 6
        (out * 1).backward()
        assert out.grad.item() == 12
        x.retain_grad()
        assert x.grad.item() == 24


def test_hooks_stay_with_the_version_that_they_were_put_on(session: Any):
    model = Mul(1.0)
    seen: list[tuple[str, float]] = []
    with session(model):
        out = model(_leaf())
        out.register_hook(lambda gradient: seen.append(("before", gradient.item())))
        out.mul_(3)
        out.register_hook(lambda gradient: seen.append(("after", gradient.item())))
        out.retain_grad()
        (out * 2).backward()
    assert seen == [("after", 2), ("before", 6)]
    assert out.grad.item() == 2


def test_node_hooks_chain_and_can_be_removed_while_running(session: Any):
    model = nn.Sequential(Mul(), Mul())
    x = _leaf()
    handles: list[Any] = []
    seen: list[float] = []

    def first(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        handles[0].remove()
        return (gradients[0] * 10,)

    with session(model):
        out = model[0](x)
        handles.append(out.grad_fn.register_prehook(first))
        out.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0].item()))
        model[1](out).backward(retain_graph=True)
        x.grad = None
        out.backward()
    assert seen == [20, 1]
    assert x.grad.item() == 2


def test_multi_grad_hooks_wait_for_all(session: Any):
    class Three(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x * 1, x * 1, x * 1

    model = Three()
    together: list[Any] = []
    any_one: list[float] = []
    with session(model):
        for loss in (lambda a, b, c: 2 * a + 3 * b, lambda a, b, c: 2 * a, lambda a, b, c: 0 * b + c):
            outputs = model(_leaf())
            torch.autograd.graph.register_multi_grad_hook(
                outputs, lambda gradients: together.append([None if one is None else one.item() for one in gradients])
            )
            torch.autograd.graph.register_multi_grad_hook(
                outputs, lambda gradient: any_one.append(gradient.item()), mode="any"
            )
            loss(*outputs).backward()
    assert together == [[2, 3, None], [2, None, None], [None, 0, 1]]
    assert len(any_one) == 3


def test_saved_tensor_hooks_see_what_is_saved(session: Any):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh())
    packed: list[Any] = []
    x = torch.ones(1, 2, requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(tensor.shape))
        return tensor * 2

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor / 2):
        model(x).sum().backward()
    bare, truth = packed[:], x.grad.clone()
    packed.clear()
    x.grad = None
    with session(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor / 2):
        model(x).sum().backward()
    assert packed == bare
    assert torch.equal(x.grad, truth)
    with session(model), torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        model(x).sum().backward()
        with pytest.raises(RuntimeError, match="not here"), torch.autograd.graph.saved_tensors_hooks(pack, pack):
            pass


def test_closures_of_hooks_die_with_their_tensors(session: Any):
    class Kept:
        pass

    model = Mul()
    with session(model):
        kept = Kept()
        alive = weakref.ref(kept)
        out = model(_leaf())
        out.register_hook(lambda gradient, kept=kept: None)
        leaf = _leaf()
        leaf.register_post_accumulate_grad_hook(lambda one, kept=kept: None)
        del kept, out, leaf
        gc.collect()
        assert alive() is None


def test_counts_of_backward_and_grad_with_inputs(session: Any):
    model = Mul()
    x = _leaf(3.0)
    calls: list[str] = []
    with session(model):
        model.weight.register_hook(lambda gradient: calls.append("weight"))
        model.weight.register_post_accumulate_grad_hook(lambda one: calls.append("accumulated"))
        model.register_full_backward_hook(lambda *_: calls.append("module"))
        x.register_hook(lambda gradient: calls.append("x"))
        model(x).backward()
        assert sorted(calls) == ["accumulated", "module", "weight", "x"]
        calls.clear()
        model(x).backward(inputs=[x])
        assert calls == ["module", "x"]
        calls.clear()
        torch.autograd.grad(model(x), x)
        assert calls == ["module", "x"]
        calls.clear()
        torch.autograd.grad(model(x), model.weight)
        assert calls == ["weight"]
