"""Where a step ends: at an optimizer's step, at the root's next forward without one, or where the user says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.errors import SelectionError, TenterhookError


def _on(net: nn.Module) -> list[bool]:
    """Which modules have hooks of ours now."""
    paths = {hook.path for hook in th.installed_hooks(net) if hook.owner == "tenterhook"}
    return [path in paths for path, _ in net.named_modules()]


def _train(
    net: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1, on: list[list[bool]] | None = None
) -> None:
    """Train some steps; ``on`` is given which modules have hooks in each of them, once their forward has run."""
    for _ in range(times):
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).sum()
        if on is not None:
            on.append(_on(net))
        loss.backward()
        optimizer.step()


def _evaluate(net: nn.Module, rows: int = 5) -> None:
    with torch.no_grad():
        net(torch.ones(rows, 3))


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
    on: list[list[bool]] = []
    with th.record(net, every=2):
        _train(net, optimizer, 5, on)
    assert on == [[True] * 3, [False] * 3] * 2 + [[True] * 3]


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
    assert not any(_on(net))


def test_each_selection_has_its_rate() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kinds = ["output", "grad_output", "param", "param_grad", "update"]
    on: list[list[bool]] = []
    with th.record(net, kinds=kinds, every={"**": 4, "1": 2}) as rec:
        _train(net, optimizer, 6, on)
    assert on == [[True] * 3, [False] * 3, [True, False, True], [False] * 3, [True] * 3, [False] * 3]
    seen = {(row["step"], row["path"], row["kind"]) for row in rec.table("values").to_pylist()}
    calls = {(call.step, call.path) for call in rec.order()}
    assert calls == {(0, ""), (0, "0"), (0, "1"), (2, "1"), (4, ""), (4, "0"), (4, "1")}
    parameters = {(step, path) for step, path in calls if path}
    assert seen == {(*place, kind) for place in calls for kind in kinds[:2]} | {
        (*place, kind) for place in parameters for kind in kinds[2:]
    }


SAMPLINGS: dict[str, dict[str, Any]] = {
    "every step": {"every": 1},
    "every second": {"every": 2},
    "every third": {"every": 3},
    "some": {"steps": "1:3,5"},
    "patterns": {"every": {"**": 3, "1": 2}},
    "patterns with nothing in common": {"every": {"**": 100, "0": 3, "1": 2}},
}


@pytest.mark.parametrize("whole", [True, False], ids=["the root is called", "a part is called"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_evaluation_is_recorded_where_the_training_step_before_it_is(sampling: str, whole: bool) -> None:
    """The rows are those of a run that is recorded on every step, less the steps (and modules) that are left out."""

    def run(**options: Any) -> list[tuple[int, str, int, str]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        called = [net] if whole else [net[0], net[1]]
        with th.record(net, **options) as rec:
            for _ in range(7):
                for part in called:
                    _train(part, optimizer)
                    for _ in range(2):
                        _evaluate(part)
        assert rec.recording.manifest.steps == 7 * len(called)
        found = [(call.step, call.path, call.call, call.phase) for call in rec.order()]
        assert rec.recording.manifest.steps_recorded == len({step for step, *_ in found})
        return sorted(found)

    options = SAMPLINGS[sampling]
    every = options.get("every", 1)
    rates = (
        {"": every, "0": every, "1": every} if isinstance(every, int) else {"": every["**"], "0": every["**"], **every}
    )
    steps = {1, 2, 5} if "steps" in options else range(100)
    expected = [row for row in run() if row[0] in steps and row[0] % rates[row[1]] == 0]
    assert run(**options) == expected


def test_evaluation_after_a_step_that_is_not_recorded_is_not_either() -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with th.record(net, kinds=["output", "param_grad", "update"], every=2) as rec:
        for _ in range(6):
            _train(net, optimizer)
            _evaluate(net)
    assert _calls(rec) == [(0, 0), (0, 1), (2, 0), (2, 1), (4, 0), (4, 1)]
    rows = rec.query(
        "select step, kind, count(*) as n from values where path = '0' group by all order by all"
    ).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (step, kind, n) for step in (0, 2, 4) for kind, n in (("output", 2), ("param_grad", 2), ("update", 2))
    ]
    assert (rec.recording.manifest.steps, rec.recording.manifest.steps_recorded) == (6, 3)


def test_evaluation_first_and_a_pause_amid() -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with th.record(net, every=2) as rec:
        _evaluate(net)
        _train(net, optimizer)
        rec.pause()
        _evaluate(net)
        rec.resume()
        _evaluate(net)
        _train(net, optimizer, 2)
        _evaluate(net)
    assert _calls(rec) == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]


def test_functional_calls_of_evaluation_go_with_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.fc(x))

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with th.record(net, ops=True, every=2) as rec:
        for _ in range(4):
            _train(net, optimizer)
            _evaluate(net)
            assert torch._C._len_torch_function_stack() == 0
    assert [(call.step, call.call) for call in rec["(root)/relu"].calls] == [(0, 0), (0, 1), (2, 0), (2, 1)]


def test_a_recording_that_goes_on_knows_how_many_steps_it_holds(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    for _ in range(2):
        with th.record(net, every=2, to=tmp_path / "a.thk", resume=True) as rec, torch.no_grad():
            for _ in range(5):
                net(torch.ones(2, 3))
    assert rec.recording.steps == [0, 2, 4, 6, 8]
    assert (rec.recording.manifest.steps, rec.recording.manifest.steps_recorded) == (10, 5)


WRONG: dict[str, dict[str, Any]] = {
    "no whole number": {"every": 2.5},
    "whole number of text": {"every": "2"},
    "is no whole number": {"every": None},
    "True is no whole": {"every": True},
    "records nothing": {"every": 0},
    "every=-1 records nothing": {"every": -1},
    "names no module": {"every": {}},
    "'3' is no whole": {"every": {"0": "3"}},
    "names no step, so": {"steps": []},
    "steps=range": {"steps": range(5, 5)},
    "counts from the end at '-3:'": {"steps": "-3:"},
    "counts from the end, which": {"steps": [3, -1]},
    "counts from the end at ':-1'": {"steps": "1,:-1"},
    "names no step at '5:2'": {"steps": "5:2"},
    "stride of 0": {"steps": "0:10:0"},
    "not understood at ''": {"steps": ""},
    "not understood at ' '": {"steps": "3, "},
    "not understood at 'last'": {"steps": "last"},
    "not understood at '1:2:3:4'": {"steps": "1:2:3:4"},
    "1.5 is no whole number": {"steps": [1.5]},
    "'a' is no whole number": {"steps": ["a"]},
    "neither text nor a list": {"steps": 5},
    "no step fits both": {"steps": "1:100:2", "every": 2},
    "steps=.*with every=": {"steps": [1, 3], "every": {"0": 2, "1": 4}},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_can_record_nothing_is_an_error(words: str, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1))
    match = "is no whole number" if words == "whole number of text" else words
    with pytest.raises(TenterhookError, match=match) as caught:
        th.record(net, to=tmp_path / "a.thk", **WRONG[words])
    assert "\n  " in str(caught.value)  # says what to do
    assert not (tmp_path / "a.thk").exists()


@pytest.mark.parametrize(
    "steps", ["::3", "0,3,6", [0, 3, 6], range(0, 9, 3), iter([0, 3, 6]), (n for n in (0, 3, 6)), range(6, -1, -3)]
)
def test_steps_can_be_said_in_many_ways(steps: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    with th.record(net, steps=steps) as rec, torch.no_grad():
        for _ in range(8):
            net(torch.ones(2, 3))
    assert rec.recording.steps == [0, 3, 6]


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
