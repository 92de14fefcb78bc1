"""Where a step ends: at an optimizer's step, at the root's next forward without one, or where the user says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.errors import SelectionError, TenterhookError


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def _calls(rec: th.Recorder) -> list[tuple[int, int]]:
    return [(call.step, call.call) for call in rec.order() if call.path == "" and call.phase == "forward"]


def test_an_optimizer_ends_a_step() -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    with th.record(net) as rec:
        _train(net, torch.optim.SGD(net.parameters(), lr=0.1), 3)
    assert _calls(rec) == [(0, 0), (1, 0), (2, 0)]
    assert rec.recording.steps == [0, 1, 2]


def test_accumulated_batches_are_one_step() -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with th.record(net) as rec:
        for batch in range(4):
            net(torch.ones(2, 3)).sum().backward()
            if batch % 2:
                optimizer.step()
    assert _calls(rec) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_without_an_optimizer_each_forward_of_the_root_is_a_step() -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    with th.record(net) as rec:
        for _ in range(3):
            net(torch.ones(2, 3)).sum().backward()
    assert _calls(rec) == [(0, 0), (1, 0), (2, 0)]


def test_the_user_overrules_everything() -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with th.record(net) as rec:
        rec.step()
        _train(net, optimizer, 2)
        rec.step()
        _train(net, optimizer)
    assert _calls(rec) == [(1, 0), (1, 1), (2, 0)]


def test_evaluation_goes_with_the_training_step_before_it() -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with th.record(net) as rec:
        _train(net, optimizer, 2)
        with torch.no_grad():
            net(torch.ones(5, 3))
            net(torch.ones(5, 3))
        _train(net, optimizer)
    assert _calls(rec) == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert rec.recording.steps == [0, 1, 2]


def test_two_optimizers_that_step_together_end_one_step() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    first = torch.optim.SGD(net[0].parameters(), lr=0.1)
    second = torch.optim.SGD(net[1].parameters(), lr=0.1)
    with th.record(net) as rec:
        for _ in range(2):
            net(torch.ones(2, 3)).sum().backward()
            first.step()
            second.step()
    assert _calls(rec) == [(0, 0), (1, 0)]


def test_every_and_steps_choose_what_is_recorded() -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with th.record(net, every=3) as rec:
        _train(net, optimizer, 7)
    assert _calls(rec) == [(0, 0), (3, 0), (6, 0)]
    with th.record(net, steps="1:3,5") as rec:
        _train(net, optimizer, 7)
    assert _calls(rec) == [(1, 0), (2, 0), (5, 0)]
    net = nn.Sequential(nn.Linear(3, 1))
    with th.record(net, steps=[2]) as rec:  # the steps are counted also where no optimizer tells them
        for _ in range(4):
            net(torch.ones(2, 3))
    assert _calls(rec) == [(2, 0)]


def test_no_hooks_are_on_between_sampled_steps() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with th.record(net, every=2):
        on = []
        for _ in range(4):
            on.append(sum(len(module._forward_hooks) for module in net.modules()))
            _train(net, optimizer)
    assert on == [3, 0, 3, 0]


def test_pause_and_resume() -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with th.record(net) as rec:
        _train(net, optimizer)
        rec.pause()
        _train(net, optimizer, 2)
        rec.resume()
        _train(net, optimizer)
    assert [step for step, _ in _calls(rec)] == [0, rec.recording.steps[-1]]
    assert sum(len(module._forward_hooks) for module in net.modules()) == 0


def test_each_selection_has_its_rate() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kinds = ["output", "grad_output", "param", "param_grad", "update"]
    on = []
    with th.record(net, kinds=kinds, every={"**": 4, "1": 2}) as rec:
        for _ in range(6):
            on.append([bool(module._forward_hooks) for module in net.modules()])
            _train(net, optimizer)
    assert on == [[True] * 3, [False] * 3, [True, False, True], [False] * 3, [True] * 3, [False] * 3]
    seen = {(row["step"], row["path"], row["kind"]) for row in rec.table("values").to_pylist()}
    calls = {(call.step, call.path) for call in rec.order()}
    assert calls == {(0, ""), (0, "0"), (0, "1"), (2, "1"), (4, ""), (4, "0"), (4, "1")}
    parameters = {(step, path) for step, path in calls if path}
    assert seen == {(*place, kind) for place in calls for kind in kinds[:2]} | {
        (*place, kind) for place in parameters for kind in kinds[2:]
    }


def test_rates_hold_where_each_forward_is_a_step() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with th.record(net, "?", every={"0": 3, "1": 2}) as rec, torch.no_grad():
        for _ in range(7):
            net(torch.ones(2, 3))
    assert [(call.step, call.path) for call in rec.order()] == [
        (0, "0"), (0, "1"), (2, "1"), (3, "0"), (4, "1"), (6, "0"), (6, "1"),
    ]  # fmt: skip


def test_a_rate_for_nothing_is_an_error() -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    with pytest.raises(SelectionError, match="head"):
        th.record(net, every={"head": 2})
    with pytest.raises(TenterhookError, match="records nothing"):
        th.record(net, every={"0": 0})
    with pytest.raises(TenterhookError, match="one rate"):
        th.record(net, every={"0": 2}, ops=True)
