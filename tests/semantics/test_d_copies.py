"""SEMANTICS.md D: copies and files of a hooked model (21, 22, 23)."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tests.semantics.nets import Nested, mlp

ALL = ["input", "output", "grad_input", "grad_output", "param", "param_grad", "update"]
KINDS = ("forward_pre", "forward", "backward_pre", "backward", "param_grad")
TABLES = ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_post_hooks")
FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def _x() -> Tensor:
    return torch.ones(2, 4)


def _put_on_all(hooks: Any) -> None:
    for kind in ("forward_pre", "forward"):
        getattr(hooks, kind)("**", lambda *arguments: None)
    hooks.forward("**", lambda *arguments: None, always_call=True)
    hooks.load(lambda *arguments: None)


class Own(nn.Linear):
    """A module that copies and pickles itself in a way of its own, hook tables included."""

    def __reduce__(self) -> Any:
        return _rebuild, (vars(self).copy(),)


def _rebuild(attributes: dict[str, Any]) -> Own:
    made = Own.__new__(Own)
    made.__dict__ = attributes
    return made


# ---- 21, 22: copies ----


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward_pre", "backward"])
def test_a_copy_is_inert(kind: str) -> None:
    net = mlp()
    with th.hooks(net) as hooks:
        handle = getattr(hooks, kind)("0", lambda *arguments: None)
        clone = copy.deepcopy(net)
        clone(_x()).sum().backward()
        assert handle.fired == 0
        net(_x()).sum().backward()
        assert handle.fired == 1
    clone(_x()).sum().backward()
    assert handle.fired == 1


def test_a_copy_of_a_recorded_model_is_not_recorded() -> None:
    net = mlp()
    with th.record(net, kinds=ALL) as rec:
        clone = copy.deepcopy(net)
        clone(_x()).sum().backward()
        assert rec.order() == []
        net(_x()).sum().backward()
        assert [call.path for call in rec.order() if call.phase == "forward"] == ["", "0", "1", "2"]


def test_a_callable_object_with_state_is_not_copied_along() -> None:
    class Store:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
            self.calls += 1

        def __deepcopy__(self, memo: Any) -> Store:
            raise AssertionError("the callback was copied")

    net, store = mlp(), Store()
    with th.hooks(net) as hooks:
        hooks.forward("**", store)
        copy.deepcopy(net)(_x())
        assert store.calls == 0
        net(_x())
        assert store.calls == 4


@pytest.mark.parametrize("make", [mlp, Nested, lambda: nn.LSTM(4, 2)], ids=["in-place", "dataclass", "lstm"])
def test_deepcopy_works_during_and_after_capture(make: Callable[[], nn.Module]) -> None:
    net = make()
    keywords = {"scale": torch.ones(4, requires_grad=True)} if isinstance(net, Nested) else {}

    def leaf_sum(out: Any) -> Tensor:
        return out.logits.sum() if hasattr(out, "logits") else (out[0] if isinstance(out, tuple) else out).sum()

    with th.record(net, kinds=ALL, tensors=True), th.hooks(net) as hooks:
        for kind in KINDS:
            getattr(hooks, kind)("**", lambda *arguments: None)
        copies = [copy.deepcopy(net)]
        out = net(_x(), **keywords)
        copies.append(copy.deepcopy(net))
        leaf_sum(out).backward()
        copies.append(copy.deepcopy(net))
    copies.append(copy.deepcopy(net))
    for clone in copies:
        assert torch.equal(leaf_sum(clone(_x(), **keywords)), leaf_sum(out))


# ---- 23: files ----


@pytest.mark.parametrize("dump", [torch.save, pickle.dump], ids=["torch.save", "pickle"])
def test_a_hooked_model_can_be_saved(dump: Callable[..., None]) -> None:
    net, file = mlp(), io.BytesIO()
    seen: list[int] = []
    with th.record(net, kinds=ALL), th.hooks(net) as hooks:
        for kind in KINDS:
            getattr(hooks, kind)("**", lambda *arguments: seen.append(1))
        net(_x()).sum().backward()
        seen.clear()
        dump(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False) if dump is torch.save else pickle.load(file)
    loaded(_x()).sum().backward()
    assert seen == []
    assert torch.equal(loaded(_x()), net(_x()))


def test_a_saved_model_loads_where_tenterhook_is_not(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 2))
    with th.record(net), th.hooks(net) as hooks:
        hooks.forward("**", lambda *arguments: None, always_call=True)
        hooks.forward_pre("**", lambda *arguments: None)
        torch.save(net, tmp_path / "net.pt")
    program = (
        "import sys, torch; sys.modules['tenterhook'] = None;"
        f"net = torch.load({str(tmp_path / 'net.pt')!r}, weights_only=False); print(net(torch.ones(1, 4)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("torch.Size([1, 2])\n", 0), done.stderr


def test_state_dict_and_its_file_are_as_without_hooks() -> None:
    net = mlp()
    plain = net.state_dict()
    with th.record(net, kinds=ALL), th.hooks(net) as hooks:
        hooks.param_grad("**", lambda *arguments: None)
        net(_x()).sum().backward()
        hooked = net.state_dict()
        file = io.BytesIO()
        torch.save(hooked, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert list(plain) == list(hooked) == list(loaded)
    assert all(torch.equal(plain[key], loaded[key]) for key in plain)


@pytest.mark.parametrize("made", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("session", [th.hooks, th.record], ids=["hooks", "record"])
def test_a_copy_has_the_hooks_of_others_and_none_of_ours(made: str, session: Any) -> None:
    """Row 21: its tables are those of the bare model, order included; the original's stay as they are."""
    net = mlp()
    net[0].register_forward_hook(_others)
    with session(net) as ours:
        if session is th.hooks:
            _put_on_all(ours)
        net[0].register_forward_hook(_others, with_kwargs=True)
        before = {
            (name, path): dict(vars(one)[name]) for path, one in net.named_modules() for name in (*TABLES, *FLAGS)
        }
        clone = _made_again(net, made)
        for path, one in net.named_modules():
            assert {name: vars(one)[name] for name in (*TABLES, *FLAGS)} == {
                name: before[name, path] for name in (*TABLES, *FLAGS)
            }
    for path, one in clone.named_modules():
        assert [list(vars(one)[name].values()) for name in TABLES] == [[], [_others] * 2 if path == "0" else [], []]
        assert [len(vars(one)[name]) for name in FLAGS] == [0, 1 if path == "0" else 0, 0]
        assert type(vars(one)["_forward_hooks"]) is OrderedDict
    assert "__reduce_ex__" not in vars(nn.Module)


