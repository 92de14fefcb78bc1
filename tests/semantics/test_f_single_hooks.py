"""Sections A and F (rows 04, 13, 14) for hooks without a session: what would run past them is off as long as they are on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.errors import TenterhookWarning
from tests.semantics.test_f_compile import TOLD, WAYS, make_net, stance

FORWARD: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "forward_pre": (th.register_forward_pre_hook, lambda module, args: (args[0] * 3,)),
    "forward": (th.register_forward_hook, lambda module, args, output: output * 3),
    "backward_pre": (th.register_backward_pre_hook, lambda module, grad_output: (grad_output[0] * 3,)),
    "backward": (th.register_backward_hook, lambda module, grad_input, grad_output: (grad_input[0] * 3,)),
}


@pytest.fixture(autouse=True, scope="module")
def loaded_compiler() -> None:
    """The first compilation of a process patches nn.Module for good; that is not ours to answer for."""
    torch.compile(nn.Identity(), backend="eager")(torch.ones(1))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _run(model: Any, factor: int) -> tuple[Tensor, Tensor]:
    x = torch.full((1, 2), float(factor), requires_grad=True)
    out = model(x)
    out.sum().backward()
    assert x.grad is not None
    return out, x.grad


def _same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("kind", FORWARD)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["before compilation", "before the first call", "after it"])
def test_an_edit_applies_whenever_the_model_was_compiled(kind: str, way: Callable[..., Any], when: str) -> None:
    """As without compilation, to the last bit, and compiled code is used again afterwards."""
    register, fn = FORWARD[kind]
    plain = make_net()
    bare = _run(plain, 1)
    with register(plain[2], fn):
        expected = [_run(plain, factor) for factor in (1, 2, 3)]
    net: Any = make_net()
    compiled: Any = None if when == "before compilation" else way(net, "eager")
    if when == "after it":
        compiled(torch.ones(1, 2))
    if compiled is None:
        handle = register(net[2], fn)
        compiled = way(net, "eager")
    else:
        with pytest.warns(
            TenterhookWarning, match="part of a compiled model: compiled code of this process runs eager"
        ) as said:
            handle = register(net[2], fn)
        assert said[0].filename == __file__
        assert handle.told == [TOLD]
    assert stance() == "force_eager"
    assert all(_same(_run(compiled, factor), one) for factor, one in zip((1, 2, 3), expected, strict=True))
    assert handle.fired == 3
    handle.remove()
    assert stance() == "default"
    assert _same(_run(compiled, 1), bare)
    assert handle.fired == 3


def test_the_switch_is_shared_with_sessions_and_goes_with_the_last() -> None:
    net = make_net()
    first = th.register_forward_hook(net[0], lambda *arguments: None)
    with th.hooks(net):
        second = th.register_backward_hook(net[2], lambda *arguments: None)
        first.remove()
        first.remove()
        assert stance() == "force_eager"
    assert stance() == "force_eager"
    second.remove()
    assert stance() == "default"


def test_a_dropped_handle_keeps_it_until_the_module_is_gone() -> None:
    net = make_net()
    gc.disable()
    try:
        th.register_forward_hook(net[0], lambda *arguments: None)
        assert stance() == "force_eager"
        table = net[0]._forward_hooks
        net(torch.ones(1, 2))
        del net
        assert stance() == "default"
        table.clear()
    finally:
        gc.enable()


def test_a_plain_model_warns_of_nothing() -> None:
    """Warnings are errors: a model that is part of no compiled one gives none, also beside one that is."""
    torch.compile(make_net(), backend="eager")(torch.ones(1, 2))
    th.register_forward_hook(make_net()[0], lambda *arguments: None).remove()


def test_a_warning_that_is_an_error_leaves_no_hook() -> None:
    net = make_net()
    compiled = torch.compile(net, backend="eager")
    compiled(torch.ones(1, 2))
    with pytest.raises(TenterhookWarning):
        th.register_forward_hook(net[0], lambda *arguments: None)
    assert not net[0]._forward_hooks
    assert stance() == "default"


def _encoder() -> tuple[nn.TransformerEncoder, Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 3, 8)


@pytest.mark.parametrize("place", ["layers.0.self_attn", "layers.1.linear1", "layers.0", "", "layers.1.dropout2"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_modules_in_a_fused_encoder_are_seen(place: str, kind: str) -> None:
    """Row 04: eval, no gradients: each call fires once; the fused path is on again afterwards."""
    encoder, x = _encoder()
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        bare = encoder(x)
        with FORWARD[kind][0](encoder.get_submodule(place), lambda *arguments: None) as handle:
            for _ in range(2):
                torch.testing.assert_close(encoder(x), bare)
        assert handle.fired == 2
        assert torch.backends.mha.get_fastpath_enabled()
        assert torch.equal(encoder(x), bare)


def test_a_hook_that_could_not_be_put_on_changes_nothing() -> None:
    net = make_net()

    @torch.compile(backend="eager")
    def register(x: Tensor) -> Tensor:
        th.register_forward_hook(net[0], lambda *arguments: None)
        return x + 1

    with pytest.raises(th.errors.UnsupportedError, match="cannot begin inside compiled code"):
        register(torch.ones(1))
    assert not net[0]._forward_hooks
    assert stance() == "default"
