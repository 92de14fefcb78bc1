"""A recorded run is bit for bit the run that it records: outputs, gradients, parameters, buffers and random state."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tenterhook as th
from tests.five_models import MODELS, Outcome, differences, train

ALL = ["input", "output", "grad_input", "grad_output", "param", "param_grad", "update"]
WAYS: dict[str, dict[str, Any]] = {
    "in memory": {},
    "to disk": {"to": "rec.thk"},
    "tensors": {"tensors": True},
    "all kinds": {"kinds": ALL},
    "all kinds, tensors, to disk": {"kinds": ALL, "tensors": True, "to": "rec.thk"},
    "every second step": {"kinds": ALL, "every": 2},
}
ROOT = Path(__file__).parents[1]


def _fresh(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make(), shape


@pytest.fixture(scope="module")
def bare() -> dict[str, Outcome]:
    return {name: train(*_fresh(name)) for name in MODELS}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_run_is_the_run(name: str, way: str, bare: dict[str, Outcome], tmp_path: Path) -> None:
    options = dict(WAYS[way])
    if "to" in options:
        options["to"] = tmp_path / options["to"]
    net, shape = _fresh(name)
    with th.record(net, on_error="raise", **options) as rec:
        outcome = train(net, shape)
    assert differences(outcome, bare[name]) == []
    assert {call.path for call in rec.order()} >= {"", "head"}


@pytest.mark.parametrize("name", MODELS)
def test_a_run_under_observing_hooks_is_the_run(name: str, bare: dict[str, Outcome]) -> None:
    net, shape = _fresh(name)
    with th.hooks(net) as hooks:
        handles = [
            getattr(hooks, kind)("**", lambda *arguments: None)
            for kind in ("forward_pre", "forward", "backward_pre", "backward", "param_grad")
        ]
        outcome = train(net, shape)
    assert differences(outcome, bare[name]) == []
    assert all(handle.fired for handle in handles)


def test_the_comparison_sees_one_changed_bit(bare: dict[str, Outcome]) -> None:
    net, shape = _fresh("shared")
    with th.hooks(net) as hooks:
        hooks.forward("head", lambda module, args, output: torch.nextafter(output, output + 1))
        assert "0 output" in differences(train(net, shape), bare["shared"])


SCRIPT = """
import hashlib, sys, torch
sys.path.insert(0, {root!r})
from tests.five_models import MODELS, train

for model, (make, shape) in MODELS.items():
    torch.manual_seed(0)
    outcome = train(make(), shape)
    digest = hashlib.sha256()
    for name in sorted(outcome):
        digest.update(name.encode() + outcome[name].detach().numpy().tobytes())
    print(model, len(outcome), digest.hexdigest())
"""


def test_a_recorded_script_prints_the_digests_of_the_bare_one(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    bare = _output(tmp_path, str(script))
    assert len(bare.splitlines()) == len(MODELS)
    recorded = ["-m", "tenterhook", "record", "--tensors", "--kinds", ",".join(ALL), "-o", "rec.thk", str(script)]
    assert _output(tmp_path, *recorded) == bare
    models = {model.type.rpartition(".")[2] for model in th.open(tmp_path / "rec.thk").manifest.models}
    assert {"InPlaceCNN", "Recurrent", "Transformer", "Shared", "DictOutput"} <= models


def _output(folder: Path, *command: str) -> str:
    source = str(Path(th.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
