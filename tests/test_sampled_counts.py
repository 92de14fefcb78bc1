"""How often a module was called is counted over the steps that are recorded, and over no other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tests.cli.recorded import record

SAMPLED: list[dict[str, Any]] = [
    {"every": 3},
    {"every": {"**": 3}},
    {"every": {"0": 1, "2": 4}},
    {"steps": "2:20:3"},
    {"steps": "4:6"},
    {"steps": "4:20", "every": 3},
    {"ops": True, "steps": "1:20:4"},
    {"select": ["2"], "steps": "3:20:3"},
    {},
]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def run(rec: th.Recorder, model: nn.Module, steps: int, ended_by: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if ended_by == "optimizer" else None
    with rec:
        for _ in range(steps):
            with torch.set_grad_enabled(ended_by != "forward"):
                output = model(torch.ones(3, 4))
            if optimizer is not None:
                output.sum().backward()
                optimizer.step()
            if ended_by == "user":
                rec.step()


def assert_counted(recording: th.Recorder | th.Recording) -> None:
    rows = Counter(call.path for call in recording.order() if call.phase == "forward" and "/" not in call.path)
    assert {row["path"]: row["calls"] for row in recording.table("modules").to_pylist() if row["calls"]} == dict(rows)


@pytest.mark.parametrize("ended_by", ["optimizer", "forward", "user"])
@pytest.mark.parametrize("asked", SAMPLED, ids=str)
def test_calls_are_those_that_have_rows(asked: dict[str, Any], ended_by: str) -> None:
    model = net()
    rec = th.record(model, **asked)
    run(rec, model, 10, ended_by)
    assert rec.order()
    assert_counted(rec)


@pytest.mark.parametrize("ended_by", ["optimizer", "forward", "user"])
def test_what_was_called_on_other_steps_alone_is_told(ended_by: str) -> None:
    model = net()
    rec = th.record(model, ["0", "1"], steps="5:")
    run(rec, model, 3, ended_by)
    assert rec.order() == [] and rec.coverage.fired == []
    assert rec.coverage.missing == [(path, "called, on no step that is recorded") for path in ("0", "1")]
    rec = th.record(model, ["0", "1"], steps="1,5:")
    run(rec, model, 3, ended_by)
    assert len(rec.coverage.fired) == 2 and "no step" not in str(rec.coverage)


def test_pauses_count_nothing() -> None:
    model = net()
    with th.record(model) as rec, torch.no_grad():
        for step in range(6):
            (rec.pause if step % 2 else rec.resume)()
            model(torch.ones(3, 4))
            rec.step()
    assert_counted(rec)
    assert len([call for call in rec.order() if call.path == "0"]) == 3


@pytest.mark.parametrize("asked", [["--every", "3"], ["--steps", "2:20:3"], ["--steps", "4:6"], ["--every", "2=4"]])
def test_of_a_script_too(tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "long.py").write_text(
        "import torch\nfrom torch import nn\n"
        "model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(10):\n"
        "    model(torch.ones(3, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    assert record(tmp_path, "-o", "a.thk", *asked, "long.py").returncode == 0
    recording = th.open(tmp_path / "a.thk")
    assert recording.order()
    assert_counted(recording)
