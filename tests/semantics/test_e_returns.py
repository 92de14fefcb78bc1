"""SEMANTICS.md E: what observers and edits return (32, 33), and the order of hooks (36)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.errors import EditError
from tests.semantics.nets import mlp

KINDS = ("forward_pre", "forward", "backward_pre", "backward", "param_grad")


def _x() -> Tensor:
    return torch.arange(8.0).reshape(2, 4).requires_grad_()


def _run(net: nn.Module) -> list[Tensor]:
    """Output, gradient of the input, gradients of the parameters."""
    net.zero_grad()
    x = _x()
    out = net(x)
    out.sum().backward()
    return [out, x.grad, *(parameter.grad for parameter in net.parameters())]  # type: ignore[list-item]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- 32: a recording expression with a value must not become the output ----


@pytest.mark.parametrize("sabotage", ["value", "start", "end", "backward"])
def test_what_an_observer_returns_is_ignored(sabotage: str) -> None:
    from tenterhook.backends.torch import BACKEND
    from tenterhook.capture import Capture
    from tenterhook.inventory import watch_model
    from tenterhook.recording.memory import MemorySink
    from tenterhook.request import capture_options, check_kinds

    net = mlp()
    clean = _run(net)
    heard: list[str] = []

    def listener(event: str, *arguments: Any) -> Any:
        heard.append(event)
        return torch.zeros(()) if event == sabotage else False

    kinds = check_kinds(["input", "output", "grad_output", "grad_input"], tensors=False)
    options = capture_options(kinds, stats="basic", sketch=True, recompute=False, on_error="raise", to_disk=False)
    capture = Capture(BACKEND, MemorySink(), options, lambda: None, lambda step: None, listener)
    capture.watched = watch_model(BACKEND, net, "Net", None, False)
    for watched in capture.watched:
        capture.attach(watched)
    recorded = _run(net)
    capture.close()
    assert sabotage in heard
    assert _equal(clean, recorded)


@pytest.mark.parametrize(
    "returned",
    [
        torch.zeros(()),
        False,
        0.0,
        "stat",
        [torch.zeros(2, 4)],
        {"mean": 1.0},
        torch.zeros(2),
        torch.zeros(2, 4, dtype=torch.float64),
    ],
    ids=["stat", "False", "number", "text", "list", "dict", "shape", "dtype"],
)
def test_a_value_that_is_no_output_is_refused_by_name(returned: Any) -> None:
    net = mlp()
    clean = _run(net)
    with th.hooks(net) as hooks:
        hooks.forward("0", lambda module, args, output: returned)
        with pytest.raises(EditError, match=r"forward of 0 .*returned"):
            net(_x())
    assert _equal(clean, _run(net))


@pytest.mark.parametrize(
    "returned", [[torch.zeros(2, 4)], False, torch.zeros(()), (), {"x": torch.zeros(2, 4)}], ids=repr
)
def test_a_pre_hook_that_returns_no_arguments_is_refused(returned: Any) -> None:
    net = mlp()
    with th.hooks(net) as hooks:
        hooks.forward_pre("2", lambda module, args: returned)
        with pytest.raises(EditError, match=r"forward_pre of 2"):
            net(_x())


@pytest.mark.parametrize("kind", ["backward_pre", "backward"])
@pytest.mark.parametrize("returned", [torch.zeros(()), False, 1.0, (), (torch.zeros(1), torch.zeros(1))], ids=repr)
def test_a_backward_hook_that_returns_no_gradients_is_refused(kind: str, returned: Any) -> None:
    net = mlp()
    with th.hooks(net) as hooks:
        getattr(hooks, kind)("2", lambda *arguments: returned)
        with pytest.raises(EditError, match=rf"{kind} of 2"):
            net(_x()).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_observing_callbacks_change_nothing(kind: str) -> None:
    net = mlp()
    clean = _run(net)
    store: dict[int, Any] = {}
    with th.hooks(net) as hooks:
        getattr(hooks, kind)("**", lambda *arguments: store.update({len(store): arguments}))
        assert _equal(clean, _run(net))
    assert store


def test_an_edit_replaces_exactly_what_it_returns() -> None:
    net = mlp()
    with th.hooks(net) as hooks:
        hooks.forward("(root)", lambda module, args, output: output * 2)
        edited = _run(net)
    clean = _run(net)
    assert torch.equal(edited[0], clean[0] * 2)
    assert torch.equal(edited[1], clean[1] * 2)


# ---- 33: the structure of an output ----


class Pair(NamedTuple):
    """An output with names."""

    values: Tensor
    cache: Any


class Block(nn.Module):
    """Gives what ``wrap`` makes of a tensor of shape (2, 3, 4)."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(x * 1.0)


