"""SEMANTICS.md D: hooks come off after errors (24), at once (25), and none is global (65)."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as registries

import tenterhook as th
from tenterhook.hookset import HookSet
from tests.semantics.nets import Boom, Failing, hook_counts, mlp

KINDS = ("forward_pre", "forward", "backward_pre", "backward", "param_grad")


def _put_all(hooks: HookSet, fn: Callable[..., None]) -> None:
    for kind in KINDS:
        getattr(hooks, kind)("**", fn)


# ---- 24: an exception between registration and removal ----


@pytest.mark.parametrize("error", [Boom("x"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
def test_an_error_in_the_model_leaves_no_hook(error: BaseException) -> None:
    net = nn.Sequential(mlp(), Failing(error))
    net[1].armed = False
    x = torch.ones(3, 4, requires_grad=True)
    before, clean = hook_counts(net), net(x)
    net[1].armed = True
    for session in (th.hooks(net), th.record(net, kinds=th_kinds(), tensors=True)):
        with pytest.raises(type(error)), session:
            if isinstance(session, HookSet):
                _put_all(session, lambda *arguments: None)
            net(x)
        assert hook_counts(net) == before
    net[1].armed = False
    assert torch.equal(net(x), clean)


def th_kinds() -> list[str]:
    return ["input", "output", "grad_input", "grad_output", "param", "param_grad", "update"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_a_callback_leaves_no_hook(kind: str) -> None:
    net = mlp()
    before, x = hook_counts(net), torch.ones(3, 4)
    clean = net(x)

    def fail(*arguments: Any) -> None:
        raise Boom(kind)

    with pytest.raises(Boom, match=kind), th.hooks(net) as hooks:
        getattr(hooks, kind)("**", fail)
        net(x).sum().backward()
    assert hook_counts(net) == before
    assert torch.equal(net(x), clean)


def test_an_error_in_a_selector_leaves_no_hook() -> None:
    net = mlp()
    before = hook_counts(net)

    def select(path: str, module: nn.Module) -> bool:
        if path == "2":
            raise Boom(path)
        return True

    with pytest.raises(Boom), th.hooks(net) as hooks:
        hooks.forward("0", lambda *arguments: None)
        hooks.forward(select, lambda *arguments: None)
    with pytest.raises(Boom):
        th.record(net, select)
    with pytest.raises(Boom):
        th.record(net, tensors=select)
    assert hook_counts(net) == before


def test_a_handle_as_context_manager_comes_off_alone() -> None:
    net = mlp()
    with th.hooks(net) as hooks:
        stays = hooks.forward("0", lambda *arguments: None)
        with pytest.raises(Boom), hooks.forward("**", lambda *arguments: None) as handle:
            raise Boom
        assert not handle.live and stays.live
        assert [len(module._forward_hooks) for module in net.modules()] == [0, 1, 0, 0]


def test_hooks_of_others_stay() -> None:
    net = mlp()
    seen: list[str] = []
    net[0].register_forward_hook(lambda *arguments: seen.append("theirs"))
    with pytest.raises(Boom), th.hooks(net) as hooks:
        _put_all(hooks, lambda *arguments: None)
        raise Boom
    net(torch.ones(1, 4))
    assert seen == ["theirs"]


# ---- 25: removing and adding while hooks run ----


def test_a_hook_removed_by_the_one_before_it_does_not_run() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    ran: list[str] = []
    with th.hooks(net) as hooks:

        def first(*arguments: Any) -> None:
            ran.append("a")
            a.remove()
            b.remove()
            hooks.forward("0", lambda *arguments: ran.append("late"))

        a = hooks.forward("0", first)
        b = hooks.forward("0", lambda *arguments: ran.append("b"))
        net(torch.ones(1, 2))
        assert ran == ["a"]
        net(torch.ones(1, 2))
        assert ran == ["a", "late"]
        assert (a.fired, b.fired) == (1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_removal_takes_effect_at_once_for_every_kind(kind: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    select = "0.weight" if kind == "param_grad" else "0"
    with th.hooks(net) as hooks:

        def first(*arguments: Any) -> None:
            one.remove()
            two.remove()

        one = getattr(hooks, kind)(select, first)
        two = getattr(hooks, kind)(select, lambda *arguments: None)
        for _ in range(2):
            net(torch.ones(1, 2, requires_grad=True)).sum().backward()
        # hooks on one tensor run in the order in which they were put on, too
        assert (one.fired, two.fired) == (1, 0)
        assert not one.live and not two.live


@pytest.mark.parametrize("kind", ["backward_pre", "backward"])
def test_a_backward_hook_removed_after_the_forward_does_not_fire(kind: str) -> None:
    net = mlp()
    with th.hooks(net) as hooks:
        handle = getattr(hooks, kind)("**", lambda *arguments: None)
        out = net(torch.ones(1, 4, requires_grad=True))
        handle.remove()
        out.sum().backward()
        assert handle.fired == 0


def test_a_backward_hook_removes_those_that_wait_behind_it() -> None:
    net = mlp()
    with th.hooks(net) as hooks:
        last = hooks.backward("2", lambda *arguments: others.remove())
        others = hooks.backward(["0", "1"], lambda *arguments: None)
        net(torch.ones(1, 4, requires_grad=True)).sum().backward()
        assert (last.fired, others.fired) == (1, 0)


def test_closing_the_set_in_a_callback_ends_all_of_it() -> None:
    net = mlp()
    before = hook_counts(net)
    hooks = th.hooks(net)
    hooks.forward("0", lambda *arguments: hooks.close())
    rest = hooks.forward(["1", "2"], lambda *arguments: None)
    net(torch.ones(1, 4)).sum().backward()
    assert rest.fired == 0
    assert hook_counts(net) == before


def test_a_tensor_hook_removes_itself_and_the_next() -> None:
    x = torch.ones(2, requires_grad=True)
    with th.hooks(nn.Linear(2, 2)) as hooks:
        y = x * 2

        def first(gradient: torch.Tensor) -> None:
            one.remove()
            two.remove()

        one = hooks.tensor(y, first)
        two = hooks.tensor(y, lambda gradient: gradient * 100)
        y.sum().backward()
    assert (one.fired, two.fired) == (1, 0)
    assert torch.equal(x.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]


def test_removal_where_the_call_has_failed_never_hides_the_error() -> None:
    # torch walks through its table of hooks itself then: whoever changes it there gets a RuntimeError in place of the real one
    net = nn.Sequential(Failing())
    before = hook_counts(net)
    with th.hooks(net) as hooks:
        handle = hooks.forward("0", lambda *arguments: (handle.remove(), later.remove()), always_call=True)
        later = hooks.forward("0", lambda *arguments: None, always_call=True)
        with pytest.raises(Boom, match="real error"):
            net(torch.ones(1, 4))
        assert (handle.fired, later.fired) == (1, 0)
        assert not handle.live and not later.live
    assert hook_counts(net) == before


def test_a_hook_removed_where_the_call_has_failed_is_gone_by_the_next_call() -> None:
    failing = Failing()
    hooks = th.hooks(failing)
    handle = hooks.forward("(root)", lambda *arguments: handle.remove(), always_call=True)
    watch = hooks.forward_pre("(root)", lambda *arguments: None)
    with pytest.raises(Boom):
        failing(torch.ones(1))
    failing.armed = False
    failing(torch.ones(1))
    assert handle.fired == 1
    watch.remove()
    assert len(failing._forward_hooks) == 0
    hooks.close()


# ---- 65: no global hooks ----


def _registries() -> dict[str, int]:
    return {
        name: len(value)
        for name, value in vars(registries).items()
        if name.startswith("_global_") and hasattr(value, "__len__")
    }


def test_sessions_put_no_hook_on_all_modules() -> None:
    net, loss = mlp(), nn.MSELoss()
    before = _registries()
    with th.hooks(net) as hooks, th.record(net) as rec:
        _put_all(hooks, lambda *arguments: None)
        assert _registries() == before
        loss(net(torch.ones(1, 4)), torch.ones(1, 2)).backward()
    assert _registries() == before
    assert {call.type for call in rec.order()} == {"Sequential", "Linear", "ReLU"}


def test_an_edit_reaches_the_model_and_nothing_else() -> None:
    net, other = nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)
    x = torch.ones(1, 1)
    clean, theirs = net(x), other(x)
    with th.hooks(net) as hooks:
        hooks.forward("0", lambda module, args, output: output * 2)
        assert torch.equal(net(x), clean * 2)
        assert torch.equal(other(x), theirs)
    assert torch.equal(net(x), clean)


def test_an_in_place_model_survives_every_session() -> None:
    net = mlp()
    x = torch.ones(2, 4, requires_grad=True)
    net(x).sum().backward()
    expected, x.grad = x.grad, None
    with th.hooks(net) as hooks, th.record(net, kinds=th_kinds()):
        _put_all(hooks, lambda *arguments: None)
        net(x).sum().backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


# ---- sessions that nobody closes ----

_OPEN = {
    "hooks": "kept = th.hooks(net); kept.forward('**', lambda *arguments: None)",
    "edit": "kept = th.edit(net); kept.output('0', lambda value: value * 2); kept.start()",
    "single": "kept = th.register_forward_hook(net[0], lambda *arguments: None)",
    "record": "kept = th.record(net); kept.__enter__()",
}


@pytest.mark.parametrize("session", _OPEN)
def test_a_session_left_open_lets_the_interpreter_end_in_silence(session: str) -> None:
    program = (
        "import torch, tenterhook as th\nnet = torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
        f"{_OPEN[session]}\nnet(torch.ones(1, 2))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_set_that_is_dropped_leaves_its_hooks_on_and_whole_until_the_model_is_gone() -> None:
    net: Any = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    seen: list[str] = []
    th.hooks(net).forward("0.linear1", lambda *arguments: seen.append("linear1"))
    gc.collect()
    with torch.no_grad():
        net(torch.ones(1, 2, 8))
    assert seen == ["linear1"]
    assert not torch.backends.mha.get_fastpath_enabled()
    table: dict[int, Any] = net[0].linear1._forward_hooks
    del net
    gc.collect()
    assert torch.backends.mha.get_fastpath_enabled()
    table.clear()
