"""A plain call goes straight to ``forward``, and what stands between a module and its ``forward`` is never left out for that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th


class _Counting(nn.Linear):
    """Has a way of its own to its forward."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls = 0

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super()._call_impl(*args, **kwargs)


class _Named(nn.Module):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x * scale


class _Calls(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, scale=3.0)


def _steps(net: nn.Module, x: Tensor, count: int = 4) -> list[Tensor]:
    with torch.no_grad():
        return [net(x) for _ in range(count)]


def test_a_class_that_runs_its_calls_itself_goes_on_to_do_so() -> None:
    net = nn.Sequential(_Counting(3, 3), nn.ReLU())
    with th.record(net, kinds=["output"]) as rec:
        _steps(net, torch.randn(2, 3))
    assert net[0].calls == 4
    assert rec.table("calls").num_rows == 12


def test_a_module_that_was_given_a_way_of_its_own_takes_it() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    run: list[int] = []
    usual = net[1]._call_impl
    with th.record(net, kinds=["output"]) as rec:
        _steps(net, torch.randn(2, 3))
        net[1]._call_impl = lambda *args: run.append(1) or usual(*args)
        _steps(net, torch.randn(2, 3))
    assert len(run) == 4
    assert rec.table("calls").num_rows == 24


def test_what_all_modules_are_run_by_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    usual: Any = nn.Module._call_impl
    run: list[nn.Module] = []

    def seen(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run.append(self)
        return usual(self, *args, **kwargs)

    with th.record(net, kinds=["output"]):
        _steps(net, torch.randn(2, 3))
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "_call_impl", seen)
            _steps(net, torch.randn(2, 3), 1)
    assert run == [net, net[0], net[1]]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_trace_takes_the_way_that_it_takes_without_a_recording() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).requires_grad_(False)
    x = torch.randn(2, 3)
    slow: list[str] = []
    usual = net[0]._slow_forward
    net[0]._slow_forward = lambda *args: slow.append("0") or usual(*args)

    def traced() -> str:
        return str(torch.jit.trace(lambda y: net(y).abs(), x).inlined_graph)

    bare, way = traced(), slow[:]
    slow.clear()
    with th.record(net, kinds=["output"]):
        _steps(net, x)
        assert traced() == bare
    assert slow == way != []


def test_arguments_by_name_arrive_and_are_recorded() -> None:
    net = _Calls(_Named())
    x = torch.randn(2, 3)
    with th.record(net, kinds=["input", "output"], tensors=True) as rec:
        outputs = _steps(net, x)
    assert all(torch.equal(one, x * 3) for one in outputs)
    assert torch.equal(rec["inner"].calls[1].input["x"], x)


def test_an_error_of_the_call_reads_as_without_a_recording() -> None:
    net = nn.Sequential(_Named(), nn.ReLU())
    errors = []
    for recorded in (False, True):
        with pytest.raises(TypeError) as caught:
            if not recorded:
                net[0](torch.ones(1), 2)
            else:
                with th.record(net, kinds=["output"]):
                    _steps(net, torch.ones(1))
                    net.append(_Calls(_Named()))
                    net[0](torch.ones(1), 2)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("forward", [1, 1500])
def test_many_blocks_of_rows_tell_the_same_as_one(forward: int) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with th.record(net, kinds=["output"]) as rec:
        for step in range(forward):
            _steps(net, torch.randn(1 + step % 70, 3), 1)
    calls, values = rec.table("calls").to_pylist(), rec.table("values").to_pylist()
    assert [row["path"] for row in calls] == ["0", "1", ""] * forward
    assert [row["type"] for row in calls] == ["Linear", "ReLU", "Sequential"] * forward
    assert [row["path"] for row in values] == ["0", "1", ""] * forward
    assert [row["shape"] for row in values] == [[1 + row["step"] % 70, 3] for row in values]
    assert {
        (row["kind"], row["dtype"], row["note"], row["error"])
        for row in (dict(c | v) for c, v in zip(calls, values, strict=True))
    } == {("output", "float32", None, None)}


def test_hooks_of_a_sampled_recording_come_and_go_with_those_of_others() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    seen: list[int] = []
    handle = None
    with th.record(net, kinds=["output"], every=3) as rec:
        for step in range(12):
            if step == 4:
                handle = net[1].register_forward_hook(lambda *arguments: seen.append(1))
            if step == 8 and handle is not None:
                handle.remove()
            _steps(net, torch.randn(2, 3), 1)
    assert sorted({row["step"] for row in rec.table("calls").to_pylist()}) == [0, 3, 6, 9]
    assert rec.table("calls").num_rows == 16
    assert len(seen) == 4
    assert not any(module._forward_hooks or "_compiled_call_impl" in module.__dict__ for module in net.modules())


def test_patterns_with_rates_of_their_own_switch_their_modules_only() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    with th.record(net, kinds=["output"], every={"**": 4, "0": 2, "1": 3}) as rec:
        _steps(net, torch.randn(2, 3), 13)
    found: dict[str, list[int]] = {}
    for row in rec.table("values").to_pylist():
        found.setdefault(row["path"], []).append(row["step"])
    assert found == {"0": [0, 2, 4, 6, 8, 10, 12], "1": [0, 3, 6, 9, 12], "2": [0, 4, 8, 12], "": [0, 4, 8, 12]}