class Stack(nn.Module):
    """Takes the first item of what its block gives, as transformers do."""

    def __init__(self, wrap: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.block = Block(wrap)
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        return self.take(self.block(x))


SHAPES = {
    "tuple": (lambda t: (t, None), lambda out: out[0]),
    "named tuple": (lambda t: Pair(t, {"keys": t + 1}), lambda out: out.values),
    "list": (lambda t: [t, t], lambda out: out[0]),
    "dict": (lambda t: {"hidden": t, "past": (t,)}, lambda out: out["hidden"]),
    "nested": (lambda t: ((t, 1), None), lambda out: out[0][0]),
}


@pytest.mark.parametrize("form", SHAPES)
def test_a_bare_tensor_for_a_structured_output_is_refused(form: str) -> None:
    net = Stack(*SHAPES[form])
    with th.hooks(net) as hooks:
        hooks.forward("block", lambda module, args, output: torch.zeros(2, 3, 4))
        with pytest.raises(EditError, match="structure") as caught:
            net(torch.ones(2, 3, 4))
    message = str(caught.value)
    assert "block" in message and "tensor" in message.lower()
    assert {"named tuple": "pair", "nested": "tuple"}.get(form, form) in message.lower()


@pytest.mark.parametrize("form", SHAPES)
def test_an_edit_that_keeps_the_structure_goes_through(form: str) -> None:
    wrap, take = SHAPES[form]
    net = Stack(wrap, take)
    with th.hooks(net) as hooks:
        hooks.forward("block", lambda module, args, output: wrap(take(output) * 2))
        out = net(torch.ones(2, 3, 4))
    assert torch.equal(out, torch.full((2, 3, 4), 2.0))


@pytest.mark.parametrize(
    ("wrap", "slot", "expected"),
    [
        (lambda t: (t, None), "[0]", lambda t: (t * 2, None)),
        (lambda t: Pair(t, {"keys": t + 1}), ".values", lambda t: Pair(t * 2, {"keys": t + 1})),
        (lambda t: {"hidden": t, "past": (t,)}, '["past"][0]', lambda t: {"hidden": t, "past": (t * 2,)}),
    ],
    ids=["tuple", "named tuple", "dict"],
)
def test_an_edit_of_one_slot_keeps_the_rest(
    wrap: Callable[[Tensor], Any], slot: str, expected: Callable[[Tensor], Any]
) -> None:
    net, x = Block(wrap), torch.ones(2, 3, 4)
    with th.edit(net) as edit:
        edit.output("", lambda value: value * 2, slot=slot)
        out = net(x)
    truth = expected(x)
    assert th.values.same_structure(out, truth, torch.Tensor) is None and type(out) is type(truth)
    for (place, one), (_, other) in zip(
        th.values.leaves(out, torch.Tensor), th.values.leaves(truth, torch.Tensor), strict=True
    ):
        assert torch.equal(one, other), place


def test_a_structure_may_change_where_it_is_allowed() -> None:
    net = Stack(lambda t: (t, None), lambda out: out[0])
    with th.hooks(net) as hooks:
        hooks.forward("block", lambda module, args, output: [output[0] * 3], allow="structure")
        assert torch.equal(net(torch.ones(2, 3, 4)), torch.full((2, 3, 4), 3.0))


# ---- 36: order ----

ORDER = "fp:root fp:0 f:0 fp:1 f:1 f:root bp:root bp:1 b:1 bp:0 b:0 b:root"


def _order(net: nn.Module, x: Tensor) -> str:
    fired: list[str] = []

    def say(word: str) -> Callable[..., None]:
        return lambda name, *arguments: fired.append(f"{word}:{name or 'root'}")

    with th.hooks(net) as hooks:
        for kind, word in (("forward_pre", "fp"), ("forward", "f"), ("backward_pre", "bp"), ("backward", "b")):
            getattr(hooks, kind)("**", say(word), with_name=True)
        net(x).sum().backward()
    return " ".join(fired)


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5, inplace=True)),
    ],
    ids=["linear", "in-place relu", "in-place dropout"],
)
def test_hooks_of_the_four_kinds_nest(net: nn.Module, needs_grad: bool) -> None:
    assert _order(net, torch.ones(2, 4, requires_grad=needs_grad)) == ORDER


