"""Callbacks that do what they should not: wrong signatures, errors, removal while running, calls of their own module, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.errors import EditError, HookError, SelectionError
from tests.semantics.nets import Boom, hook_counts, mlp

ARGUMENTS = {
    "forward_pre": ("module", "args"),
    "forward": ("module", "args", "output"),
    "backward_pre": ("module", "grad_output"),
    "backward": ("module", "grad_input", "grad_output"),
}
KINDS = list(ARGUMENTS)
SINGLE: dict[str, Callable[..., Any]] = {
    "forward_pre": th.register_forward_pre_hook,
    "forward": th.register_forward_hook,
    "backward_pre": th.register_backward_pre_hook,
    "backward": th.register_backward_hook,
}


def _run(net: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    x = torch.randn(3, 4, requires_grad=True)
    out = net(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out, x.grad, *(parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None)]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["set", "single"])
@pytest.mark.parametrize(
    "fn",
    [lambda: None, lambda module: None, lambda module, a, b, c, d: None, lambda *, module: None, 3, "forward", None],
    ids=["none", "one", "five", "keyword only", "number", "text", "None"],
)
def test_a_wrong_signature_is_found_at_registration(kind: str, form: str, fn: Any) -> None:
    """And named with the arguments that will be given; nothing is put on."""
    net = mlp()
    before = hook_counts(net)
    with (
        th.hooks(net) as hooks,
        pytest.raises(HookError, match=rf"(?s){kind}.*fn\({', '.join(ARGUMENTS[kind])}\)") as refused,
    ):
        getattr(hooks, kind)("2", fn) if form == "set" else SINGLE[kind](net[2], fn)
    assert hook_counts(net) == before
    assert callable(fn) == ("write it as" in str(refused.value))


@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_that_raises_leaves_the_next_step_clean(kind: str) -> None:
    """Before, in and after a call, and in the backward pass: the error is the callback's, with its place; then all is as before."""
    net = mlp()
    clean = _run(net)

    def fail(*arguments: Any) -> None:
        raise Boom(kind)

    with th.hooks(net) as hooks:
        handle = getattr(hooks, kind)("2", fail)
        with pytest.raises(Boom, match=kind):
            _run(net)
        handle.remove()
        assert _same(_run(net), clean)
    assert hook_counts(net) == hook_counts(mlp())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["set", "single"])
def test_a_callback_that_removes_itself_and_another(kind: str, form: str) -> None:
    net = mlp()
    clean = _run(net)
    handles: list[Any] = []
    seen: list[str] = []

    def first(*arguments: Any) -> None:
        seen.append("first")
        for handle in handles:
            handle.remove()

    with th.hooks(net) as hooks:
        for fn in (first, lambda *arguments: seen.append("second")):
            handles.append(getattr(hooks, kind)("2", fn) if form == "set" else SINGLE[kind](net[2], fn))
        for _ in range(2):
            assert _same(_run(net), clean)
    assert seen == ["first"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["set", "single"])
def test_a_callback_that_calls_its_own_module_is_not_called_for_that(kind: str, form: str) -> None:
    """The inner call runs, other hooks see it, and the callback fires once."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    clean = _run(net)
    others: list[int] = []

    def again(module: nn.Module, *arguments: Any) -> None:
        with torch.no_grad():
            assert module(torch.zeros(1, 4)).shape == (1, 2)

    with th.hooks(net) as hooks:
        hooks.forward("2", lambda module, args, output: others.append(len(output)))
        handle = getattr(hooks, kind)("2", again) if form == "set" else SINGLE[kind](net[2], again)
        assert _same(_run(net), clean)
        assert handle.fired == 1
        handle.remove()
    assert sorted(others) == [1, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_that_draws_random_numbers_is_the_only_one_who_does(kind: str) -> None:
    """What it draws moves the generator, as it does under the framework's own hooks, and nothing else does."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    plain = {"forward_pre": "register_forward_pre_hook", "forward": "register_forward_hook"}
    plain |= {"backward_pre": "register_full_backward_pre_hook", "backward": "register_full_backward_hook"}

    def draw(*arguments: Any) -> None:
        torch.rand(7)

    handle = getattr(net[0], plain[kind])(draw)
    expected = _run(net), torch.get_rng_state()
    handle.remove()
    with th.hooks(net) as hooks:
        getattr(hooks, kind)("0", draw)
        found = _run(net), torch.get_rng_state()
    assert _same(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda value: [value, value],
        lambda value: [value],
        lambda value: {"value": value},
        lambda value: value.double(),
        lambda value: value[:1],
        lambda value: value.mean(),
        lambda value: 3.0,
        lambda value: "text",
        lambda value: value.detach().numpy(),
        lambda value: value.to("meta"),
    ],
    ids=["list of two", "list", "dict", "dtype", "shape", "scalar", "number", "text", "array", "device"],
)
def test_what_cannot_be_the_value_is_refused_at_that_place(kind: str, wrong: Callable[[Tensor], Any]) -> None:
    net = mlp()
    clean = _run(net)
    with th.hooks(net) as hooks:
        getattr(hooks, kind)("2", lambda module, args, output=None: wrong(args[0] if output is None else output))
        with pytest.raises(EditError, match=rf"{kind} of 2 .*returned"):
            _run(net)
    assert _same(_run(net), clean)


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_that_is_never_called_and_the_name_of_a_parameter_are_refused(kind: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2)])

    net = Net()
    with th.hooks(net) as hooks:
        for name, advice in (
            ("blocks", r"blocks\.\*"),
            ("blocks.0.weight", "param_grad|parameter"),
            ("block", "blocks"),
        ):
            with pytest.raises(SelectionError, match=advice):
                getattr(hooks, kind)(name, lambda *arguments: None)
    with pytest.raises(HookError, match="never called"):
        SINGLE[kind](net.blocks, lambda *arguments: None)
