"""Section C, row 67: a callback that changes a value behind the back of differentiation.

The gradient of what comes before is then that of the value as it was: silently wrong, so it is told, with module and callback.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tenterhook.errors import TenterhookWarning

TOLD = r"changed in place.* without being differentiated.*\n.*allow=\"detached\""
IN_THE_TABLE = "it changed the value without being differentiated: gradients are those of the value before"


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


def _x() -> Tensor:
    return torch.arange(8.0).reshape(4, 2) - 3


def _data(value: Tensor) -> None:
    value.data.mul_(2)


def _assigned(value: Tensor) -> None:
    value.data = value.data * 2


def _no_grad(value: Tensor) -> None:
    with torch.no_grad():
        value.mul_(2)


def _detached(value: Tensor) -> None:
    value.detach().mul_(2)


def _numpy(value: Tensor) -> None:
    value.detach().numpy()[...] *= 2


def _one_element(value: Tensor) -> None:
    value.data[0, 0] += 1


WAYS: dict[str, Callable[[Tensor], None]] = {
    ".data": _data,
    ".data =": _assigned,
    "no_grad": _no_grad,
    "detach": _detached,
    "numpy": _numpy,
    "one element": _one_element,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("returns", [False, True], ids=["returns None", "returns it"])
def test_an_output_changed_without_being_differentiated_is_told_once(way: str, returns: bool) -> None:
    """67, D: one warning a hook, at its first call."""
    model = _model()

    def fn(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        WAYS[way](output)
        return output if returns else None

    with th.hooks(model) as hooks:
        hooks.forward("0", fn)
        with pytest.warns(TenterhookWarning, match=rf"forward of 0 \(.*fn\): the value was {TOLD}") as said:
            for _ in range(3):
                model(_x()).sum().backward()
    assert len(said) == str(hooks).count(IN_THE_TABLE) == 1


def test_the_gradient_that_is_told_is_the_wrong_one() -> None:
    """What the warning is for: tanh at 2wx has another slope than what is differentiated."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity())
    nn.init.constant_(model[0].weight, 0.3)

    def gradient(fn: Callable[..., Any], expectation: Any) -> Tensor:
        x = torch.tensor([[0.7]], requires_grad=True)
        with th.hooks(model) as hooks, expectation:
            hooks.forward("0", fn)
            torch.tanh(model(x)).sum().backward()
        assert x.grad is not None
        return x.grad

    wrong = gradient(lambda module, args, output: _data(output), pytest.warns(TenterhookWarning, match=TOLD))
    right = gradient(lambda module, args, output: output * 2, warnings.catch_warnings())
    torch.testing.assert_close(right, 2 * wrong)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_an_input_changed_without_being_differentiated_is_told(by_keyword: bool) -> None:
    model = _model()

    class Wrap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.model[0](x)
            return self.model[2](input=hidden) if by_keyword else self.model[2](hidden)

    def fn(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        _data(kwargs["input"] if by_keyword else args[0])

    with th.hooks(wrap := Wrap()) as hooks:
        hooks.forward_pre("model.2", fn, with_kwargs=True)
        with pytest.warns(TenterhookWarning, match=rf"forward_pre of model\.2 .*{TOLD}"):
            wrap(_x())


def test_one_slot_of_a_nested_output_is_named() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": self.body(x), "rest": (self.body(x).exp(),)}

    model = Heads()
    with th.hooks(model) as hooks:
        hooks.forward("", lambda module, args, output: _data(output["rest"][0]))
        with pytest.warns(TenterhookWarning, match=r'in place at \["rest"\]\[0\]'):
            model(_x())


def test_an_edit_session_tells_it_too() -> None:
    model = _model()
    with th.edit(model) as edit:
        edit.output("0", _data)
        with pytest.warns(TenterhookWarning, match=rf"edit of output of 0 .*{TOLD}"):
            model(_x())
        assert IN_THE_TABLE in str(edit)


def test_a_change_that_begins_later_is_found_soon() -> None:
    """Digests are compared at the 1st, 2nd, 4th, 8th, ... call; what the framework counts itself is found at each call."""
    model = _model()
    calls = 0

    def later(way: Callable[[Tensor], None]) -> Callable[..., None]:
        def fn(module: nn.Module, args: Any, output: Tensor) -> None:
            nonlocal calls
            calls += 1
            if calls >= 5:
                way(output)

        return fn

    for way, found_at in ((_data, 8), (_no_grad, 5), (_assigned, 5)):
        calls = 0
        with th.hooks(model) as hooks:
            hooks.forward("0", later(way))
            for _ in range(found_at - 1):
                model(_x())
            with pytest.warns(TenterhookWarning, match=TOLD):
                model(_x())
            assert calls == found_at


def _clamp_weights(module: nn.Module, args: Any, output: Any = None) -> None:
    module.weight.data.clamp_(-1, 1)


@pytest.mark.parametrize(
    "fn",
    [
        lambda module, args, output: output.mul_(2),
        lambda module, args, output: output[0].zero_(),
        lambda module, args, output: output.retain_grad(),
        lambda module, args, output: output.register_hook(lambda gradient: None),
        lambda module, args, output: output.detach().clone().zero_(),
        lambda module, args, output: output.data.sum(),
        _clamp_weights,
    ],
    ids=["in place", "in place on a view", "retain_grad", "register_hook", "a copy", "read", "weights"],
)
def test_nothing_is_said_where_the_graph_knows_or_the_value_stays(fn: Callable[..., Any]) -> None:
    """67, D: no false alarm; each of them several times."""
    model = _model()
    with warnings.catch_warnings(), th.hooks(model) as hooks:
        warnings.simplefilter("error")
        hooks.forward("0", lambda *arguments: (fn(*arguments), None)[1])
        for _ in range(4):
            model(_x()).sum().backward()


def test_nothing_is_said_where_it_is_meant_or_nothing_is_differentiated() -> None:
    """A straight-through estimator says so; without a gradient there is none to be wrong; an input of one's own is one's own."""
    model = _model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with th.hooks(model) as hooks:
            hooks.forward("0", lambda module, args, output: _data(output), allow="detached")
            hooks.forward_pre("0", lambda module, args: _data(args[0]))
            model(_x()).sum().backward()
        with th.hooks(model) as hooks:
            hooks.forward("*", lambda module, args, output: _data(output))
            with torch.no_grad():
                model(_x())
            with torch.inference_mode():
                model(_x())
            model.requires_grad_(False)
            model(_x())


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_change_through_data_is_repeated_in_a_checkpointed_region(reentrant: bool) -> None:
    """71 with 67: removed before backward, the recomputation has the change all the same."""

    def gradient(checkpointed: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        x = _x().requires_grad_()
        with th.hooks(model) as hooks:
            hooks.forward("0", lambda module, args, output: (output.data.mul_(2), None)[1], allow="detached")
            out = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        assert isinstance(out, Tensor)
        out.sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))
