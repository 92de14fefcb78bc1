"""Section C: gradients of outputs (rows 08, 29, 40, 44, 59, 62, 63)."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import tenterhook as th


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _record(model: nn.Module, select: Any = None, **options: Any) -> Any:
    return th.record(model, select, **({"tensors": True, "on_error": "raise"} | options))


def _backward_order(rec: Any) -> list[str]:
    return [call.path for call in rec.order() if call.phase == "backward"]


# --- 08 ------------------------------------------------------------------------------------------------------------------
class Named(NamedTuple):
    a: torch.Tensor
    n: int


@dataclasses.dataclass
class Data:
    a: torch.Tensor
    rest: Any = None


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "tensor": (lambda y: y, ""),
    "tuple": (lambda y: (y, 1), "[0]"),
    "namedtuple": (lambda y: Named(y, 1), ".a"),
    "dict": (lambda y: {"a": y}, '["a"]'),
    "list": (lambda y: [None, y], "[1]"),
    "OrderedDict": (lambda y: collections.OrderedDict(a=y), '["a"]'),
    "dataclass": (Data, ".a"),
    "nested tuple": (lambda y: ((y,), 1), "[0][0]"),
    "dict of lists": (lambda y: {"h": [Data(y, "text")]}, '["h"][0].a'),
    "defaultdict": (lambda y: collections.defaultdict(list, a=y), '["a"]'),
}


class Returning(nn.Module):
    def __init__(self, wrap: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.lin(x))


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("needs", [True, False], ids=["input needs gradient", "plain input"])
def test_every_kind_of_output_gives_its_gradient(kind: str, needs: bool):
    """08, W: the gradient comes for every container, recorded and in callbacks; the output's type is unchanged."""
    wrap, slot = OUTPUTS[kind]
    model = Returning(wrap)
    x = torch.randn(1, 2, requires_grad=needs)
    got: list[Any] = []
    with _record(model) as rec, th.hooks(model) as hooks:
        hooks.backward("", lambda module, grad_input, grad_output: got.append((grad_input, grad_output)))
        out = model(x)
        (model_out,) = [part for _, part in th.values.leaves(out, torch.Tensor)]
        (model_out * torch.tensor([2.0, 3.0])).sum().backward()
    assert type(out) is type(wrap(x))
    gradient = rec[""].grad_output if slot == "" else rec[""].grad_output[slot]
    assert gradient.tolist() == [[2, 3]]
    ((grad_input, grad_output),) = got
    assert grad_output[slot].tolist() == [[2, 3]]
    assert (grad_input["x"] is None) is not needs
    if needs:
        assert torch.equal(grad_input["x"], x.grad)


def test_lstm_whose_loss_is_on_the_last_state_alone():
    """08, W: the nested tuple of an LSTM; what the loss does not use has None, never 0."""
    model = nn.Sequential(nn.LSTM(2, 3))
    with _record(model, "0") as rec, th.hooks(model) as hooks:
        got: list[Any] = []
        hooks.backward_pre("0", lambda module, grad_output: got.append(grad_output))
        _, (h_n, _) = model(torch.randn(4, 2))
        h_n.sum().backward()
    gradient = rec["0"].grad_output
    assert gradient["[1][0]"].tolist() == [[1, 1, 1]]
    assert gradient["[0]"] is None
    assert gradient["[1][1]"] is None
    ((of_all, of_hidden, of_cell),) = got  # once, as soon as it is known that no more will come
    assert (of_all, of_cell) == (None, None)
    assert of_hidden.tolist() == [[1, 1, 1]]
    assert rec.coverage.complete


# --- 29 ------------------------------------------------------------------------------------------------------------------
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.b = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) + self.a[0](x)


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Deep, lambda: nn.LSTMCell(2, 2)]
)
def test_order_is_the_same_whether_or_not_the_input_needs_a_gradient(make: Callable[[], nn.Module]):
    """29, W: recorded order and order of callbacks; no warning of torch's gets through."""
    model = make()
    orders = []
    for needs in (True, False):
        with warnings.catch_warnings(), _record(model) as rec:
            warnings.simplefilter("error")
            out = model(torch.randn(1, 2, requires_grad=needs))
            (out[0] + out[1] if isinstance(out, tuple) else out).sum().backward()
        orders.append(_backward_order(rec))
    events = [_fired(model, needs) for needs in (True, False)]
    assert orders[0] == orders[1]
    assert events[0] == events[1]
    assert orders[0][0] == ""
    assert events[0][-1] == "post:root"