def _others(*arguments: Any) -> None:
    return None


def _made_again(net: nn.Module, how: str) -> Any:
    if how == "deepcopy":
        return copy.deepcopy(net)
    file = io.BytesIO()
    (torch.save if how == "torch.save" else pickle.dump)(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False) if how == "torch.save" else pickle.load(file)


@pytest.mark.parametrize("made", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_copy_can_be_made_into_a_script(made: str) -> None:
    """Row 21, same kind: TorchScript reads what stands in the tables as the module's code."""
    net = mlp()
    with th.hooks(net) as hooks:
        _put_on_all(hooks)
        clone = _made_again(net, made)
    assert torch.equal(torch.jit.script(clone)(_x()), net(_x()))


def test_a_shallow_copy_shares_the_tables_as_ever() -> None:
    """Row 21, same kind: copy.copy makes a second module over the same parts; what is put on the one is on the other."""
    net = nn.Linear(4, 2)
    with th.hooks(net) as hooks:
        _put_on_all(hooks)
        twin = copy.copy(net)
        assert twin._forward_hooks is net._forward_hooks
    assert not twin._forward_hooks


def _pickled(net: nn.Module, single: bool) -> bytes:
    if not single:
        with th.hooks(net) as hooks:
            _put_on_all(hooks)
            return pickle.dumps(net)
    registers = (th.register_forward_hook, th.register_forward_pre_hook)
    handles = [register(one, lambda *arguments: None) for one in net.modules() for register in registers]
    data = pickle.dumps(net)
    for handle in handles:
        handle.remove()
    return data


def test_hooks_in_the_process_that_loads_are_called_as_they_ask(tmp_path: Path) -> None:
    """Row 23: a hook there that torch gives the number of one of ours is not called with keywords for that."""
    nets = [mlp(), nn.Sequential(Own(4, 2)), torch.fx.symbolic_trace(mlp())]
    pickles = [_pickled(net, single) for net in nets for single in (False, True)]
    (tmp_path / "nets.pkl").write_bytes(pickle.dumps(pickles))
    program = """
import pickle, sys, torch
from pathlib import Path
for data in pickle.loads(Path(sys.argv[1]).read_bytes()):
    net, seen = pickle.loads(data), []
    torch.utils.hooks.RemovableHandle.next_id = 0  # as where it is loaded by itself
    for _ in range(40):
        for one in net.modules():
            one.register_forward_hook(lambda module, args, output: seen.append("after"))
            one.register_forward_pre_hook(lambda module, args: seen.append("before"))
    net(torch.ones(2, 4))
    called = len(list(net.modules()))
    assert [seen.count("before"), seen.count("after")] == [40 * called] * 2, seen
"""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-c", program, str(tmp_path / "nets.pkl")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_a_copy_of_a_module_that_copies_itself_is_inert() -> None:
    """Row 21, same kind: it takes our hooks along, which do nothing there; ours on the copy do not take their places."""
    net = Own(4, 2)
    with th.hooks(net) as hooks:
        handle = hooks.forward("", lambda *arguments: None)
        clone = copy.deepcopy(net)
        clone(_x())
        assert handle.fired == 0
    kept = len(clone._forward_hooks)
    with th.hooks(clone) as hooks:
        handle = hooks.forward("", lambda *arguments: None)
        assert len(clone._forward_hooks) == kept + 1
        clone(_x())
        assert handle.fired == 1
    assert len(clone._forward_hooks) == kept
