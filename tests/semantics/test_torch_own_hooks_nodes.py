"""Which hooks on tensors and graph nodes run, how often and with what: bare and in each session."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Same(nn.Module):
    """Gives a copy, differentiated through."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def _leaf(value: float = 1.0) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def _accumulation(leaf: Tensor) -> Any:
    """The node that sums up the gradients of a leaf."""
    view: Any = leaf.view_as(leaf).grad_fn
    return view.next_functions[0][0]


def _double(gradient: Tensor) -> Tensor:
    return gradient * 2


def test_a_kept_gradient_sees_the_hooks_before_and_after_it_was_asked_for(session: Any):
    model = Same()
    with session(model):
        out = model(_leaf())
        out.register_hook(_double)
        out.retain_grad()
        out.register_hook(_double)
        out.clone().backward()
        assert out.grad.item() == 4
        out = model(_leaf())
        out.retain_grad()
        out.register_hook(_double)
        out.clone().backward()
        assert out.grad.item() == 2


def test_hooks_on_the_accumulation_see_what_a_tensor_hook_made(session: Any):
    """Posthooks and prehooks of the node are given the gradient after the leaf's own hooks."""
    model = Same()
    x = _leaf()
    seen: list[float] = []
    with session(model):
        node = _accumulation(x)
        node.register_prehook(lambda gradients: seen.append(gradients[0].item()))
        node.register_hook(lambda grad_input, grad_output: seen.append(grad_output[0].item()))
        x.register_hook(_double)
        model(x).backward()
    assert seen == [2, 2]
    assert x.grad is not None and x.grad.item() == 2


def test_hooks_on_an_accumulation_that_is_not_asked_for_do_not_run(session: Any):
    """``backward(inputs=[b])`` leaves ``a`` alone, though a hook of the module that made ``b`` runs on the way."""
    model = Same()
    a, b = _leaf(), _leaf()
    called: list[str] = []
    with session(model):
        out = model(a) * model(b)
        for name, leaf in (("a", a), ("b", b)):
            _accumulation(leaf).register_prehook(lambda gradients, name=name: called.append(f"pre {name}"))
            _accumulation(leaf).register_hook(lambda *_, name=name: called.append(f"post {name}"))
        out.backward(inputs=[b])
    assert called == ["pre b", "post b"]
    assert a.grad is None


def test_counts_by_what_is_differentiated(session: Any):
    """Hooks on a tensor run where its gradient is computed, those on a node where the node runs, and on the accumulation in backward."""
    model = nn.Sequential(Twice(), Twice())
    counts = dict.fromkeys(("tensor", "pre", "post"), 0)

    def count(kind: str) -> Callable[..., None]:
        def hook(*arguments: Any) -> None:
            counts[kind] += 1

        return hook

    a = _leaf()
    with session(model):
        b = model[0](a)
        c = model[1](b)
        node = _accumulation(a)
        for leaf in (a, b):
            leaf.register_hook(count("tensor"))
        for one in (node, b.grad_fn):
            one.register_hook(count("post"))
            one.register_prehook(count("pre"))
        runs: list[Callable[[], Any]] = [
            lambda: torch.autograd.grad(c, inputs=(b,), retain_graph=True),
            lambda: torch.autograd.grad(c, inputs=(a, b), retain_graph=True),
            lambda: c.backward(retain_graph=True),
            lambda: c.backward(inputs=(a, b), retain_graph=True),
        ]
        found = []
        for run in runs:
            counts.update(dict.fromkeys(counts, 0))
            run()
            found.append(tuple(counts.values()))
    assert found == [(1, 0, 0), (2, 1, 1), (2, 2, 2), (2, 2, 2)]


def test_a_hook_on_what_a_function_of_c_gave(session: Any):
    """The output of batch norm: the hook's gradient is that of the output, and what it returns goes on."""
    model = nn.Sequential(nn.BatchNorm1d(5, affine=False))
    x = torch.randn(5, 5, requires_grad=True)
    seen: list[Tensor] = []
    with session(model):
        out = model(x)
        out.register_hook(lambda gradient: seen.append(gradient.clone()))
        out.register_hook(torch.zeros_like)
        out.backward(torch.ones(5, 5))
    assert len(seen) == 1 and torch.equal(seen[0], torch.ones(5, 5))
    assert x.grad is not None and not x.grad.any()


def test_a_kept_gradient_follows_the_newest_version(session: Any):
    """Asked for before or after a change in place: it is that of the tensor as it is at the end."""
    model = Same()
    with session(model):
        for early in (True, False):
            out = model(_leaf())
            if early:
                out.retain_grad()
            out.mul_(3)
            if not early:
                out.retain_grad()
            (out * 5).backward()
            assert out.grad.item() == 5


def test_hooks_on_several_outputs_stay_with_their_versions(session: Any):
    """One function, two outputs, of which one is changed in place afterwards."""

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.clone(), x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] + gradients[1]

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return Two.apply(x)

    model = Pair()
    seen: list[tuple[str, float]] = []
    with session(model):
        x = _leaf()
        first, second = model(x)
        first.register_hook(lambda gradient: seen.append(("first", gradient.item())))
        second.register_hook(lambda gradient: seen.append(("second", gradient.item())))
        first.mul_(3)
        first.register_hook(lambda gradient: seen.append(("first, changed", gradient.item())))
        (first * 2 + second * 5).backward()
    assert sorted(seen) == [("first", 6), ("first, changed", 2), ("second", 5)]
    assert x.grad is not None and x.grad.item() == 11


def test_hooks_on_a_base_and_on_its_view_that_is_changed(session: Any):
    """The output is changed through a view of it; the hook that was on it before sees the gradient of the old version."""
    model = Same()
    seen: list[tuple[str, list[float]]] = []
    with session(model):
        x = torch.ones(2, requires_grad=True)
        out = model(x)
        out.register_hook(lambda gradient: seen.append(("before", gradient.tolist())))
        out[:1].mul_(3)
        out.register_hook(lambda gradient: seen.append(("after", gradient.tolist())))
        (out * 2).sum().backward()
    assert sorted(seen) == [("after", [2, 2]), ("before", [6, 2])]


@pytest.mark.parametrize("on", ["tensor", "node"])
def test_a_hook_that_holds_its_own_node_goes_with_the_collector(session: Any, on: str):
    """A cycle of the user's own, which nothing of a session's holds."""

    class Kept:
        pass

    model = nn.Sequential(Twice())
    with session(model):
        out = model(_leaf())
        kept = Kept()
        gone = weakref.ref(kept)

        def hook(*gradients: Any, node: Any = out.grad_fn, kept: Kept = kept) -> None:
            pass

        out.register_hook(hook) if on == "tensor" else out.grad_fn.register_hook(hook)
        out.backward()
        del out, kept, hook
        gc.collect()
        assert gone() is None


def test_defaults_for_saved_values_nest_and_are_run_as_often(session: Any):
    """The inner of two defaults is used; pack and unpack run once for each value and pass; switched off, they are refused."""
    model = nn.Sequential(nn.Tanh(), nn.Tanh())
    counts: list[str] = []

    def hooks(name: str) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (counts.append(f"pack {name}"), tensor)[1],
            lambda tensor: (counts.append(f"unpack {name}"), tensor)[1],
        )

    x = torch.ones(2, requires_grad=True)
    with session(model):
        with hooks("outer"), hooks("inner"):
            out = model(x).sum()
        assert counts == ["pack inner"] * 2
        out.backward(retain_graph=True)
        out.backward()
    assert counts == ["pack inner"] * 2 + ["unpack inner"] * 4
