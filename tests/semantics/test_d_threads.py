"""SEMANTICS.md D: threads (52), and backward in another thread than forward (73)."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenterhook as th
from tests.semantics.nets import Nested, mlp


@pytest.fixture(autouse=True)
def eager_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def _in_threads(work: Callable[[int], None], count: int = 2, *, at_once: bool = True) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(count if at_once else 1)

    def run(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
        if not at_once:
            thread.join()
    for thread in threads:
        thread.join()
    assert errors == []


def _call(net: nn.Module, times: int) -> None:
    for _ in range(times):
        net(torch.ones(2, 4))


def _numbers(rec: Any, path: str) -> list[list[int]]:
    """Call numbers of a module, thread by thread."""
    found: dict[int, list[int]] = defaultdict(list)
    for call in rec.order():
        if call.path == path and call.phase == "forward":
            found[call.thread].append(call.call)
    return list(found.values())


# ---- 52: threads that call at the same time ----


@pytest.mark.parametrize("at_once", [True, False], ids=["together", "one after the other"])
def test_each_thread_counts_its_own_calls(at_once: bool) -> None:
    net = mlp()
    with th.record(net) as rec:
        rec.step()  # all in one step
        _in_threads(lambda index: _call(net, 20), at_once=at_once)
    for path in ("", "0", "1", "2"):
        numbers = _numbers(rec, path)
        assert sum(map(len, numbers)) == 40
        assert numbers == [list(range(20))] * 2


def test_calls_of_threads_nest_within_their_own_thread() -> None:
    net = nn.Sequential(mlp(), nn.Linear(2, 2))
    with th.record(net) as rec:
        _in_threads(lambda index: _call(net, 5), count=4)
    by_seq = {call.seq: call for call in rec.order()}
    for call in rec.order():
        if call.parent is not None:
            assert by_seq[call.parent].thread == call.thread
            assert by_seq[call.parent].path == call.path.rpartition(".")[0]


def test_hooks_count_every_call_of_every_thread() -> None:
    net = Nested()
    with th.hooks(net) as hooks:
        handles = [
            getattr(hooks, kind)("body", lambda *arguments: None)
            for kind in ("forward_pre", "forward", "backward_pre", "backward")
        ]

        def work(index: int) -> None:
            for _ in range(20):
                scale = torch.ones(4, requires_grad=True)
                net(torch.ones(2, 4, requires_grad=True), scale=scale).logits.sum().backward()

        _in_threads(work, count=2)
        assert [handle.fired for handle in handles] == [40] * 4


def _replica(module: nn.Module) -> nn.Module:
    """Make what DataParallel makes of a module for each device."""
    copy = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        copy._modules[name] = None if child is None else _replica(child)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            setattr(copy, name, parameter.view_as(parameter))
    return copy


def test_replicas_of_data_parallel_are_the_module_they_were_made_from() -> None:
    net = mlp()
    seen: list[nn.Module] = []
    with th.record(net, tensors=True) as rec, th.hooks(net) as hooks:
        hooks.backward("0", lambda module, grad_input, grad_output: seen.append(module))
        replicas = [_replica(net), _replica(net)]
        outs: list[Tensor] = [torch.empty(0)] * 2

        def work(index: int) -> None:
            outs[index] = replicas[index](torch.full((1, 4), float(index)))

        _in_threads(work)
        torch.cat(outs).sum().backward()
    assert _numbers(rec, "0") == [[0], [0]]
    assert len([call for call in rec.order() if call.path == "2" and call.phase == "backward"]) == 2
    assert sorted(map(id, seen)) == sorted(id(one[0]) for one in replicas)


def test_new_threads_for_each_forward_leave_nothing_in_the_tracker() -> None:
    net = mlp()
    with th.record(net) as rec:
        for _ in range(30):
            _in_threads(lambda index: net(torch.ones(1, 4)).sum().backward())
        tracker = rec._capture.tracker
        assert tracker._stacks == {}
        assert tracker.stale == []
    assert sum(map(len, _numbers(rec, "0"))) == 60


# ---- 73: backward in another thread ----


def _events(rec: Any) -> list[tuple[Any, ...]]:
    calls = [(call.path, call.phase, call.call, call.depth) for call in rec.order()]
    values = rec.query("select path, kind, slot, call, phase, shape, mean, digest from values order by seq").to_pylist()
    return calls + [tuple(map(str, value.values())) for value in values]


@pytest.mark.parametrize(
    "make", [mlp, Nested, lambda: nn.Sequential(nn.Identity(), mlp())], ids=["in-place", "dataclass", "leaf"]
)
def test_a_backward_in_another_thread_is_recorded_alike(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net = make()

    def record(backward: Callable[[Tensor], None]) -> list[tuple[Any, ...]]:
        keywords = {"scale": torch.ones(4, requires_grad=True)} if isinstance(net, Nested) else {}
        with th.record(net, kinds=["input", "output", "grad_input", "grad_output", "param_grad"]) as rec:
            out = net(torch.ones(2, 4, requires_grad=True), **keywords)
            backward((out.logits if hasattr(out, "logits") else out).sum())
        return _events(rec)

    here = record(lambda loss: loss.backward())
    assert record(lambda loss: _in_threads(lambda index: loss.backward(), count=1)) == here


def test_hooks_fire_alike_when_backward_runs_in_another_thread() -> None:
    net = mlp()
    orders: list[list[str]] = []
    for threaded in (False, True):
        fired: list[str] = []
        with th.hooks(net) as hooks:
            hooks.backward_pre("**", lambda name, module, grad: fired.append("bp:" + name), with_name=True)  # noqa: B023
            hooks.backward("**", lambda name, module, gi, go: fired.append("b:" + name), with_name=True)  # noqa: B023
            loss = net(torch.ones(2, 4)).sum()
            if threaded:
                _in_threads(lambda index: loss.backward(), count=1)  # noqa: B023 - runs before the loop goes on
            else:
                loss.backward()
        orders.append(fired)
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(f"{kind}:{name}" for kind in ("bp", "b") for name in ("", "0", "1", "2"))


# ---- steps in threads ----


def _steps(rec: Any, path: str = "") -> list[tuple[int, int]]:
    return sorted((call.step, call.call) for call in rec.order() if call.path == path and call.phase == "forward")


def test_inference_in_a_worker_thread_has_its_steps() -> None:
    net = mlp()
    with th.record(net) as rec, torch.no_grad():
        _in_threads(lambda index: _call(net, 5), count=1)
    assert _steps(rec) == [(step, 0) for step in range(5)]
    assert rec.recording.manifest.steps == 5


def test_a_thread_for_each_request_has_its_steps() -> None:
    net = mlp()
    with th.record(net) as rec:
        for _ in range(4):
            _in_threads(lambda index: _call(net, 2), count=1)
    assert _steps(rec) == [(step, 0) for step in range(8)]


def test_a_model_trained_in_another_thread_is_recorded_as_in_this_one() -> None:
    def train(rec: Any, net: nn.Module) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                net(torch.ones(3, 4))

    found = []
    for elsewhere in (False, True):
        torch.manual_seed(0)
        net = mlp()
        with th.record(net, kinds=["output", "grad_output", "param_grad", "update"], every=2) as rec:
            if elsewhere:
                _in_threads(lambda index, rec=rec, net=net: train(rec, net), count=1)
            else:
                train(rec, net)
        rows = rec.query("select step, path, kind, slot, call, phase, rms from values order by all").to_pylist()
        found.append((rows, rec.recording.manifest.steps, rec.recording.manifest.steps_recorded))
    assert found[0] == found[1]
    assert found[0][1:] == (4, 2)


def test_of_threads_that_run_at_once_one_tells_the_steps() -> None:
    net = mlp()
    with th.record(net) as rec:
        _in_threads(lambda index: _call(net, 30), count=3)
    steps = rec.recording.manifest.steps
    assert 30 <= steps <= 90  # each thread that comes after the one that told them goes on
    assert len(_steps(rec)) == 90
    assert {step for step, _ in _steps(rec)} <= set(range(steps))


def test_the_sessions_own_thread_comes_first() -> None:
    net = mlp()
    ready, go = threading.Event(), threading.Event()

    def serve() -> None:
        _call(net, 1)
        ready.set()
        go.wait(60)
        _call(net, 3)

    with th.record(net) as rec:
        server = threading.Thread(target=serve)
        server.start()
        ready.wait(60)
        _call(net, 2)  # steps 1 and 2
        go.set()
        server.join()
    assert _steps(rec) == [(0, 0), (1, 0), (2, 0), (2, 0), (2, 1), (2, 2)]


def test_models_met_in_several_threads_at_once_are_all_recorded(tmp_path: Any) -> None:
    from tenterhook.script_recorder import ScriptRecorder, ScriptRequest

    nets = [[mlp() for _ in range(6)] for _ in range(4)]
    recorder = ScriptRecorder(tmp_path / "a.thk", ScriptRequest(kinds=["output"]))
    recorder.start()
    try:
        _in_threads(lambda index: [_call(net, 3) for net in nets[index]], count=4)
    finally:
        summary = recorder.close()
    assert summary.partial is None
    recording = th.open(tmp_path / "a.thk")
    assert len({model.name for model in recording.manifest.models}) == 24
    rows = recording.query("select model, count(*) as n from calls where path = '' group by model").to_pylist()
    assert [row["n"] for row in rows] == [3] * 24


def test_functional_calls_of_threads_lose_no_number() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(5):
                x = torch.relu(x)
            return x

    net = Net()
    with th.record(net, ops=True) as rec:
        rec.step()
        _in_threads(lambda index: [net(torch.ones(2)) for _ in range(20)], count=4)
    by_thread: dict[int, list[int]] = defaultdict(list)
    for call in rec["(root)/relu"].calls:
        by_thread[call.thread].append(call.call)
    assert sorted(map(len, by_thread.values())) == [100] * 4
    assert all(sorted(numbers) == list(range(100)) for numbers in by_thread.values())