def test_hooks_of_one_module_run_in_order_and_prepended_ones_first() -> None:
    for kind in KINDS[:4]:
        net, fired = nn.Sequential(nn.Linear(4, 4)), []
        with th.hooks(net) as hooks:
            for word in ("1", "2"):
                getattr(hooks, kind)("0", lambda *arguments, word=word: fired.append(word))  # noqa: B023
            if kind.startswith("forward"):
                getattr(hooks, kind)("0", lambda *arguments: fired.append("prep"), prepend=True)  # noqa: B023
            net(_x()).sum().backward()
        assert fired == (["prep", "1", "2"] if kind.startswith("forward") else ["1", "2"]), kind


def test_a_global_hook_comes_before_ours() -> None:
    net, fired = nn.Sequential(nn.Linear(4, 4)), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *rest: fired.append("global"))
    try:
        with th.hooks(net) as hooks:
            hooks.forward("0", lambda *arguments: fired.append("1"))
            hooks.forward("0", lambda *arguments: fired.append("2"))
            hooks.forward("0", lambda *arguments: fired.append("prep"), prepend=True)
            net[0](_x())
    finally:
        handle.remove()
    assert fired == ["global", "prep", "1", "2"]


def test_two_edits_apply_in_the_order_in_which_they_were_attached() -> None:
    net = nn.Sequential(nn.Identity())
    x = torch.ones(2, requires_grad=True)
    seen: list[Tensor] = []
    with th.hooks(net) as hooks:
        hooks.forward("0", lambda module, args, output: output + 1)
        hooks.forward("0", lambda module, args, output: output * 10)
        hooks.forward("0", lambda module, args, output: seen.append(output.detach().clone()))
        hooks.forward("0", lambda module, args, output: output - 5)
        out = net(x)
    assert torch.equal(out, torch.full((2,), 15.0))
    assert torch.equal(seen[0], torch.full((2,), 20.0))


@pytest.mark.parametrize("kind", ["backward_pre", "backward"])
def test_two_edits_of_a_gradient_apply_in_order(kind: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False))
    nn.init.eye_(net[0].weight)
    x = torch.ones(1, 2, requires_grad=True)
    seen: list[Tensor] = []
    with th.hooks(net) as hooks:
        getattr(hooks, kind)("0", lambda *arguments: (arguments[1][0] + 1,))
        getattr(hooks, kind)("0", lambda *arguments: (arguments[1][0] * 10,))
        getattr(hooks, kind)("0", lambda *arguments: seen.append(arguments[1][0].clone()))
        net(x).sum().backward()
    assert torch.equal(seen[0], torch.full((1, 2), 20.0))
    assert torch.equal(x.grad, torch.full((1, 2), 20.0))  # type: ignore[arg-type]


def test_a_recording_begun_after_an_edit_sees_the_edited_value() -> None:
    net = nn.Sequential(nn.Identity())
    with th.hooks(net) as hooks:
        hooks.forward("0", lambda module, args, output: output * 10)
        with th.record(net, tensors=True) as rec:
            net(torch.ones(2))
    assert torch.equal(rec["0"].output, torch.full((2,), 10.0))


def test_edits_of_parameter_gradients_apply_in_order() -> None:
    net = nn.Linear(2, 1, bias=False)
    with th.hooks(net) as hooks:
        hooks.param_grad("weight", lambda name, gradient: gradient + 1)
        hooks.param_grad("weight", lambda name, gradient: gradient * 10)
        net(torch.ones(1, 2)).sum().backward()
    assert torch.equal(net.weight.grad, torch.full((1, 2), 20.0))  # type: ignore[arg-type]