def _fired(model: nn.Module, input_needs_gradient: bool) -> list[str]:
    fired: list[str] = []
    with warnings.catch_warnings(), th.hooks(model) as hooks:
        warnings.simplefilter("error")
        hooks.backward_pre("**", lambda name, m, go: fired.append(f"pre:{name or 'root'}"), with_name=True)
        hooks.backward("**", lambda name, m, gi, go: fired.append(f"post:{name or 'root'}"), with_name=True)
        out = model(torch.randn(1, 2, requires_grad=input_needs_gradient))
        (out[0] + out[1] if isinstance(out, tuple) else out).sum().backward()
    return fired


def test_order_nests_as_torchs_own_does_with_an_input_that_needs_a_gradient():
    """29, W: pre and post of the container are around those of its parts, in both cases."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for needs in (True, False):
        assert " ".join(_fired(model, needs)) == "pre:root pre:1 post:1 pre:0 post:0 post:root"


# --- 40 ------------------------------------------------------------------------------------------------------------------
def test_gradient_is_that_of_the_output_as_the_layer_gave_it():
    """40, W: after ``y *= 3`` and a loss of ``2 y`` the gradient at the layer's output is 6, not 2."""
    model = nn.Sequential(nn.Linear(2, 2))
    with _record(model, "0") as rec, th.hooks(model) as hooks:
        got: list[Any] = []
        hooks.backward("0", lambda module, grad_input, grad_output: got.append(grad_output[0].tolist()))
        y = model[0](torch.randn(2, requires_grad=True))
        y.mul_(3)
        (2 * y).sum().backward()
    assert rec["0"].grad_output.tolist() == [6, 6]
    assert got == [[6, 6]]


def test_two_in_place_changes_and_a_view():
    """40, W: the same through a chain of in-place changes, one of them on a slice."""
    model = nn.Sequential(nn.Conv1d(1, 2, 1), nn.Identity())
    with _record(model, "*") as rec:
        y = model(torch.randn(1, 1, 3))
        y[:, 0].mul_(3)
        y.add_(1)
        y.sum().backward()
    assert rec["1"].grad_output.tolist() == [[[3, 3, 3], [1, 1, 1]]]
    assert rec["0"].grad_output.tolist() == [[[3, 3, 3], [1, 1, 1]]]


class Boxed(nn.Linear):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
        return {"box": [super().forward(x)]}


@pytest.mark.parametrize("grad", [False, True], ids=["backward", "autograd.grad"])
def test_an_in_place_change_of_what_is_in_a_container(grad: bool):
    """40, W: a nested output that the caller changes in place, by ``backward`` and by ``torch.autograd.grad``."""
    model = nn.Sequential(Boxed(2, 2))
    with _record(model, "0") as rec:
        x = torch.randn(2, requires_grad=True)
        (y,) = model(x)["box"]
        loss = (y.add_(1).mul_(5) * 2).sum()
        torch.autograd.grad(loss, x) if grad else loss.backward()
    assert rec["0"].grad_output["box"][0].tolist() == [10, 10]


# --- 44 ------------------------------------------------------------------------------------------------------------------
def test_each_backward_pass_through_a_call_has_its_number():
    """44, W: ``retain_graph``: two records of one call, the second is pass 1."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with _record(model, "1") as rec:
        out = model(torch.randn(1, 2))
        out.sum().backward(retain_graph=True)
        (out * 2).sum().backward()
    calls = rec["1"].backward_calls
    assert [(call.call, call.pass_) for call in calls] == [(0, 0), (0, 1)]
    assert [call.grad_output.tolist() for call in calls] == [[[1, 1]], [[2, 2]]]
    with pytest.raises(th.TenterhookError, match="2 values of kind grad_output"):
        _ = rec["1"].grad_output


def test_second_order_gradients_come_in_a_pass_of_their_own():
    """44, W: ``create_graph``: the second pass reaches the layer through the first; the model's gradients are unchanged."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.randn(1, 2, requires_grad=True)

    def penalty() -> torch.Tensor:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().sum()

    penalty().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with _record(model, kinds=["grad_output", "grad_input"]) as rec:
        penalty().backward()
    assert all(torch.equal(one, p.grad) for one, p in zip(expected, model.parameters(), strict=True))
    assert [(call.path, call.pass_) for call in rec.order() if call.phase == "backward"][:3] == [
        ("", 0),
        ("1", 0),
        ("0", 0),
    ]
    assert 1 in [call.pass_ for call in rec["1"].backward_calls]
    assert not any(
        value.tensor.requires_grad for call in rec["0"].backward_calls for value in call.values if value.stored
    )


