"""`th.installed_hooks` and `th.select`: what is on a model and in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.errors import HookError, SelectionError

HERE = "test_installed_hooks.py"


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1, bias=False), nn.ReLU()))


def mine(*arguments: Any) -> None:
    """A callback of nobody in particular."""


def found(model: nn.Module) -> set[tuple[str, str, str, str]]:
    return {(hook.path, hook.kind, hook.function, hook.owner) for hook in th.installed_hooks(model)}


def test_a_model_without_hooks(model: nn.Module) -> None:
    assert list(th.installed_hooks(model)) == []
    assert str(th.installed_hooks(model)) == "no hooks"


def test_hooks_of_others_are_listed_by_kind(model: nn.Module) -> None:
    inner = model.get_submodule("1.0")
    weight = model.get_parameter("0.weight")
    handles = [
        model.register_forward_pre_hook(mine),
        model.register_forward_hook(mine),
        inner.register_full_backward_hook(mine),
        inner.register_full_backward_pre_hook(mine),
        inner.register_state_dict_post_hook(mine),
        inner.register_state_dict_pre_hook(mine),
        inner.register_load_state_dict_pre_hook(mine),
        inner.register_load_state_dict_post_hook(mine),
        weight.register_hook(mine),
        weight.register_post_accumulate_grad_hook(mine),
        nn.modules.module.register_module_forward_hook(mine),
    ]
    try:
        owner = __name__.partition(".")[0]
        assert found(model) == {
            (path, kind, "mine", owner)
            for path, kind in [
                ("", "forward_pre"),
                ("", "forward"),
                ("1.0", "backward"),
                ("1.0", "backward_pre"),
                ("1.0", "state_dict"),
                ("1.0", "state_dict_pre"),
                ("1.0", "load_pre"),
                ("1.0", "load"),
                ("0.weight", "tensor"),
                ("0.weight", "post_accumulate_grad"),
                ("(every module)", "forward"),
            ]
        }
        line = mine.__code__.co_firstlineno
        assert {hook.source for hook in th.installed_hooks(model)} == {f"{__file__}:{line}"}
        assert all(hook.alive for hook in th.installed_hooks(model))
    finally:
        for handle in handles:
            handle.remove()
    assert found(model) == set()


def test_ours_bear_the_name_of_the_users_callback(model: nn.Module) -> None:
    with th.hooks(model) as hooks:
        hooks.forward("1.0", mine)
        hooks.backward("0", mine)
        hooks.param_grad("0.weight", mine)
        hooks.param_grad("0.weight", mine, accumulated=True)
        hooks.load(mine)
        hooks.optimizer_step(mine)
        hooks.before(model, "extra_repr", mine)
        ours = th.installed_hooks(model)
        assert {hook.owner for hook in ours} == {"tenterhook"}
        assert {hook.function for hook in ours} == {"mine"}
        assert {(hook.path, hook.kind, hook.note) for hook in ours} == {
            ("1.0", "forward", ""),
            ("0", "forward_pre", "for backward"),
            ("0", "forward", "for backward"),
            ("0", "forward_pre", "for param_grad"),
            ("0.weight", "tensor", "for param_grad"),
            ("0.weight", "post_accumulate_grad", "for param_grad"),
            ("", "load", ""),
            ("(every optimizer)", "optimizer_step", ""),
            ("", "replaced extra_repr", "for before"),
        }
    assert found(model) == set()


def test_a_recording_and_a_tensor_hook_are_listed(model: nn.Module) -> None:
    with th.record(model), th.register_tensor_hook(model.get_parameter("0.bias"), mine):
        listed = found(model)
        assert ("0.bias", "tensor", "mine", "tenterhook") in listed
        assert ("1.0", "forward", "(recording)", "tenterhook") in listed


def test_legacy_hooks_optimizer_hooks_and_replaced_forwards(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    other = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    handles = [
        optimizer.register_step_pre_hook(mine),
        optimizer.register_step_post_hook(mine),
        other.register_step_post_hook(mine),
    ]
    relu = model.get_submodule("1.1")
    relu.forward = mine
    model.get_submodule("0").register_backward_hook(mine)
    assert {(path, kind) for path, kind, _, _ in found(model)} == {
        ("0", "backward (legacy)"),
        ("1.1", "replaced forward"),
        ("(SGD)", "optimizer_step_pre"),
        ("(SGD)", "optimizer_step"),
    }
    for handle in handles:
        handle.remove()


def test_hooks_that_will_not_be_called_are_dead() -> None:
    attention = nn.MultiheadAttention(4, 2)
    handle = attention.out_proj.register_forward_hook(mine)
    (hook,) = th.installed_hooks(attention)
    assert (hook.path, hook.alive, hook.note) == ("out_proj", False, "weights used without calling the module")
    assert "dead: weights used" in str(th.installed_hooks(attention))
    handle.remove()


def test_hooks_of_a_wrapper_and_of_a_shared_module_are_listed_once() -> None:
    shared = nn.Linear(2, 2)
    wrapped = nn.DataParallel(nn.Sequential(shared, shared))
    handles = [shared.register_forward_hook(mine), wrapped.register_forward_hook(mine)]
    assert sorted((path, kind) for path, kind, _, _ in found(wrapped)) == [
        ("(root) (DataParallel)", "forward"),
        ("0", "forward"),
    ]
    for handle in handles:
        handle.remove()


def test_the_list_prints_as_a_table(model: nn.Module) -> None:
    class Monitor:
        def on_output(self, module: Any, args: Any, output: Any) -> None: ...

    with th.register_forward_hook(model, Monitor().on_output):
        heading, line = str(th.installed_hooks(model)).splitlines()
    assert heading.split() == ["path", "kind", "function", "at", "owner"]
    assert line.startswith("(root)  forward")
    assert "Monitor.on_output" in line
    assert HERE in line


def test_installed_hooks_wants_a_model() -> None:
    with pytest.raises(HookError, match="expected a torch Module"):
        th.installed_hooks(3)


def test_select_lists_what_matches(model: nn.Module) -> None:
    assert th.select(model).paths == ["", "0", "1", "1.0", "1.1"]
    chosen = th.select(model, nn.Linear)
    assert [(one.path, one.type, one.parameters) for one in chosen] == [("0", "Linear", 9), ("1.0", "Linear", 3)]
    assert chosen[0].module is model.get_submodule("0")
    assert str(chosen).splitlines() == ["path  type    parameters", "0     Linear  9", "1.0   Linear  3"]


def test_select_shows_aliases_and_refuses_what_matches_nothing() -> None:
    shared = nn.Linear(1, 1)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert th.select(model, "b").paths == ["a"]
    assert "also b" in str(th.select(model, "a"))
    with pytest.raises(SelectionError, match="c"):
        th.select(model, "c")
