"""The user's own torch hooks around calls behave inside a session as they do outside of one.

The behaviours are those that torch's tests of module hooks hold torch to; each is run bare and in the sessions of ``session``.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from tests.semantics.own_hooks_nets import Failing, Pair, Scaled, _x

Named = namedtuple("Named", ["first", "second"])


@pytest.mark.parametrize("pre", [True, False])
def test_forward_hooks_run_in_order_of_registration_with_prepended_ones_first(session: Any, pre: bool):
    model = Pair()
    fired: list[str] = []

    def named(name: str) -> Any:
        return lambda module, *rest: fired.append(name)

    register = model.one.register_forward_pre_hook if pre else model.one.register_forward_hook
    register(named("a"))
    register(named("b"))
    with session(model):
        register(named("c"))
        register(named("first"), prepend=True)
        out = model(_x())
        assert fired == ["first", "a", "b", "c"]
        out.sum().backward()
        assert len(fired) == 4
        model(_x())
        assert fired == ["first", "a", "b", "c"] * 2


@pytest.mark.parametrize("pre", [True, False])
def test_full_backward_hooks_run_in_order_once_a_backward(session: Any, pre: bool):
    model = Pair()
    fired: list[str] = []

    def named(name: str) -> Any:
        return lambda module, *rest: fired.append(name)

    register = model.two.register_full_backward_pre_hook if pre else model.two.register_full_backward_hook
    register(named("a"))
    with session(model):
        register(named("b"))
        register(named("first"), prepend=True)
        out = model(_x())
        assert fired == []
        out.sum().backward(retain_graph=True)
        assert fired == ["first", "a", "b"]
        out.sum().backward()
        assert fired == ["first", "a", "b"] * 2


def test_all_four_kinds_in_order_and_again_on_the_next_step(session: Any):
    model = Pair()
    fired: list[str] = []
    model.register_forward_pre_hook(lambda *_: fired.append("forward_pre"))
    model.register_forward_hook(lambda *_: fired.append("forward"))
    model.register_full_backward_pre_hook(lambda *_: fired.append("backward_pre"))
    model.register_full_backward_hook(lambda *_: fired.append("backward"))
    with session(model):
        for step in (1, 2):
            out = model(_x())
            assert fired[-2:] == ["forward_pre", "forward"]
            out.sum().backward()
            assert fired == ["forward_pre", "forward", "backward_pre", "backward"] * step


def test_keyword_arguments_are_given_to_hooks_and_may_be_changed(session: Any):
    model = Scaled()
    seen: list[Any] = []

    class Owner:
        def pre(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            seen.append(dict(kwargs))
            return args, {**kwargs, "times": kwargs["times"] * 10}

        def post(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
            seen.append(dict(kwargs))
            return output + kwargs["times"]

    with session(model):
        owner = Owner()
        first = model.register_forward_pre_hook(owner.pre, with_kwargs=True)
        second = model.register_forward_hook(owner.post, with_kwargs=True)
        assert model(torch.ones(1), times=2.0).item() == 40
        assert seen == [{"times": 2.0}, {"times": 20.0}]
        bare = model.register_forward_hook(lambda module, args, output: seen.append(len(args)))
        model(x := torch.ones(1), bias=x, times=1.0)
        assert seen[-1] == 1
        kept = len(model._forward_hooks_with_kwargs), len(model._forward_pre_hooks_with_kwargs)
        first.remove()
        second.remove()
        assert (
            kept[0] - len(model._forward_hooks_with_kwargs),
            kept[1] - len(model._forward_pre_hooks_with_kwargs),
        ) == (1, 1)
        bare.remove()
        assert model(torch.ones(1), times=2.0).item() == 2


def test_always_called_hooks_run_once_and_the_first_error_wins(session: Any):
    model = nn.Sequential(Failing())
    fired: list[Any] = []
    model[0].register_forward_hook(lambda m, args, output: fired.append(("always", output)), always_call=True)
    model[0].register_forward_hook(lambda m, args, output: fired.append(("plain", output)))
    with session(model):
        with pytest.raises(RuntimeError, match="from forward"):
            model(_x())
        assert fired == [("always", None)]
        fired.clear()

        def broken(module: nn.Module, args: Any) -> None:
            raise KeyError("from a pre hook")

        handle = model[0].register_forward_pre_hook(broken)
        with pytest.raises(KeyError, match="from a pre hook"):
            model(_x())
        assert fired == [("always", None)]
        handle.remove()
        fired.clear()
        model[0].fails = False
        out = model(_x())
        assert [name for name, _ in fired] == ["always", "plain"]
        assert all(output is out for _, output in fired)


def test_always_called_hook_that_raises_after_an_error_warns(session: Any):
    model = nn.Sequential(Failing())

    def broken(module: nn.Module, args: Any, output: Any) -> None:
        raise KeyError("from a hook")

    model[0].register_forward_hook(broken, always_call=True)
    with session(model), pytest.warns(UserWarning, match="forward hook with .*always_call=True.* raised an exception"):
        with pytest.raises(RuntimeError, match="from forward"):
            model(_x())


def test_hooks_that_remove_themselves(session: Any):
    model = Pair()
    fired: list[str] = []
    handles: dict[str, Any] = {}

    def pre(module: nn.Module, args: Any) -> None:
        fired.append("pre")
        handles["pre"].remove()

    def post(module: nn.Module, args: Any, output: Any) -> None:
        fired.append("post")
        handles["post"].remove()

    handles["pre"] = model.one.register_forward_pre_hook(pre)
    with session(model):
        handles["post"] = model.one.register_forward_hook(post)
        model(_x())
        model(_x())
    assert fired == ["pre", "post"]


def test_forward_hooks_may_replace_input_and_output(session: Any):
    model = nn.Sequential(Scaled())
    with session(model):
        handles = [
            model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
            model[0].register_forward_pre_hook(lambda module, args: args[0] * 2),
            model[0].register_forward_hook(lambda module, args, output: -output),
        ]
        x = torch.ones(2, requires_grad=True)
        out = model(x)
        assert out.tolist() == [-4, -4]
        out.sum().backward()
        assert x.grad.tolist() == [-2, -2]
        for handle in handles:
            handle.remove()
        assert model(x).tolist() == [1, 1]


@pytest.mark.parametrize("cut", [False, True], ids=["in order", "returning a named tuple"])
def test_named_tuples_and_structures_go_through(session: Any, cut: bool):
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> Named:
            return Named(x * 2, x * 3)

    model = Two()
    with session(model):
        model.register_full_backward_hook(lambda module, grad_input, grad_output: None)
        out = model(_x())
        assert type(out) is Named
        out.first.sum().backward()
        if cut:
            model.register_forward_hook(lambda module, args, output: Named(output.second, output.first))
            assert model(_x()).first.sum().item() == 18


def test_dict_output_fires_forward_hooks_and_no_backward_hook_but_one_warning(session: Any):
    class Mapping(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": x * 2}

    model = Mapping()
    fired: list[str] = []
    model.register_forward_hook(lambda *_: fired.append("forward"))
    model.register_full_backward_hook(lambda *_: fired.append("backward"))
    with session(model):
        with pytest.warns(UserWarning, match="backward hook") as said:
            out = model(_x())
        out["y"].sum().backward()
    assert fired == ["forward"]
    assert len(said) == 1
