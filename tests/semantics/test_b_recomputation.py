"""Section B, row 11: checkpointing runs the forward again in the backward pass; records tell the two apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import tenterhook as th

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
EARLY_STOP = pytest.mark.parametrize("early_stop", [True, False], ids=["early-stop", "to-the-end"])


class Segments(nn.Module):
    """Two checkpointed segments that share their modules; each calls ``lin`` and ``act`` twice."""

    def __init__(self, reentrant: bool | None):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.act = nn.Tanh()
        self.reentrant = reentrant

    def segment(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.lin(self.act(self.lin(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.segment(self.segment(x) * 2)
        return checkpoint(
            self.segment, checkpoint(self.segment, x, use_reentrant=self.reentrant) * 2, use_reentrant=self.reentrant
        )


def _record(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    with th.record(
        model, kinds=["output", "grad_output", "grad_input"], tensors=True, on_error="raise", **options
    ) as rec:
        model(x).square().sum().backward()
    return rec


def _gradients(rec: Any) -> dict[tuple[str, int, str], list[float]]:
    return {
        (row["path"], row["call"], row["kind"]): rec.recording.tensor(row["tensor"]).flatten().tolist()
        for row in rec.table("values").to_pylist()
        if row["phase"] == "backward"
    }


def _x() -> torch.Tensor:
    return torch.tensor([[0.3, -0.7]], requires_grad=True)


@REENTRANT
def test_one_record_by_default_and_two_on_request(reentrant: bool):
    """11, W: one record of phase forward; with ``recompute=True`` phases forward and recompute."""
    for recompute, phases in ((False, ["forward"]), (True, ["forward", "recompute"])):
        model = nn.Sequential(nn.Linear(2, 2))
        with th.record(model, "0", recompute=recompute, on_error="raise") as rec:
            checkpoint(model, _x(), use_reentrant=reentrant).sum().backward()
        calls = [call for call in rec.order() if call.phase != "backward"]
        assert [call.phase for call in calls] == phases
        assert [call.call for call in calls] == [0] * len(phases)
        assert all(call.error is None for call in calls)
        assert rec.coverage.complete
        assert len(rec["0"].backward_calls) == 1


@REENTRANT
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_go_to_the_forward_call_that_they_belong_to(reentrant: bool, recompute: bool):
    """11, W: modules called twice in each of two segments; gradients equal those without checkpointing, call for call."""
    torch.manual_seed(0)
    model = Segments(reentrant)
    rec = _record(model, _x(), recompute=recompute)
    model.reentrant = None
    truth = _record(model, _x())
    assert _gradients(rec) == _gradients(truth)
    assert len(_gradients(rec)) == 18
    backward = [(call.path, call.call, call.depth) for call in rec.order() if call.phase == "backward"]
    assert backward == [(call.path, call.call, call.depth) for call in truth.order() if call.phase == "backward"]
    by_seq = {call.seq: call for call in rec.order()}
    for call in rec.order():
        if call.phase == "backward":
            forward = by_seq[call.forward]
            assert (forward.phase, forward.path, forward.call) == ("forward", call.path, call.call)
            parent = None if call.parent is None else by_seq[call.parent]
            assert (parent is None) == (call.path == "")
            assert parent is None or (parent.path, parent.phase) == ("", "backward")


@REENTRANT
def test_recomputed_calls_repeat_the_calls_of_their_segment_in_order(reentrant: bool):
    """11, W: segments come back last first, the calls within a segment in the order of the forward."""
    rec = _record(Segments(reentrant), _x(), recompute=True)
    calls = {call.seq: call for call in rec.order()}
    again = [(call.path, call.call) for call in calls.values() if call.phase == "recompute"]
    segment = [("lin", 0), ("act", 0), ("lin", 1), ("act", 1)]
    assert again == [(path, call + 2) for path, call in segment] + segment
    for call in calls.values():
        if call.phase == "recompute":
            first = calls[call.forward]
            assert (first.path, first.call, first.phase) == (call.path, call.call, "forward")
            values = [value for value in call.values if value.kind == "output"]
            assert all(torch.equal(value.tensor, first.output) for value in values)


@EARLY_STOP
def test_early_stop_is_nobodys_error(early_stop: bool):
    """11, W: a recomputation that torch breaks off has no error in its rows; calls after it nest as they should."""

    class Tail(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1  # what comes after tanh saves nothing: with early stop it is not run again

    model = nn.Sequential(nn.Linear(2, 2), Tail())
    seen: list[tuple[str, Any]] = []
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        with th.hooks(model) as hooks, th.record(model, recompute=True, on_error="raise") as rec:
            hooks.forward(
                "**", lambda name, m, args, output: seen.append((name, output)), with_name=True, always_call=True
            )
            checkpoint(model, _x(), use_reentrant=False).sum().backward()
            first = len(seen)
            model(_x())
    again = [call for call in rec.order() if call.phase == "recompute"]
    assert [call.path for call in again] == ["", "0", "1", "1.inner"]
    assert [call.error for call in again] == [None] * 4
    assert [call.depth for call in again] == [0, 1, 1, 2]
    plain = [call for call in rec.order() if call.phase == "forward" and call.step == 1]
    assert [(call.path, call.depth) for call in plain] == [("", 0), ("0", 1), ("1", 1), ("1.inner", 2)]
    assert all(output is not None for _, output in seen)
    assert first == (5 if early_stop else 8)


@REENTRANT
def test_a_real_error_in_the_recomputation_is_recorded_as_one(reentrant: bool):
    """11, W: an exception that the user's module raises only when it is run again keeps its type and is in the record."""

    class Moody(nn.Module):
        runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            if self.runs == 2:
                raise KeyError("second")
            return x.exp()

    model = nn.Sequential(Moody())
    with pytest.raises(KeyError, match="second"), th.record(model, recompute=True, on_error="raise") as rec:
        checkpoint(model, _x(), use_reentrant=reentrant).sum().backward()
    errors = {call.path: call.error for call in rec.order() if call.phase == "recompute"}
    assert errors == {"": "KeyError: 'second'", "0": "KeyError: 'second'"}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # torch, of reentry in reentry
