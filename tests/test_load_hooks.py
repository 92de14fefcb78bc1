"""`hooks.load`, `th.register_load_hook` and `hooks.optimizer_step`."""

from __future__ import annotations

import copy
import io
import sys
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.errors import HookError, SelectionError


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def without(model: nn.Module, *names: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if name not in names}


def test_the_callback_gets_the_model_and_the_keys(model: nn.Module) -> None:
    seen: list[Any] = []
    with th.hooks(model) as hooks:
        handle = hooks.load(
            lambda module, keys: seen.append((module, list(keys.missing_keys), list(keys.unexpected_keys)))
        )
        result = model.load_state_dict(without(model, "0.bias") | {"extra": torch.ones(1)}, strict=False)
        assert handle.fired == 1
        assert result.missing_keys == ["0.bias"]
    assert seen == [(model, ["0.bias"], ["extra"])]
    model.load_state_dict(model.state_dict())
    assert len(seen) == 1


def test_both_lists_may_be_changed_in_place(model: nn.Module) -> None:
    def forgive(module: nn.Module, keys: Any) -> None:
        keys.missing_keys.remove("0.bias")
        keys.unexpected_keys.clear()

    with th.hooks(model) as hooks:
        hooks.load(forgive)
        result = model.load_state_dict(without(model, "0.bias") | {"extra": torch.ones(1)})
    assert result.missing_keys == result.unexpected_keys == []


def test_a_strict_load_raises_for_what_is_left(model: nn.Module) -> None:
    with th.hooks(model) as hooks:
        hooks.load(lambda module, keys: keys.missing_keys.remove("0.bias"))
        hooks.load(lambda module, keys: keys.missing_keys.append("made up"))
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(without(model, "0.bias", "1.0.weight"))
    assert "1.0.weight" in str(caught.value)
    assert "made up" in str(caught.value)
    assert "0.bias" not in str(caught.value)


def test_callbacks_run_in_order_and_see_what_the_earlier_ones_did(model: nn.Module) -> None:
    seen: list[Any] = []
    with th.hooks(model) as hooks:
        hooks.load(lambda module, keys: keys.missing_keys.clear())
        hooks.load(lambda module, keys: seen.append(list(keys.missing_keys)))
        model.load_state_dict(without(model, "0.bias"))
    assert seen == [[]]


@pytest.mark.parametrize("returned", [True, {"0.bias": 1}, []])
def test_a_callback_that_returns_something_is_refused(model: nn.Module, returned: Any) -> None:
    with th.hooks(model) as hooks:
        hooks.load(lambda module, keys: returned)
        with pytest.raises(HookError, match=r"(?s)load of \(root\).*in place, and return None"):
            model.load_state_dict(model.state_dict())


def test_parts_of_the_model_have_loads_of_their_own(model: nn.Module) -> None:
    seen: list[str] = []
    with th.hooks(model) as hooks:
        hooks.load(lambda module, keys: seen.append("root"))
        hooks.load(lambda module, keys: seen.append(type(module).__name__), select="1.0")
        model.get_submodule("1").load_state_dict(model.get_submodule("1").state_dict())
        assert seen == ["Linear"]
        model.load_state_dict(model.state_dict())
        assert seen == ["Linear", "Linear", "root"]
        with pytest.raises(SelectionError):
            hooks.load(lambda module, keys: None, select="2")


def test_a_callback_that_raises_is_named_and_leaves_nothing(model: nn.Module) -> None:
    def broken(module: nn.Module, keys: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught, th.hooks(model) as hooks:
        hooks.load(broken)
        model.load_state_dict(model.state_dict())
    if sys.version_info >= (3, 11):
        assert any("load hook on (root)" in note for note in caught.value.__notes__)
    assert not model._load_state_dict_post_hooks


@pytest.mark.parametrize("fn", [lambda: None, lambda keys: None, 3])
def test_a_wrong_signature_is_found_at_registration(model: nn.Module, fn: Any) -> None:
    with th.hooks(model) as hooks, pytest.raises(HookError, match="load"):
        hooks.load(fn)
    with pytest.raises(HookError, match="load"):
        th.register_load_hook(model, fn)
    assert not model._load_state_dict_post_hooks


def test_load_takes_the_function_only(model: nn.Module) -> None:
    with th.hooks(model) as hooks:
        with pytest.raises(HookError, match=r"load takes the function only, got 2 arguments\n.*select="):
            hooks.load("0", lambda module, keys: None)  # type: ignore[arg-type]
        assert len(hooks) == 0


def test_a_callback_may_load_and_remove_itself(model: nn.Module) -> None:
    def again(module: nn.Module, keys: Any) -> None:
        handle.remove()
        module.load_state_dict(module.state_dict())

    handle = th.register_load_hook(model, again)
    model.load_state_dict(model.state_dict())
    model.load_state_dict(model.state_dict())
    assert (handle.fired, handle.live) == (1, False)


def test_the_state_dict_is_the_same_while_hooked(model: nn.Module) -> None:
    before = list(model.state_dict())
    with th.register_load_hook(model, lambda module, keys: None) as handle:
        assert list(model.state_dict()) == before
        model.load_state_dict(model.state_dict(), strict=True)
        assert handle.fired == 1
    assert not handle.live


def test_copies_and_saved_models_load_without_the_callback(model: nn.Module) -> None:
    with th.register_load_hook(model, lambda module, keys: None) as handle:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
            other.load_state_dict(model.state_dict())
        assert handle.fired == 0


def test_optimizer_steps_are_seen_before_and_after(model: nn.Module) -> None:
    weight, seen = model.get_parameter("0.weight"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = weight.detach().clone()
    with th.hooks(model) as hooks:
        hooks.optimizer_step(lambda one: seen.append((one, torch.equal(weight, start))), when="before")
        after = hooks.optimizer_step(lambda one: seen.append((one, torch.equal(weight, start))))
        assert "no optimizer has stepped" in str(hooks)
        model(torch.ones(1, 2)).sum().backward()
        weight.grad = torch.ones(2, 2)
        optimizer.step()
        late = torch.optim.Adam(model.parameters())
        late.step()
        assert after.fired == 2
    assert seen[:2] == [(optimizer, True), (optimizer, False)]
    assert [one for one, _ in seen[2:]] == [late, late]
    optimizer.step()
    assert len(seen) == 4


def test_what_an_optimizer_callback_returns_is_discarded(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with th.hooks(model) as hooks:
        hooks.optimizer_step(lambda one: 3, when="before")
        assert optimizer.step(lambda: 7.0) == 7.0


@pytest.mark.parametrize(("fn", "when"), [(lambda: None, "after"), (lambda one: None, "during")])
def test_optimizer_step_refuses_what_it_cannot_use(model: nn.Module, fn: Any, when: Any) -> None:
    with th.hooks(model) as hooks, pytest.raises(HookError):
        hooks.optimizer_step(fn, when=when)
