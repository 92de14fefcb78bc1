"""``register_load_param_into_net_post_hook`` and the load hook for both loaders, on real MindSpore."""

# MindSpore declares the attributes of its cells too loosely for the type checker.
# pyright: reportOptionalCall=false

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import load_param_into_net as early_import
from mindspore import nn
from mindspore.common.hook_handle import HookHandle
from mindspore.train import model as train_model

import tenterhook as th
import tenterhook.mindspore as thms
from tenterhook.backends import _mindspore_loader
from tenterhook.errors import HookError
from tests.mindspore.loading import (
    ALL_KEYS,
    Net,
    Seen,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("load_hooks_installed")
SEED_PROGRAM = Path(__file__).with_name("seed_program.py")


def test_the_seeds_program_prints_what_the_seed_says() -> None:
    run = subprocess.run([sys.executable, str(SEED_PROGRAM)], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["load_param_into_net post load hook triggered.", "[]", "[]"]


def test_hook_sees_the_cell_and_the_very_lists_of_the_loader() -> None:
    net, seen = Net(), Seen()
    net.register_load_param_into_net_post_hook(seen)
    given = weights_of(net)
    given["head.fc.extra"] = given.pop("head.fc.bias")
    missing, unexpected = early_import(net, given, strict_load=True)
    assert seen.calls == [(net, ["head.fc.bias"], ["head.fc.extra"])]
    assert seen.lists[0][0] is missing
    assert seen.lists[0][1] is unexpected


def test_hook_may_clear_both_lists() -> None:
    net = Net()

    def clear(_: nn.Cell, keys: Any) -> None:
        keys.missing_keys.clear()
        keys.unexpected_keys.clear()

    with net.register_load_param_into_net_post_hook(clear):
        assert early_import(net, {"other.weight": ms.Parameter(ms.Tensor([1.0]))}) == ([], [])
    assert early_import(net, {"other.weight": ms.Parameter(ms.Tensor([1.0]))}) == (ALL_KEYS, ["other.weight"])


@pytest.mark.parametrize("strict", [False, True])
def test_runs_when_nothing_is_missing(strict: bool) -> None:
    net, seen = Net(), Seen()
    net.register_load_param_into_net_post_hook(seen)
    early_import(net, weights_of(net), strict_load=strict)
    assert seen.calls == [(net, [], [])]
    assert float(net.body.weight.asnumpy().max()) == 7.0


def test_runs_after_the_parameters_are_loaded() -> None:
    net = Net()
    values: list[float] = []
    net.register_load_param_into_net_post_hook(lambda cell, keys: values.append(float(cell.body.bias.asnumpy().sum())))
    early_import(net, weights_of(net))
    assert values == [14.0]


@pytest.mark.parametrize("way", ["ms", "train.model", "load_checkpoint"])
def test_runs_however_the_loader_is_reached(way: str, tmp_path: Path) -> None:
    net, seen = Net(), Seen()
    net.register_load_param_into_net_post_hook(seen)
    if way == "ms":
        ms.load_param_into_net(net, weights_of(net))
    elif way == "train.model":
        train_model.load_param_into_net(net, weights_of(net))
    else:
        ms.save_checkpoint(net, str(tmp_path / "net.ckpt"))
        ms.load_checkpoint(str(tmp_path / "net.ckpt"), net=net)
    assert seen.calls == [(net, [], [])]


def test_runs_before_prefixes_are_guessed_and_clearing_skips_the_guess() -> None:
    net, seen = Net(), Seen()
    given = weights_of(net, prefix="model.")
    with net.register_load_param_into_net_post_hook(seen):
        assert early_import(net, given)[0] == []
    assert seen.calls == [(net, ALL_KEYS, ["model." + key for key in ALL_KEYS])]
    assert float(net.body.weight.asnumpy().min()) == 7.0

    other = Net()
    before = other.body.weight.asnumpy().copy()
    with other.register_load_param_into_net_post_hook(lambda cell, keys: keys.missing_keys.clear()):
        early_import(other, weights_of(other, prefix="model."))
    assert np.array_equal(other.body.weight.asnumpy(), before)


@pytest.mark.parametrize("source", [True, False], ids=["with the loader's source", "without"])
def test_hooks_of_a_set_see_what_the_call_returns(source: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not source:
        thms.uninstall()
        monkeypatch.setattr(_mindspore_loader, "_code_with_call", lambda loader: None)
        thms.install()
    net, early, late = Net(), Seen(), []
    given = weights_of(net, prefix="model.")
    unexpected = list(given)
    with net.register_load_param_into_net_post_hook(early), th.hooks(net) as hooks:
        hooks.load(lambda cell, keys: late.append((list(keys.missing_keys), list(keys.unexpected_keys))))
        assert early_import(net, given) == ([], unexpected)
        assert late == [([], unexpected)] and early.calls == [(net, ALL_KEYS, unexpected)]
        assert float(net.body.weight.asnumpy().min()) == 7.0
        other = {name.replace("body", "trunk"): one for name, one in given.items()}
        returned = early_import(net, other)
        assert late[1] == returned and returned[0] == ["body.weight", "body.bias"]
        early_import(net, given, strict_load=True)
        assert late[2] == (ALL_KEYS, unexpected)
        hooks.load(lambda cell, keys: keys.missing_keys.clear())
        assert early_import(net, other)[0] == []


def test_children_before_parents_in_order_of_registration() -> None:
    net = Net()
    ran: list[str] = []
    for name, cell in [
        ("net", net),
        ("head", net.head),
        ("out", net.head.out),
        ("fc", net.head.fc),
        ("body", net.body),
    ]:
        for turn in "12":
            cell.register_load_param_into_net_post_hook(lambda _cell, _keys, said=name + turn: ran.append(said))
    early_import(net, weights_of(net))
    assert ran == ["body1", "body2", "fc1", "fc2", "out1", "out2", "head1", "head2", "net1", "net2"]


def test_a_cell_used_twice_is_met_once() -> None:
    shared, seen = nn.Dense(2, 2), Seen()
    net = nn.SequentialCell(nn.SequentialCell(shared), shared)
    shared.register_load_param_into_net_post_hook(seen)
    early_import(net, weights_of(net))
    assert [cell for cell, *_ in seen.calls] == [shared]


def test_a_parameters_walk_of_ones_own_and_nested_loads_fire_once_each() -> None:
    class Own(Net):
        def parameters_and_names(self, name_prefix: str = "", expand: bool = True) -> Iterator[Any]:
            yield from super().parameters_and_names(name_prefix, expand)

    net, inner, seen = Own(), Net(), Seen()
    net.register_load_param_into_net_post_hook(lambda cell, keys: early_import(inner, weights_of(inner)) and None)
    net.register_load_param_into_net_post_hook(seen)
    inner.register_load_param_into_net_post_hook(seen)
    list(net.parameters_and_names())
    assert seen.calls == []
    early_import(net, weights_of(net))
    assert [cell for cell, *_ in seen.calls] == [inner, net]


def test_returning_something_is_an_error_that_names_hook_and_cell() -> None:
    net = Net()

    def talkative(cell: nn.Cell, keys: Any) -> Any:
        return keys

    net.head.fc.register_load_param_into_net_post_hook(talkative)
    with pytest.raises(HookError, match=r"talkative on cell head\.fc \(Dense\) returned a IncompatibleKeys"):
        early_import(net, weights_of(net))


def test_the_hooks_own_exception_comes_through() -> None:
    net = Net()
    handle = net.register_load_param_into_net_post_hook(lambda cell, keys: {}["absent"])
    with pytest.raises(KeyError, match="absent"):
        early_import(net, weights_of(net))
    handle.remove()
    assert early_import(net, weights_of(net)) == ([], [])


def test_handle_removes_once_twice_and_in_a_with_block() -> None:
    net, seen = Net(), Seen()
    attributes = dict(vars(net))
    handle = net.register_load_param_into_net_post_hook(seen)
    assert isinstance(handle, HookHandle)
    assert isinstance(handle, thms.LoadHookHandle)
    assert handle.live
    early_import(net, weights_of(net))
    handle.remove()
    handle.remove()
    assert not handle.live
    with net.register_load_param_into_net_post_hook(seen) as second:
        early_import(net, weights_of(net))
        second.remove()
    early_import(net, weights_of(net))
    assert (len(seen.calls), handle.fired, second.fired) == (2, 1, 1)
    assert vars(net) == attributes


def test_hooks_may_remove_themselves_and_others_while_they_run() -> None:
    net, seen = Net(), Seen()
    handles: list[Any] = []
    handles.append(net.register_load_param_into_net_post_hook(lambda c, k: [h.remove() for h in handles] and None))
    handles.append(net.register_load_param_into_net_post_hook(seen))
    early_import(net, weights_of(net))
    early_import(net, weights_of(net))
    assert seen.calls == []
    assert handles[0].fired == 1


@pytest.mark.parametrize("hook", [None, 3, "print"])
def test_what_cannot_be_called_is_refused(hook: object) -> None:
    with pytest.raises(HookError, match=r"needs a callable hook\(cell, incompatible_keys\), got a"):
        Net().register_load_param_into_net_post_hook(hook)
    with pytest.raises(HookError, match=r"needs a mindspore\.nn\.Cell, got a str"):
        thms.register_load_post_hook("net", print)  # type: ignore[arg-type]


def test_graph_mode_gives_an_inert_handle_and_a_warning() -> None:
    net, seen = Net(), Seen()
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.warns(RuntimeWarning, match="GRAPH_MODE") as caught:
            handle = net.register_load_param_into_net_post_hook(seen)
        with pytest.warns(RuntimeWarning, match="GRAPH_MODE") as caught_too:
            other = thms.register_load_post_hook(net, seen)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert (caught[0].filename, caught_too[0].filename) == (__file__, __file__)
    early_import(net, weights_of(net))
    handle.remove()
    other.remove()
    assert seen.calls == []
    assert not handle.live


def test_copies_carry_no_live_hook() -> None:
    net, seen = Net(), Seen()
    net.handle = net.register_load_param_into_net_post_hook(seen)
    thms.register_load_post_hook(net.head, seen)
    twin = copy.deepcopy(net)
    early_import(twin, weights_of(twin))
    twin.load_state_dict(weights_of(twin))
    assert seen.calls == []
    with twin.register_load_param_into_net_post_hook(seen):
        early_import(twin, weights_of(twin))
    assert [cell for cell, *_ in seen.calls] == [twin]
    early_import(net, weights_of(net))
    assert [cell for cell, *_ in seen.calls] == [twin, net.head, net]


class Scale(nn.Cell):
    """A cell of the few that MindSpore itself can pickle: one without primitives."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = ms.Parameter(ms.Tensor([1.0]), name="factor")


def test_pickles_carry_no_live_hook() -> None:
    net, seen = Scale(), Seen()
    net.handle = net.register_load_param_into_net_post_hook(seen)
    thms.register_load_post_hook(net, seen)
    twin = pickle.loads(pickle.dumps(net))
    early_import(twin, weights_of(twin))
    twin.load_state_dict(weights_of(twin))
    assert seen.calls == []
    assert float(twin.factor.asnumpy()[0]) == 7.0
    early_import(net, weights_of(net))
    assert len(seen.calls) == 2


def test_one_hook_for_both_loaders() -> None:
    net, seen = Net(), Seen()
    handle = thms.register_load_post_hook(net.head, seen)
    early_import(net, weights_of(net))
    assert len(seen.calls) == 1
    given = weights_of(net)
    del given["head.fc.bias"]
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict(given)
    assert seen.calls[1:] == [(net.head, ["head.fc.bias"], [])]
    assert handle.fired == 2
    handle.remove()
    early_import(net, weights_of(net))
    net.load_state_dict(weights_of(net))
    assert len(seen.calls) == 2


def test_clearing_lists_makes_a_strict_load_state_dict_pass() -> None:
    net = Net()
    given = weights_of(net)
    del given["body.bias"]
    with thms.register_load_post_hook(net, lambda cell, keys: keys.missing_keys.clear()):
        net.load_state_dict(given)


def test_removal_inside_load_state_dict() -> None:
    net, seen = Net(), Seen()
    handles: list[Any] = []
    handles.append(thms.register_load_post_hook(net, lambda cell, keys: handles[0].remove()))
    thms.register_load_post_hook(net, seen)
    net.load_state_dict(weights_of(net))
    net.load_state_dict(weights_of(net))
    assert handles[0].fired == 1
    assert len(seen.calls) == 2