def test_autograd_grad_and_backward_are_passes_alike():
    """44, W: ``torch.autograd.grad`` of an inner value is pass 0, the backward after it pass 1."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with _record(model, "0") as rec:
        out = model(torch.randn(3, 2)).sum()
        torch.autograd.grad(out, model[0].weight, retain_graph=True)
        out.backward()
    assert [call.pass_ for call in rec["0"].backward_calls] == [0, 1]


# --- 59 ------------------------------------------------------------------------------------------------------------------
class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "make", [nn.Identity, lambda: nn.Dropout(0.5).eval(), lambda: nn.Sequential(nn.Identity(), nn.Flatten(0, 0))]
)
def test_identity_views_attributes_and_subclass_stay(make: Callable[[], nn.Module]):
    """59, W: what a module returns is the very object; no view, attributes and subclass kept."""
    model = make()
    x = torch.Tensor._make_subclass(Tagged, torch.randn(3), True)
    x.note = "kept"
    same = model(x) is x
    with _record(model) as rec, th.hooks(model) as hooks:
        hooks.forward("**", lambda module, args, output: None)
        hooks.backward_pre("**", lambda module, grad_output: None)
        out = model(x)
    assert (out is x) is same
    assert same
    assert type(out) is Tagged
    assert out.note == "kept"
    assert not out._is_view()
    assert rec.coverage.fired


def test_gradient_of_input_keeps_attributes_and_subclass():
    """59, W: where aliases of the inputs are given to the module (``grad_input``), they carry what the tensors carried."""
    model = nn.Sequential(nn.Identity())
    x = torch.Tensor._make_subclass(Tagged, torch.randn(3), True)
    x.note = "kept"
    with _record(model, kinds=["grad_input"]):
        out = model(x)
    assert type(out) is Tagged
    assert out.note == "kept"


# --- 62 ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("on", ["0", "1", ""])
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.filterwarnings("ignore:Using non-full backward hooks")
def test_legacy_backward_hooks_of_others_are_left_as_they_are(on: str):
    """62, P: we never use them; a model that carries one is recorded and hooked all the same."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    x = torch.randn(1, 4, requires_grad=True)
    got: list[list[Any]] = []

    def legacy(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        got.append([None if one is None else one.shape for one in grad_input])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = model.get_submodule(on).register_backward_hook(legacy)
    model(x).sum().backward()
    bare = got.pop()
    truth, x.grad = x.grad, None
    shapes: list[Any] = []
    with _record(model, kinds=["grad_output", "grad_input"]) as rec, th.hooks(model) as hooks:
        hooks.backward("0", lambda module, grad_input, grad_output: shapes.append(grad_input[0].shape))
        model(x).sum().backward()
    handle.remove()
    assert got == [bare]
    assert shapes == [(1, 4)]
    assert torch.equal(rec[""].grad_input["input"], truth)
    assert rec.coverage.complete


# --- 63 ------------------------------------------------------------------------------------------------------------------
class Three(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x * 1, x * 2, x * 3


LOSSES = {
    "two": (lambda a, b, c: 2 * a + 3 * b, [2, 3, None]),
    "one": (lambda a, b, c: 2 * a, [2, None, None]),
    "zero is not none": (lambda a, b, c: 0 * b + c, [None, 0, 1]),
    "all": (lambda a, b, c: a + b + c, [1, 1, 1]),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_several_outputs_have_none_for_those_unused(loss: str):
    """63, W: the gradients of a call come together, with None, not 0, for what was not used."""
    fn, expected = LOSSES[loss]
    model = nn.Sequential(Three())
    got: list[Any] = []
    with _record(model, "0") as rec, th.hooks(model) as hooks:
        hooks.backward("0", lambda module, grad_input, grad_output: got.append(grad_output))
        fn(*model(torch.ones((), requires_grad=True))).backward()
    (gradients,) = got
    assert [None if one is None else one.item() for one in gradients] == expected
    recorded = rec["0"].grad_output
    assert [None if recorded[index] is None else recorded[index].item() for index in range(3)] == expected
    rows = [row for row in rec.table("values").to_pylist() if row["kind"] == "grad_output"]
    assert {row["slot"]: row["dtype"] for row in rows} == {
        f"[{index}]": "none" if one is None else "float32" for index, one in enumerate(expected)
    }
    assert all(
        row["note"] == "no gradient: not used by what was differentiated" for row in rows if row["dtype"] == "none"
    )


def test_passes_over_one_graph_have_their_own_nones():
    """63, W: three passes over one retained graph, each with its own list, in every pass one call of the callback."""
    model = nn.Sequential(Three())
    got: list[Any] = []
    with _record(model, "0") as rec, th.hooks(model) as hooks:
        hooks.backward("0", lambda module, grad_input, grad_output: got.append(grad_output))
        out = model(torch.ones((), requires_grad=True))
        for name in ("two", "one", "zero is not none"):
            LOSSES[name][0](*out).backward(retain_graph=True)
    expected = [LOSSES[name][1] for name in ("two", "one", "zero is not none")]
    assert [[None if one is None else one.item() for one in gradients] for gradients in got] == expected
    for call, truth in zip(rec["0"].backward_calls, expected, strict=True):
        recorded = call.grad_output
        assert [None if recorded[index] is None else recorded[index].item() for index in range(3)] == truth
