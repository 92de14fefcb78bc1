"""``th.installed_hooks`` on cells: ours and others', what they are, where they were written, and whether they will be called."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import pytest
from mindspore import nn

import tenterhook as th
import tenterhook.mindspore
from tests.mindspore.cells import net, ones


def mine(*arguments: Any) -> None: ...


OWNER = __name__.partition(".")[0]


def found(model: nn.Cell) -> set[tuple[str, str, str, str]]:
    return {(hook.path, hook.kind, hook.function, hook.owner) for hook in th.installed_hooks(model)}


def test_a_bare_cell_has_none() -> None:
    model = net()
    assert th.installed_hooks(model) == []
    assert str(th.installed_hooks(model)) == "no hooks"
    before = {name: dict(vars(cell)) for name, cell in model.cells_and_names()}
    th.installed_hooks(model)
    assert {name: dict(vars(cell)) for name, cell in model.cells_and_names()} == before


def test_every_kind_of_mindspores_own_hooks_is_listed() -> None:
    model = net()
    inner = model[2][0]
    handles = [
        model.register_forward_pre_hook(mine),
        model.register_forward_hook(mine),
        inner.register_backward_pre_hook(mine),
        inner.register_backward_hook(mine),
        inner.register_state_dict_pre_hook(mine),
        inner.register_state_dict_post_hook(mine),
        inner.register_load_state_dict_pre_hook(mine),
        inner.register_load_state_dict_post_hook(mine),
        nn.cell.register_cell_buffer_registration_hook(mine),
    ]
    inner.register_saved_tensors_hooks(mine, mine)
    optimizer = nn.SGD(model.trainable_params(), 0.1)
    handles.append(optimizer.register_forward_pre_hook(mine))
    try:
        assert found(model) == {
            (path, kind, "mine", OWNER)
            for path, kind in [
                ("", "forward_pre"),
                ("", "forward"),
                ("2.0", "backward_pre"),
                ("2.0", "backward"),
                ("2.0", "state_dict_pre"),
                ("2.0", "state_dict"),
                ("2.0", "load_pre"),
                ("2.0", "load"),
                ("2.0", "saved_tensors_pack"),
                ("2.0", "saved_tensors_unpack"),
                ("(SGD)", "forward_pre"),
                ("(every cell)", "buffer_registration"),
            ]
        }
        line = mine.__code__.co_firstlineno
        assert {hook.source for hook in th.installed_hooks(model)} == {f"{__file__}:{line}"}
        assert all(hook.alive for hook in th.installed_hooks(model))
    finally:
        for handle in handles:
            handle.remove()
    assert {kind for _, kind, _, _ in found(model)} == {"saved_tensors_pack", "saved_tensors_unpack"}


def test_ours_bear_the_name_of_the_users_callback() -> None:
    model = net()
    with th.hooks(model) as hooks:
        hooks.forward("2.0", mine)
        hooks.backward("0", mine)
        hooks.param_grad("0.weight", mine)
        hooks.load(mine)
        hooks.optimizer_step(mine)
        hooks.before(model, "extend_repr", mine)
        ours = th.installed_hooks(model)
        assert {hook.owner for hook in ours} == {"tenterhook"}
        assert {hook.function for hook in ours} == {"mine"}
        assert sorted((hook.path, hook.kind, hook.note) for hook in ours) == sorted(
            [
                ("2.0", "forward", ""),
                ("0", "forward_pre", "for backward"),
                ("0", "forward", "for backward"),
                ("0.weight", "tensor", "for param_grad"),
                ("", "load", ""),
                ("(every optimizer)", "optimizer_step", ""),
                ("", "replaced extend_repr", "for before"),
            ]
        )
        assert {hook.source for hook in ours} == {f"{__file__}:{mine.__code__.co_firstlineno}"}
    assert th.installed_hooks(model) == []


def test_a_recording_an_edit_and_single_hooks_are_listed() -> None:
    model = net()
    with th.record(model), th.register_tensor_hook(model[0].bias, mine), th.edit(model) as edit:
        edit.output("0", th.edits.scale(2.0))
        edit.skip("1")
        model(ones(1, 3))
        listed = found(model)
        assert ("0.bias", "tensor", "mine", "tenterhook") in listed
        assert ("2.0", "forward", "(recording)", "tenterhook") in listed
        assert {kind for path, kind, _, _ in listed if path == "1"} >= {"replaced call"}
    assert th.installed_hooks(model) == []


def test_the_load_hook_of_the_seed_is_listed_once_for_both_loaders() -> None:
    model = net()
    tenterhook.mindspore.install()
    try:
        handle = model.register_load_param_into_net_post_hook(mine)
        with th.register_load_hook(model, mine):
            listed = [(hook.path, hook.kind, hook.function, hook.owner) for hook in th.installed_hooks(model)]
        assert listed == [("", "load", "mine", "tenterhook")] * 2
        handle.remove()
    finally:
        tenterhook.mindspore.uninstall()
    assert th.installed_hooks(model) == []


def test_hooks_that_will_not_be_called_are_dead() -> None:
    attention = nn.MultiheadAttention(4, 2)
    handle = attention.out_proj.register_forward_hook(mine)
    (hook,) = th.installed_hooks(attention)
    assert (hook.path, hook.alive, hook.note) == ("out_proj", False, "weights used without calling the cell")
    handle.remove()


def test_in_graph_mode_all_are_dead() -> None:
    model = net()
    handle = model.register_forward_hook(mine)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        (hook,) = th.installed_hooks(model)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert (hook.alive, hook.note) == (False, "graph mode: compiled code calls no hooks")
    handle.remove()


def test_hooks_of_a_shared_cell_and_of_one_in_a_training_cell_are_listed_once() -> None:
    shared = nn.Dense(2, 2)
    model = nn.SequentialCell(shared, shared)
    trainer = nn.TrainOneStepCell(nn.WithLossCell(model, nn.MSELoss()), nn.SGD(model.trainable_params(), 0.1))
    handles = [shared.register_forward_hook(mine), trainer.register_forward_hook(mine)]
    assert sorted((path, kind) for path, kind, _, _ in found(trainer)) == [
        ("(root) (TrainOneStepCell)", "forward"),
        ("0", "forward"),
    ]
    for handle in handles:
        handle.remove()


def test_a_construct_that_was_replaced_is_listed() -> None:
    model = net()
    model[1].construct = lambda x: x
    ((path, kind, _, owner),) = found(model)
    assert (path, kind, owner) == ("1", "replaced construct", OWNER)
    assert model(ones(1, 3)).shape == (1, 2)


@pytest.mark.parametrize("path", ["", "2.0"])
def test_the_list_prints_as_a_table(path: str) -> None:
    model = net()
    with th.register_forward_hook(dict(model.cells_and_names())[path], mine):
        heading, line = str(th.installed_hooks(model)).splitlines()
    assert heading.split() == ["path", "kind", "function", "at", "owner"]
    assert line.split()[:3] == [path or "(root)", "forward", "mine"]
    assert line.split()[3].endswith(f"test_installed_hooks.py:{mine.__code__.co_firstlineno}")
