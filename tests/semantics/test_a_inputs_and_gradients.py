"""Section A, rows 07, 39, 41, 45: inputs and gradients that torch's own hooks do not get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.errors import HookError
from tests.semantics.asking import (
    ignore,
    make_net,
    missing,
    why,
)

# ---- row 07: keyword inputs ----


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale


class Outer(nn.Module):
    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner
        self.call = call

    def forward(self, x: torch.Tensor, s: torch.Tensor) -> Any:
        return self.call(self.inner, x, s)


@pytest.mark.parametrize(
    "call",
    [
        lambda inner, x, s: inner(x=x, scale=s),
        lambda inner, x, s: inner(x, scale=s),
        lambda inner, x, s: inner(scale=s, x=x),
    ],
    ids=["keywords", "mixed", "reordered"],
)
def test_keyword_inputs_and_their_gradients(call: Callable[..., Any]) -> None:
    """Row 07: torch's hooks get no keyword inputs, and their gradients are absent from grad_input."""
    model = Outer(Scaled(), call)
    x, s = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with th.record(model, "inner", kinds=["input", "grad_input"], tensors=True) as rec:
        model(x, s).sum().backward()
    assert x.grad is not None and s.grad is not None
    truth = {"x": x.grad.clone(), "scale": s.grad.clone()}
    gradients: dict[str, Any] = {}
    with th.hooks(model) as hooks:
        hooks.backward(
            "inner",
            lambda module, grad_input, grad_output: gradients.update(x=grad_input["x"], scale=grad_input["scale"]),
        )
        model(x, s).sum().backward()
    recorded = {(row["kind"], row["slot"]) for row in rec.table("values").to_pylist()}
    assert recorded == {(kind, slot) for kind in ("input", "grad_input") for slot in ("x", "scale")}
    for slot in ("x", "scale"):
        assert rec["inner"].input[slot].tolist() == [1, 1]
        assert rec["inner"].grad_input[slot].tolist() == gradients[slot].tolist() == truth[slot].tolist() == [1, 1]


def test_keyword_only_and_nested_keyword_inputs() -> None:
    """Row 07, same kind: **kwargs, and a dict as a keyword."""

    class Inner(nn.Module):
        def forward(self, *, batch: dict[str, torch.Tensor], **more: torch.Tensor) -> torch.Tensor:
            return batch["x"] * more["scale"]

    model = Outer(Inner(), lambda inner, x, s: inner(batch={"x": x}, scale=s))
    x, s = torch.full((2,), 3.0, requires_grad=True), torch.full((2,), 5.0, requires_grad=True)
    with th.record(model, "inner", kinds="grad_input", tensors=True) as rec:
        model(x, s).sum().backward()
    rows = {row["slot"]: row["mean"] for row in rec.table("values").to_pylist()}
    assert sorted(rows.values()) == [3.0, 5.0]
    assert x.grad is not None and x.grad.tolist() == [5, 5]


# ---- row 39: no gradient ----


@pytest.mark.parametrize(
    ("mode", "reason"),
    [(torch.no_grad, "no gradient: grad mode off"), (torch.inference_mode, "no gradient: inference mode")],
)
def test_gradients_under_no_grad_are_told(mode: Callable[[], Any], reason: str) -> None:
    """Row 39: torch raises for a tensor hook and is mute for a module hook; here no exception, and the reason."""
    model = make_net()
    with mode(), th.record(model) as rec, th.hooks(model) as hooks:
        hooks.backward("**", ignore)
        hooks.backward_pre("2", ignore)
        model(torch.ones(1, 2))
    assert missing(rec) == dict.fromkeys(("(root)", "0", "1", "2"), reason)
    assert why(hooks) == dict.fromkeys(("(root)", "0", "1", "2"), reason)


def test_a_frozen_first_layer_is_told() -> None:
    """Row 39: no gradient comes to the output of a frozen layer, nor to its parameters."""
    model = make_net()
    model[0].requires_grad_(False)
    with th.record(model) as rec, th.hooks(model) as hooks:
        hooks.backward("**", ignore)
        hooks.param_grad("**", ignore)
        model(torch.ones(1, 2)).sum().backward()
    frozen = "no gradient: requires_grad=False"
    assert missing(rec) == {"0": frozen, "1": frozen}
    assert why(hooks) == {"0": frozen, "1": frozen, "0.weight": "requires_grad=False", "0.bias": "requires_grad=False"}


def test_a_tensor_without_gradient_is_refused() -> None:
    """Row 39: a hook on a tensor is refused, with the reason."""
    with th.hooks(make_net()) as hooks:
        with torch.no_grad(), pytest.raises(HookError, match="grad mode off"):
            hooks.tensor(torch.ones(1), ignore)
        with pytest.raises(HookError, match="requires_grad=False"):
            hooks.tensor(torch.ones(1), ignore)


