"""Section B: the hook is called, but what is recorded must be right (rows 02, 03, 09, 10, 30, 42, 55, 64)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# --- 02 ------------------------------------------------------------------------------------------------------------------
def test_output_is_as_the_layer_left_it_before_a_later_in_place_layer():
    """02, W: an in-place layer after the recorded one does not reach the record."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True))
    x = torch.randn(8, 4)
    with th.record(model, tensors=True, on_error="raise") as rec:
        model(x)
    assert torch.equal(rec["0"].output, model[0](x))
    assert rec["0"].output.min() < 0
    assert rec["1"].output.min() == 0


def test_output_is_a_copy_where_the_caller_changes_the_result():
    """02, W: the caller's own in-place operation on a nested output does not reach the record."""

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"a": x + 1, "b": [x * 2]}

    model = Pair()
    with th.record(model, tensors=True, on_error="raise") as rec:
        result = model(torch.ones(3))
        result["a"].zero_()
        result["b"][0].fill_(-5)
    assert rec[""].output["a"].tolist() == [2, 2, 2]
    assert rec[""].output["b"][0].tolist() == [2, 2, 2]


def test_buffer_used_again_and_inference_tensors_are_copied():
    """02, W: a module that writes into one buffer for every call, in inference mode, where tensors have no version."""

    class Reusing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("space", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.space.copy_(x)

    model = Reusing()
    with torch.inference_mode(), th.record(model, tensors=True, on_error="raise") as rec:
        for value in (1.0, 2.0):
            x = torch.full((2,), value)
            model(x)
            x.fill_(9.0)
    calls = [call for call in rec.order() if call.phase == "forward"]
    assert [call.output.tolist() for call in calls] == [[1, 1], [2, 2]]
    assert [call.input["x"].tolist() for call in calls] == [[1, 1], [2, 2]]


# --- 03 ------------------------------------------------------------------------------------------------------------------
def test_input_is_as_it_was_before_an_in_place_module():
    """03, W: inputs are taken before the module runs."""
    model = nn.Sequential(nn.ReLU(inplace=True))
    with th.record(model, tensors=True, on_error="raise") as rec:
        model(torch.tensor([1.0, -1.0]))
    assert rec["0"].input["input"].tolist() == [1, -1]
    assert rec["0"].output.tolist() == [1, 0]
    assert rec[""].input["input"].tolist() == [1, -1]


def test_keyword_input_changed_in_place_is_recorded_as_it_came():
    """03, W: the same for a keyword argument in a nested value."""

    class Filler(nn.Module):
        def forward(self, *, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            batch["x"].mul_(10)
            return batch["x"].sum()

    model = Filler()
    with th.record(model, tensors=True, on_error="raise") as rec:
        model(batch={"x": torch.tensor([1.0, 2.0])})
    (value,) = [one for one in rec[""].calls[0].values if one.kind == "input"]
    assert value.slot == 'batch["x"]'
    assert value.tensor.tolist() == [1, 2]
    assert rec[""].output.item() == 30


def test_input_of_in_place_module_is_as_it_came_when_its_gradient_is_recorded_too():
    """03, W: aliases of the inputs change nothing about it; the caller still sees the in-place change."""
    model = nn.Sequential(nn.Linear(2, 6), nn.Hardtanh(0.0, 1.0, inplace=True))
    x = torch.randn(4, 2, requires_grad=True)
    with th.record(model, tensors=True, kinds=["input", "output", "grad_input"], on_error="raise") as rec:
        model(x).sum().backward()
    assert torch.equal(rec["1"].input["input"], model[0](x))
    assert torch.equal(rec["1"].output, model[0](x).clamp(0, 1))
    assert torch.equal(rec["0"].output, model[0](x))


# --- 09 ------------------------------------------------------------------------------------------------------------------
def test_calls_of_one_module_are_told_apart_and_gradients_go_to_their_call():
    """09, W: a module called twice; the gradient is matched by call, not by arrival."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.act(x)
            return self.act(torch.cat([first, first[:, :2]], 1))

    model = Twice()
    with th.record(model, tensors=True, on_error="raise") as rec:
        model(torch.randn(1, 3, requires_grad=True)).sum().backward()
    calls = rec["act"].calls
    assert [call.output.shape for call in calls] == [(1, 3), (1, 5)]
    assert [call.grad_output.shape for call in calls] == [(1, 3), (1, 5)]
    assert [call.call for call in rec["act"].backward_calls] == [1, 0]


def test_rnn_cell_in_a_loop_has_a_gradient_for_each_step_of_time():
    """09, W: a cell called in a loop, with the steps told apart and every gradient at its own call."""
    cell = nn.LSTMCell(2, 3)
    x = torch.randn(4, 1, 2)

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = None
            kept = []
            for one in x:
                state = self.cell(one, state)
                kept.append(state[0])
            return torch.stack(kept)

    model = Loop()
    with th.record(model, "cell", tensors=True, on_error="raise") as rec:
        out = model(x)
        out.sum().backward()

    state, truth = None, []
    for one in x:
        state = cell(one, state)
        state[0].retain_grad()
        truth.append(state[0])
    torch.stack(truth).sum().backward()
    calls = rec["cell"].calls
    assert [call.call for call in calls] == [0, 1, 2, 3]
    for call, hidden in zip(calls, truth, strict=True):
        assert torch.equal(call.output[0], hidden.detach())
        assert torch.equal(call.grad_output[0], hidden.grad)


def test_calls_of_one_step_and_of_the_next_are_told_apart():
    """09, W: the same module through two steps; calls are numbered from 0 in each."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with th.record(model, tensors=True, on_error="raise") as rec:
        for size in (1, 5):
            model(torch.randn(size, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(call.step, call.call, call.grad_output.shape) for call in rec["0"].calls] == [
        (0, 0, (1, 2)),
        (1, 0, (5, 2)),
    ]


# --- 10 ------------------------------------------------------------------------------------------------------------------
class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(3, 3)
        self.dec = self.enc
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.dec(self.enc(self.emb(tokens))))


def test_module_of_two_names_is_recorded_once_a_call():
    """10, W: the second name is an alias, calls are not doubled, a tied parameter has one gradient."""
    model = _Tied()
    with th.record(model, kinds=["output", "grad_output", "param_grad"], tensors=True, on_error="raise") as rec:
        model(torch.tensor([1, 2])).sum().backward()
    rows = {row["path"]: row for row in rec.table("modules").to_pylist()}
    assert rows["enc"]["aliases"] == ["dec"]
    assert "dec" not in rows
    assert len(rec["enc"].calls) == 2
    gradients = [
        row for row in rec.table("values").to_pylist() if row["kind"] == "param_grad" and row["slot"] == "weight"
    ]
    assert sorted(row["path"] for row in gradients) == ["emb", "enc"]
    (row,) = [row for row in gradients if row["path"] == "emb"]
    assert torch.equal(rec.recording.tensor(row["tensor"]), model.emb.weight.grad)


def test_hooking_both_names_of_a_module_fires_once_a_call():
    """10, W: the two names of a shared module select it once; so for an alias alone, and for a tied parameter."""
    model = _Tied()
    seen: list[str] = []
    with th.hooks(model) as hooks:
        both = hooks.forward(["enc", "dec"], lambda module, args, output: None)
        alias = hooks.forward("dec", lambda module, args, output: None)
        tied = hooks.param_grad(["emb.weight", "head.weight"], lambda name, gradient: seen.append(name))
        model(torch.tensor([1, 2])).sum().backward()
    assert (both.fired, alias.fired, tied.fired) == (2, 2, 1)
    assert both.paths == alias.paths == ["enc"]
    assert seen == ["emb.weight"]


def test_block_shared_in_a_list_and_a_dict_is_one_module():
    """10, W: shared containers; parts of a shared block have aliases, too."""
    block = nn.Sequential(nn.Linear(2, 2))
    model = nn.Module()
    model.many = nn.ModuleList([block, block])
    model.named = nn.ModuleDict({"again": block})
    model.forward = lambda x: model.named["again"](model.many[1](model.many[0](x)))
    with th.record(model, "many.0.0", on_error="raise") as rec:
        model(torch.randn(1, 2))
    (row,) = [row for row in rec.table("modules").to_pylist() if row["path"] == "many.0.0"]
    assert row["aliases"] == ["many.1.0", "named.again.0"]
    assert row["calls"] == 3


# --- 30, 42 --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("input_needs_gradient", [True, False])
@pytest.mark.parametrize(
    "layer", [nn.Linear(3, 2), nn.Conv1d(3, 2, 1), nn.Bilinear(3, 3, 2)], ids=lambda one: type(one).__name__
)
def test_parameter_gradient_is_that_of_the_parameter(layer: nn.Module, input_needs_gradient: bool):
    """30, W: the record of a parameter's gradient equals ``.grad`` whether or not the input needs one."""
    layer.zero_grad()
    x = torch.randn(4, 3, 1) if isinstance(layer, nn.Conv1d) else torch.randn(4, 3)
    x.requires_grad_(input_needs_gradient)
    with th.record(layer, kinds=["param_grad"], tensors=True, on_error="raise") as rec:
        layer(*((x, x) if isinstance(layer, nn.Bilinear) else (x,))).pow(2).sum().backward()
    rows = {row["slot"]: row for row in rec.table("values").to_pylist()}
    assert set(rows) == {"weight", "bias"}
    for name, parameter in layer.named_parameters():
        assert torch.equal(rec.recording.tensor(rows[name]["tensor"]), parameter.grad)


def test_gradient_of_this_pass_and_running_sum():
    """42, W: ``param_grad`` is this backward's gradient, ``accumulated=True`` the running sum."""
    model = nn.Linear(1, 1, bias=False)
    own: list[float] = []
    total: list[float] = []
    with th.hooks(model) as hooks:
        hooks.param_grad("weight", lambda name, gradient: own.append(gradient.item()))
        hooks.param_grad("weight", lambda name, gradient: total.append(gradient.item()), accumulated=True)
        for _ in range(2):
            model(torch.full((1, 1), 3.0)).sum().backward()
    assert own == [3, 3]
    assert total == [3, 6]


def test_recorded_parameter_gradient_is_of_this_pass():
    """42, W: a recording over two micro-batches holds the gradient of each, not the sum."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    with th.record(model, kinds=["param_grad"], on_error="raise") as rec:
        for factor in (3.0, 5.0):
            model(torch.full((1, 1), factor)).sum().backward()
    assert [row["mean"] for row in rec.table("values").to_pylist()] == [3, 5]
    assert model[0].weight.grad.item() == 8


def test_replaced_parameter_gradient_is_what_is_accumulated():
    """42, W: a value returned by ``param_grad`` replaces this pass's share only; the sum is seen after it."""
    model = nn.Linear(1, 2)
    total: list[list[float]] = []
    with th.hooks(model) as hooks:
        hooks.param_grad("bias", lambda name, gradient: gradient.clamp(max=0.25))
        hooks.param_grad("bias", lambda name, gradient: total.append(gradient.tolist()), accumulated=True)
        for _ in range(2):
            model(torch.ones(1, 1)).sum().backward()
    assert total == [[0.25, 0.25], [0.5, 0.5]]


# --- 55 ------------------------------------------------------------------------------------------------------------------
class _Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


def _counts(rec: Any, kind: str = "output") -> dict[str, tuple[int, int, int]]:
    rows = rec.table("values").to_pylist()
    return {
        row["path"]: (row["nan_count"], row["posinf_count"], row["neginf_count"]) for row in rows if row["kind"] == kind
    }


def test_counts_tell_the_producer_of_nan_from_those_that_hand_it_on():
    """55, W (recording's part): inputs and outputs of each module have their own counts."""
    model = nn.Sequential(_Root(), nn.Linear(2, 2), nn.ReLU())
    with th.record(model, kinds=["input", "output"], on_error="raise") as rec:
        model(torch.tensor([[-1.0, 4.0]]))
    assert _counts(rec, "input")["0"] == (0, 0, 0)
    assert _counts(rec)["0"] == (1, 0, 0)
    assert _counts(rec, "input")["1"] == (1, 0, 0)
    assert _counts(rec)["2"] == (2, 0, 0)


def test_counts_of_a_mask_and_of_a_repair():
    """55, W (recording's part): -inf of a mask is counted as such; a repaired NaN stays with its producer."""

    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(torch.tensor([False, True]), float("-inf"))

    class Repair(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nan_to_num(x)

    model = nn.Sequential(Masked(), nn.Softmax(-1), _Root())
    with th.record(model, on_error="raise") as rec:
        model(torch.tensor([[1.0, 2.0]]))
    assert list(_counts(rec).values()) == [(0, 0, 1), (0, 0, 0), (0, 0, 0), (0, 0, 0)]
    repaired = nn.Sequential(_Root(), Repair())
    with th.record(repaired, on_error="raise") as rec:
        repaired(torch.tensor([-1.0, 4.0]))
    assert _counts(rec) == {"0": (1, 0, 0), "1": (0, 0, 0), "": (0, 0, 0)}


def test_nan_of_the_backward_pass_alone_is_in_the_gradients():
    """55, W (recording's part): forward finite, backward NaN (``where`` over ``sqrt``)."""

    class Guarded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > 0, x.sqrt(), torch.zeros_like(x))

    model = nn.Sequential(nn.Identity(), Guarded())
    x = torch.zeros(1, requires_grad=True)
    with th.record(model, kinds=["output", "grad_output", "grad_input"], on_error="raise") as rec:
        model(x * 1).sum().backward()
    assert _counts(rec) == {"0": (0, 0, 0), "1": (0, 0, 0), "": (0, 0, 0)}
    assert _counts(rec, "grad_output")["1"] == (0, 0, 0)
    assert _counts(rec, "grad_input")["1"] == (1, 0, 0)
    assert _counts(rec, "grad_output")["0"] == (1, 0, 0)


# --- 64 ------------------------------------------------------------------------------------------------------------------
def test_dtypes_under_autocast_are_those_that_flowed():
    """64, W (recording's part): values of the dtype that the layer gave, gradients of the dtype that came."""
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    x = torch.randn(2, 4)
    with th.record(
        model, kinds=["input", "output", "grad_output", "param_grad"], tensors=True, on_error="raise"
    ) as rec:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        truth = model[0](x)
    assert rec["0"].input["input"].dtype == torch.float32
    assert rec["0"].output.dtype == truth.dtype == torch.bfloat16
    assert torch.equal(rec["0"].output, truth)
    assert rec["0"].grad_output.dtype == torch.bfloat16
    gradients = [row for row in rec.table("values").to_pylist() if row["kind"] == "param_grad"]
    assert {row["dtype"] for row in gradients} == {"float32"}
    for row in gradients:
        parameter = dict(model[int(row["path"])].named_parameters())[row["slot"]]
        assert torch.equal(rec.recording.tensor(row["tensor"]), parameter.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_change_of_dtype_keeps_the_statistics_exact(dtype: torch.dtype):
    """64, W (recording's part): a model in another dtype; statistics are those of the value in full precision."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(dtype)
    x = torch.randn(16, 4, dtype=dtype)
    with th.record(model, on_error="raise") as rec:
        model(x)
    truth = model(x).double()
    (row,) = [row for row in rec.table("values").to_pylist() if row["path"] == "1"]
    assert row["dtype"] == str(dtype).removeprefix("torch.")
    assert (row["min"], row["max"]) == (truth.min().item(), truth.max().item())
    assert row["mean"] == pytest.approx(truth.mean().item(), rel=1e-6, abs=1e-9)