@REENTRANT
@pytest.mark.parametrize("inner", [False, True], ids=["in non-reentrant", "in reentrant"])
def test_nested_regions(reentrant: bool, inner: bool):
    """11, W: a region in a region is run again more than once; gradients still go to the one forward call."""
    torch.manual_seed(0)

    class Outer(nn.Module):
        def __init__(self, outer: bool | None):
            super().__init__()
            self.pre = nn.Linear(2, 2)
            self.segments = Segments(inner)
            self.outer = outer

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.segments(self.pre(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) if self.outer is None else checkpoint(self.body, x, use_reentrant=self.outer)

    model = Outer(reentrant)
    rec = _record(model, _x(), recompute=True)
    model.outer = model.segments.reentrant = None
    truth = _record(model, _x())
    assert _gradients(rec) == _gradients(truth)
    calls = {call.seq: call for call in rec.order()}
    again = [call for call in calls.values() if call.phase == "recompute"]
    assert {(call.path, call.call) for call in again} >= {("segments.lin", number) for number in range(4)}
    assert all((calls[call.forward].path, calls[call.forward].call) == (call.path, call.call) for call in again)
    assert rec.coverage.complete


@REENTRANT
def test_checkpoint_sequential_and_retained_graph(reentrant: bool):
    """11, W: ``checkpoint_sequential``; a second backward recomputes again and is pass 1 of the same calls."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh())
    with th.record(model, "*", tensors=True, recompute=True, on_error="raise") as rec:
        out = checkpoint_sequential(model, 2, _x(), use_reentrant=reentrant).sum()
        out.backward(retain_graph=True)
        out.backward()
    backward = [call for call in rec.order() if call.phase == "backward"]
    assert [(call.path, call.call, call.pass_) for call in backward] == [
        (path, 0, number) for number in (0, 1) for path in ("3", "2", "1", "0")
    ]
    again = [call.path for call in rec.order() if call.phase == "recompute"]
    assert again.count("0") == 2
    assert again.count("2") == 0  # the last segment is not checkpointed
    first, second = (
        [value.tensor for call in backward if call.pass_ == number for value in call.values] for number in (0, 1)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@REENTRANT
def test_session_opened_between_forward_and_backward(reentrant: bool):
    """11, W: a recomputation whose first run was not seen is no forward call of the session's."""
    model = Segments(reentrant)
    out = model(_x())
    with th.record(model, on_error="raise") as rec:
        out.sum().backward()
        assert [call for call in rec.order() if call.phase == "forward"] == []
    reason = "never called, though its weights got a gradient: used directly, by .forward, or before the session"
    assert dict(rec.coverage.missing)["lin"] == reason


def test_call_that_a_hook_makes_in_the_backward_pass_is_a_forward_call():
    """11, W: a module that a gradient hook calls is called, not recomputed."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x)

    model = Model()
    with th.record(model, on_error="raise") as rec:
        out = model(_x())
        out.register_hook(model.b)
        out.sum().backward()
    assert [(call.path, call.phase) for call in rec.order() if call.path == "b"] == [("b", "forward")]


@REENTRANT
def test_hooks_count_repeats_apart(reentrant: bool):
    """11, W: ``fired`` of a handle counts calls, not repeats; a backward hook fires once a call."""
    model = Segments(reentrant)
    shapes: list[torch.Size] = []
    with th.hooks(model) as hooks:
        forward = hooks.forward("lin", lambda module, args, output: None)
        backward = hooks.backward("lin", lambda module, grad_input, grad_output: shapes.append(grad_input[0].shape))
        model(_x()).sum().backward()
    assert forward.fired == 4
    assert [site.recomputed for site in forward.sites] == [4]
    assert backward.fired == 4
    assert shapes == [(1, 2)] * 4


@REENTRANT
@pytest.mark.parametrize("tied", [False, True])
def test_parameter_of_several_regions_has_one_gradient_a_pass(reentrant: bool, tied: bool):
    """11 and 10, W: a parameter that two regions share, or a region and the outside, has one gradient, equal to ``.grad``."""
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.segments = Segments(reentrant)
            self.head = nn.Linear(2, 2)
            if tied:
                self.head.weight = self.segments.lin.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.segments(self.head(x)))

    model = Tied()
    with th.record(model, kinds=["param_grad"], tensors=True, on_error="raise") as rec:
        for step in range(2):
            model(_x()).square().sum().backward()
            rows = [row for row in rec.table("values").to_pylist() if row["step"] == step]
            rec.step()
            assert sorted((row["path"], row["slot"]) for row in rows) == sorted(
                (name.rpartition(".")[0], name.rpartition(".")[2]) for name, _ in model.named_parameters()
            )
            for row in rows:
                gradient = model.get_parameter(f"{row['path']}.{row['slot']}").grad
                assert torch.allclose(rec.recording.tensor(row["tensor"]), gradient, atol=1e-6)
            model.zero_grad()
