"""Rows 08 and 39: why no gradient came where an output shows no tensor, or more than one of which some have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.errors import TenterhookWarning
from tests.semantics.asking import ignore, missing, why


class Slots:
    """Keeps what it has where nobody looks."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Giving(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(x)


def _net(wrap: Callable[[Tensor], Any]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), Giving(wrap))


UNSEEN: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor] | None, str]] = {
    "slots": (Slots, lambda out: out.tensor, "Slots"),
    "set": (lambda t: {t}, lambda out: next(iter(out)), "set"),
    "generator": (lambda t: (one for one in [t]), next, "generator"),
    "function": (lambda t: lambda: t, lambda out: out(), "function"),
    "number": (lambda t: t.sum().item(), None, "float"),
    "nothing": (lambda t: None, None, "NoneType"),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", UNSEEN)
def test_an_output_in_which_no_tensor_is_seen_is_told(name: str, backward: bool) -> None:
    """08, D: the module was called, and its gradient may have gone on; what is said is that nothing was seen of it."""
    wrap, take, type_name = UNSEEN[name]
    net = _net(wrap)
    with th.record(net) as rec, th.hooks(net) as hooks:
        hooks.backward("**", ignore)
        hooks.backward_pre("1", ignore)
        out = net(torch.ones(1, 2))
        if backward and take is not None:
            take(out).sum().backward()
        expected = dict.fromkeys(("(root)", "1"), f"no gradient: no tensor is seen in its output ({type_name})")
        if not (backward and take is not None):
            expected["0"] = "no gradient: no backward pass reached it"
        assert why(hooks) == expected
    assert missing(rec) == expected


def test_an_output_in_which_no_tensor_is_seen_is_told_where_values_alone_are_recorded() -> None:
    """08, D: nothing of it is in the recording, under no_grad, too."""
    net = _net(lambda t: {t})
    with th.record(net, kinds=["output"]) as rec, torch.no_grad():
        net(torch.ones(1, 2))
    reason = "no tensor is seen in its output (set)"
    assert missing(rec) == {"(root)": reason, "1": reason}
    with th.record(net, "0", kinds=["output"]) as rec, torch.no_grad():
        net(torch.ones(1, 2))
    assert rec.coverage.complete


MIXED: dict[str, Callable[[Tensor], Any]] = {
    "an index after it": lambda t: (t, t.argmax(-1)),
    "an index before it": lambda t: (t.argmax(-1), t),
    "a detached value after it": lambda t: {"a": t, "b": [t.detach()]},
    "packed": lambda t: nn.utils.rnn.pack_sequence([t]),
}


@pytest.mark.parametrize("kind", ["backward", "backward_pre"])
@pytest.mark.parametrize("name", MIXED)
def test_an_output_of_which_a_part_has_no_gradient_waits_for_the_rest(name: str, kind: str) -> None:
    """39, D: it is the backward pass that is missing, and not that nothing requires a gradient; so for edits."""
    net = _net(MIXED[name])
    reason = "no gradient: no backward pass reached it"
    with th.record(net) as rec, th.hooks(net) as hooks:
        getattr(hooks, kind)("1", ignore)
        net(torch.ones(1, 2))
        assert why(hooks) == {"1": reason}
    assert missing(rec) == dict.fromkeys(("(root)", "0", "1"), reason)
    with pytest.warns(TenterhookWarning, match=rf"1 grad_output .*: {reason}"), th.edit(net) as edit:
        edit.grad_output("1", th.edits.scale(1.0), slot="**")
        net(torch.ones(1, 2))


@pytest.mark.parametrize("first", ["no_grad", "frozen"])
def test_the_reason_of_an_earlier_call_does_not_outlive_it(first: str) -> None:
    """39, D: a call without gradients, then one that could have had some."""
    net = nn.Sequential(nn.Linear(2, 2))
    with th.hooks(net) as hooks:
        hooks.backward("0", ignore)
        net.requires_grad_(first != "frozen")
        with torch.set_grad_enabled(first != "no_grad"):
            net(torch.ones(1, 2))
        assert why(hooks)["0"] == f"no gradient: {'grad mode off' if first == 'no_grad' else 'requires_grad=False'}"
        net.requires_grad_()
        net(torch.ones(1, 2))
        assert why(hooks)["0"] == "no gradient: no backward pass reached it"


def test_a_container_that_is_passed_by_is_told_where_its_parts_have_no_gradient() -> None:
    """37, D: hooks on gradients alone know of calls by their reasons, too."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.block.forward(x)

    net = Outer()
    with th.hooks(net) as hooks, torch.no_grad():
        hooks.backward("**", ignore)
        net(torch.ones(1, 2))
        assert why(hooks) == {
            "(root)": "no gradient: grad mode off",
            "block": "never called itself, only modules inside it: through .forward, another method, or a slice of it",
            "block.0": "no gradient: grad mode off",
        }