def test_a_detached_part_is_told() -> None:
    """Row 39, same kind: gradients stop at a detach in the middle."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = self.a(x)
            return self.c(self.b(y).detach() + y)

    model = Net()
    with th.record(model) as rec, th.hooks(model) as hooks:
        hooks.backward("**", ignore)
        model(torch.ones(1, 2)).sum().backward()
    told = {"a": "no gradient: grad mode off", "b": "no gradient: not used by what was differentiated"}
    assert missing(rec) == told
    assert why(hooks) == told


def test_a_forward_without_backward_is_told() -> None:
    """Row 39, same kind: gradients asked for, no backward pass."""
    model = make_net()
    with th.record(model, "0") as rec, th.hooks(model) as hooks:
        hooks.backward("0", ignore)
        hooks.param_grad("0.weight", ignore)
        model(torch.ones(1, 2))
    reason = "no gradient: no backward pass reached it"
    assert missing(rec) == {"0": reason}
    assert why(hooks) == {"0": reason, "0.weight": reason}


# ---- row 41: .grad() and .backward() ----


@pytest.mark.parametrize(
    ("run", "fired"),
    [
        (lambda y, x, w: y.backward(), ["w.hook", "w.post", "module", "x.hook"]),
        (lambda y, x, w: y.backward(inputs=[x]), ["module", "x.hook"]),
        (lambda y, x, w: torch.autograd.grad(y, x), ["module", "x.hook"]),
        (lambda y, x, w: torch.autograd.grad(y, w), ["w.hook"]),
    ],
    ids=["backward", "backward(inputs)", "grad(x)", "grad(w)"],
)
def test_which_hooks_run_in_grad_and_in_backward(run: Callable[..., Any], fired: list[str]) -> None:
    """Row 41: the four lists; a hook on a module's inputs waits for those of the module, which grad(w) never reaches."""
    layer = nn.Linear(1, 1, bias=False)
    x = torch.ones(1, requires_grad=True)
    order: list[str] = []
    with th.hooks(layer) as hooks:
        hooks.param_grad("weight", lambda name, grad: order.append("w.hook"))
        hooks.param_grad("weight", lambda name, grad: order.append("w.post"), accumulated=True)
        hooks.tensor(x, lambda grad: order.append("x.hook"))
        hooks.backward("", lambda module, grad_input, grad_output: order.append("module"))
        run(layer(x).sum(), x, layer.weight)
    assert order == fired


def test_a_recording_sees_gradients_of_grad_as_of_backward() -> None:
    """Row 41, same kind: output gradients are there whichever is differentiated."""
    model: Any = make_net()
    for run in (
        lambda y: y.backward(),
        lambda y: torch.autograd.grad(y, model[0].weight),
        lambda y: torch.autograd.grad(y, list(model.parameters())),
    ):
        with th.record(model) as rec:
            run(model(torch.ones(1, 2)).sum())
        assert [call.path for call in rec.order() if call.phase == "backward"] == ["", "2", "1", "0"]


def test_grad_that_does_not_reach_a_module_is_told() -> None:
    """Row 41, same kind: grad with respect to the last weight stops there."""
    model: Any = make_net()
    with th.record(model) as rec:
        torch.autograd.grad(model(torch.ones(1, 2)).sum(), model[2].weight)
    assert missing(rec) == dict.fromkeys(("0", "1"), "no gradient: not used by what was differentiated")


# ---- row 45: gradient past the output ----


class Side(nn.Module):
    """Two outputs and a third value that leaves by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.side = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.side = x * 3
        return x * 2, x * 5


def run_side(loss: Callable[[Any, Side], torch.Tensor], *, edit: bool = True) -> tuple[Any, ...]:
    model = nn.Sequential(Side())
    inner: Any = model[0]
    x = torch.ones(1, requires_grad=True)
    seen: list[tuple[Any, ...]] = []

    def on_backward(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        seen.append(tuple(None if grad is None else grad.item() for grad in (*grad_input, *grad_output)))
        return (grad_input[0] * 100,) if edit else None

    with th.hooks(model) as hooks:
        hooks.backward("0", on_backward)
        loss(model(x), inner).sum().backward()
    assert x.grad is not None
    return seen, x.grad.item()


def test_an_edit_of_what_comes_past_the_output_applies() -> None:
    """Row 45: torch runs no hook for a loss from the attribute (x.grad 3); here the input's gradient is seen and edited."""
    assert run_side(lambda out, module: module.side) == ([(3.0, None, None)], 300.0)
    assert run_side(lambda out, module: module.side + out[0]) == ([(5.0, 1.0, None)], 500.0)


def test_an_unused_output_is_none_and_not_zero() -> None:
    """Row 45: the second output is not used."""
    assert run_side(lambda out, module: out[0], edit=False) == ([(2.0, 1.0, None)], 2.0)
    model = nn.Sequential(Side())
    with th.record(model, "0", kinds="grad_output") as rec:
        model(torch.ones(1, requires_grad=True))[0].sum().backward()
    rows = [(row["slot"], row["dtype"], row["mean"], row["note"]) for row in rec.table("values").to_pylist()]
    assert rows == [
        ("[0]", "float32", 1.0, None),
        ("[1]", "none", None, "no gradient: not used by what was differentiated"),
    ]


def test_an_edit_that_did_not_run_is_told() -> None:
    """Row 45, same kind: the loss uses another branch."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    model = Net()
    with th.hooks(model) as hooks:
        hooks.backward("*", lambda module, grad_input, grad_output: None)
        hooks.backward_pre("b", lambda module, grad_output: (grad_output[0] * 100,))
        model(torch.ones(1, 2))[0].sum().backward()
        assert why(hooks) == {"b": "no gradient: not used by what was differentiated"}


def test_a_gradient_penalty_reaches_the_input_alone() -> None:
    """Row 45, same kind: the loss is computed inside, and is the only output."""

    class WithLoss(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (x * 7).sum(), "logits": x * 2}

    model = nn.Sequential(WithLoss())
    x = torch.ones(1, requires_grad=True)
    seen: list[Any] = []
    with th.hooks(model) as hooks:
        hooks.backward(
            "0",
            lambda module, grad_input, grad_output: seen.append(
                (grad_input[0], grad_output['["loss"]'], grad_output['["logits"]'])
            ),
        )
        model(x)["loss"].backward()
    assert seen == [(7.0, 1.0, None)]
