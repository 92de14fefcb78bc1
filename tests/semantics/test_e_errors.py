"""SEMANTICS.md E: errors keep their type and say where (34), always_call (35), patched forwards (58)."""

from __future__ import annotations

import copy
import logging
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recording.memory import MemorySink
from tests.semantics.nets import Boom, Failing, hook_counts, mlp

needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions bear notes from Python 3.11 on")


def _notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("tenterhook: ")]


def _fail(*arguments: Any) -> None:
    raise Boom("mine")


class Deep(nn.Module):
    """A failing module two levels down, called with a tuple and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"bad": Failing(ValueError("real error"))})

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["bad"](self.first(x), scale=torch.ones(4))


# ---- 34: type kept, place told ----


@needs_notes
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward_pre", "backward", "param_grad", "tensor"])
def test_an_error_of_a_callback_says_which(kind: str) -> None:
    net = mlp()
    with th.hooks(net) as hooks:
        if kind == "tensor":
            x = torch.ones(2, 4, requires_grad=True)
            hooks.tensor(x, _fail)
        else:
            x = torch.ones(2, 4)
            getattr(hooks, kind)("0.weight" if kind == "param_grad" else "0", _fail)
        with pytest.raises(Boom, match="mine") as caught:
            net(x).sum().backward()
    notes = _notes(caught.value)
    assert len(notes) == 1
    assert "_fail" in notes[0] and kind in notes[0]
    assert {"param_grad": "0.weight", "tensor": "(tensor)"}.get(kind, "on 0") in notes[0]


@needs_notes
@pytest.mark.parametrize("session", ["hooks", "record", "both"])
def test_an_error_of_the_model_says_where_once(session: str) -> None:
    net = Deep()
    with pytest.raises(ValueError, match=r"^real error") as caught:
        if session == "hooks":
            with th.hooks(net) as hooks:
                for kind in ("forward_pre", "forward", "backward_pre", "backward"):
                    getattr(hooks, kind)("**", lambda *arguments: None)
                net(torch.ones(2, 4))
        elif session == "record":
            with th.record(net):
                net(torch.ones(2, 4))
        else:
            with th.hooks(net) as hooks, th.record(net):
                hooks.forward("**", lambda *arguments: None)
                net(torch.ones(2, 4))
    assert str(caught.value) == "real error"
    (note,) = _notes(caught.value)
    assert "forward of inner.bad (Failing)" in note
    assert "x float32 (2, 4)" in note and "scale float32 (4,)" in note


@needs_notes
def test_an_error_of_the_framework_is_noted_too() -> None:
    net = mlp()
    with th.record(net), pytest.raises(RuntimeError) as caught:
        net(torch.ones(2, 5))
    (note,) = _notes(caught.value)
    assert "forward of 0 (Linear), call 0 of step 0, called with input float32 (2, 5)" in note


@needs_notes
def test_an_error_that_replaces_another_is_noted_by_itself() -> None:
    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = Failing()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.bad(x)
            except Boom as error:
                raise LookupError("translated") from error

    with th.record(mlp()), pytest.raises(LookupError) as caught:
        Translate()(torch.ones(1))  # not the model of the session
    assert _notes(caught.value) == []
    net = Translate()
    with th.record(net), pytest.raises(LookupError) as caught:
        net(torch.ones(1))
    assert "forward of (root)" in _notes(caught.value)[0]
    assert "forward of bad" in _notes(caught.value.__cause__)[0]  # type: ignore[arg-type]


def test_the_next_step_after_an_error_is_clean() -> None:
    net = nn.Sequential(mlp(), Failing())
    with th.record(net) as rec:
        for armed in (True, False):
            net[1].armed = armed
            try:
                net(torch.ones(2, 4)).sum().backward()
            except Boom:
                assert armed
    calls = [(call.path, call.depth, call.error is not None) for call in rec.order() if call.phase == "forward"]
    assert calls[-6:] == [
        ("", 0, False),
        ("0", 1, False),
        ("0.0", 2, False),
        ("0.1", 2, False),
        ("0.2", 2, False),
        ("1", 1, False),
    ]
    assert [call[0] for call in calls if call[2]] == ["", "1"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_an_interrupt_that_the_user_survives_is_no_parent_of_what_follows(error: BaseException) -> None:
    net = nn.Sequential(mlp(), Failing(error))
    with th.record(net) as rec:
        with pytest.raises(type(error)):
            net(torch.ones(2, 4))
        net[1].armed = False
        net(torch.ones(2, 4)).sum().backward()
    forward = [call for call in rec.order() if call.phase == "forward"]
    assert [(call.path, call.depth) for call in forward[-6:]] == [
        ("", 0),
        ("0", 1),
        ("0.0", 2),
        ("0.1", 2),
        ("0.2", 2),
        ("1", 1),
    ]
    assert [call.path for call in forward if call.error == "did not end"] == ["", "1"]
    assert [call.step for call in forward if call.path == ""] == [0, 1]


def test_a_hook_that_raises_before_ours_leaves_the_order_right() -> None:
    net = nn.Sequential(mlp())
    net[0][1].register_forward_pre_hook(_fail)
    with th.record(net) as rec, pytest.raises(Boom):
        net(torch.ones(2, 4))
    assert [(call.path, call.error) for call in rec.order()] == [("", "Boom: mine"), ("0", "Boom: mine"), ("0.0", None)]


def test_a_fault_of_ours_ends_the_recording_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net = mlp()
    before, x = hook_counts(net), torch.ones(2, 4)
    clean = net(x)
    monkeypatch.setattr("tenterhook.row_capture._BLOCK_ROWS", 2)

    def broken(self: MemorySink, batch: Any) -> None:
        raise Boom("disk on fire")

    monkeypatch.setattr(MemorySink, "write_calls", broken)
    with caplog.at_level(logging.WARNING, "tenterhook"), th.record(net, kinds=["output"]) as rec:
        out = net(x)
        assert hook_counts(net) == before  # detached at once
    assert torch.equal(out, clean)
    assert len(caplog.records) == 1
    assert "disk on fire" in (rec.recording.manifest.partial or "")


def test_a_fault_of_ours_raises_where_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    net = mlp()
    monkeypatch.setattr("tenterhook.row_capture._BLOCK_ROWS", 2)
    monkeypatch.setattr(MemorySink, "write_calls", _fail)
    with pytest.raises(Boom), th.record(net, on_error="raise"):
        net(torch.ones(2, 4))


# ---- 35: always_call ----


def test_always_call_gets_none_and_the_keywords() -> None:
    bad = Failing(ValueError("real error"))
    seen: list[Any] = []
    with th.hooks(bad) as hooks:
        hooks.forward(
            "(root)",
            lambda module, args, kwargs, output: seen.append((kwargs, output)),
            with_kwargs=True,
            always_call=True,
        )
        never = hooks.forward("(root)", lambda *arguments: None)
        with pytest.raises(ValueError, match="real error"):
            bad(torch.ones(1), scale=2)
        assert seen == [({"scale": 2}, None)]
        assert never.fired == 0
        bad.armed = False
        bad(torch.ones(1), scale=2)
        assert len(seen) == 2 and never.fired == 1


@pytest.mark.parametrize("with_kwargs", [True, False])
def test_an_error_of_the_hook_never_hides_the_real_one(with_kwargs: bool) -> None:
    net = nn.Sequential(Failing(ValueError("real error")))
    with th.hooks(net) as hooks:
        handle = hooks.forward("0", _fail, with_kwargs=with_kwargs, always_call=True)
        with warnings.catch_warnings(record=True) as warned, pytest.raises(ValueError, match=r"^real error") as caught:
            warnings.simplefilter("always")
            net(torch.ones(1))
        assert handle.fired == 1
    assert warned == [] and str(caught.value) == "real error"
    if sys.version_info >= (3, 11):
        assert any("also raised Boom: mine" in note and "_fail" in note for note in _notes(caught.value))


def test_always_call_is_not_called_twice_where_the_hook_itself_raises() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    with th.hooks(net) as hooks:
        handle = hooks.forward("0", _fail, always_call=True)
        with pytest.raises(Boom, match="mine"):
            net(torch.ones(1, 2))
        assert handle.fired == 1


def test_a_hook_without_always_call_stays_away_where_a_hook_before_it_raised() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_forward_hook(_fail)
    with th.hooks(net) as hooks:
        plain = hooks.forward("0", lambda *arguments: None)
        always = hooks.forward("0", lambda *arguments: None, always_call=True)
        with pytest.raises(Boom):
            net(torch.ones(1, 2))
        assert (plain.fired, always.fired) == (0, 1)


# ---- 58: patched forwards ----


def _patched(module: nn.Module) -> nn.Module:
    old = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs) * 2

    module.forward = forward  # type: ignore[method-assign]
    return module


def _bound(module: nn.Module) -> nn.Module:
    module.forward = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight) * 2, module)  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    "patch", [_patched, _bound, lambda module: _patched(_patched(module))], ids=["closure", "method", "twice"]
)
def test_a_patched_module_is_left_as_found(patch: Callable[[nn.Module], nn.Module]) -> None:
    net = nn.Sequential(patch(nn.Linear(4, 4, bias=False)), nn.ReLU(inplace=True))
    patched = net[0].forward
    plain = net(torch.ones(2, 4))
    keys = [set(vars(module)) for module in net.modules()]
    with th.record(net, tensors=True) as rec, th.hooks(net) as hooks:
        seen = hooks.forward("0", lambda *arguments: None)
        backward = hooks.backward("0", lambda *arguments: None)
        out = net(torch.ones(2, 4, requires_grad=True))
        out.sum().backward()
        assert net[0].forward is patched or net[0].forward == patched
        assert "forward" not in vars(net[1]) and "forward" not in vars(net)
    assert torch.equal(out, plain)
    assert (seen.fired, backward.fired) == (1, 1)
    assert len(rec["0"].calls) == 1
    assert vars(net[0])["forward"] is patched
    assert [set(vars(module)) for module in net.modules()] == keys


def test_patches_put_on_and_taken_off_inside_a_session_stay_the_users() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    with th.record(net) as rec:
        _patched(net[0])
        net(torch.ones(1, 4))
        del net[0].forward
        net(torch.ones(1, 4))
    assert "forward" not in vars(net[0])
    assert len(rec["0"].calls) == 2


def test_a_copy_of_a_patched_model_in_a_session_runs_as_a_copy_without_one() -> None:
    net = nn.Sequential(_bound(nn.Linear(4, 4, bias=False)))
    with th.record(net):
        inside = copy.deepcopy(net)
    outside = copy.deepcopy(net)
    for clone in (inside, outside):
        nn.init.zeros_(clone[0].weight)
    assert torch.equal(inside(torch.ones(1, 4)), outside(torch.ones(1, 4)))
