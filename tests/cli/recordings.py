"""Recordings with known content, written as the recorder writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from tenterhook.recording import Cost, DiskSink, Manifest, Model
from tenterhook.recording.schema import CALLS, MODULES, VALUES
from tests.recording.synthetic import batch, call, value

__all__ = [
    "MODULES_OF_NET",
    "write_empty",
    "write_first_bad",
    "write_kinds",
    "write_measured",
    "write_named",
    "write_net",
    "write_ranks",
    "write_steps",
]

MODULES_OF_NET = {
    "": "Net",
    "features": "Sequential",
    "features.0": "Conv2d",
    "features.1": "ReLU",
    "rnn": "LSTM",
    "cell": "Linear",
    "head": "Linear",
    "aux": "Linear",
}

_SHAPES = {
    "": [64, 10],
    "features": [64, 32, 26, 26],
    "features.0": [64, 32, 26, 26],
    "features.1": [64, 32, 26, 26],
    "head": [64, 10],
}


class _Writer:
    """Numbers events as the recorder does."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.values: list[dict[str, Any]] = []
        self._seq = 0

    def add(
        self,
        step: int,
        path: str,
        depth: int,
        kind: str = "output",
        *,
        number: int = 0,
        slots: tuple[str, ...] = ("",),
        **fields: Any,
    ) -> None:
        phase = "backward" if kind.startswith("grad") else "forward"
        owner = self._seq
        given = {name: fields.pop(name) for name in ("error", "duration_ns") if name in fields}
        self.calls.append(
            call(owner, step, path, type=MODULES_OF_NET[path], depth=depth, phase=phase, call=number, **given)
        )
        for slot in slots:
            self._seq += 1
            shape = _SHAPES.get(path, [64, 16])
            self.values.append(
                value(
                    self._seq, owner, step, path, kind=kind, phase=phase, call=number, slot=slot, shape=shape, **fields
                )
            )
        self._seq += 1


def _modules(models: Iterable[str] = ("Net",), **reasons: str) -> pa.Table:
    rows = [
        {"model": model, "path": path, "raw_path": path, "type": kind, "aliases": [], "parameters": 10,
         "selected": True, "calls": 0 if path in reasons else 2, "reason": reasons.get(path)}
        for model in models
        for path, kind in MODULES_OF_NET.items()
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, MODULES)


def _manifest(**fields: Any) -> Manifest:
    known: dict[str, Any] = {
        "framework": "torch",
        "versions": {"torch": "2.13.0"},
        "models": [Model(name="Net", type="train.Net", parameters=80, modules=8)],
        "argv": ["train.py", "--lr", "3e-4"],
        "started": "2026-11-29T14:30:00+00:00",
        "cost": Cost(hook_seconds=1.37, wall_seconds=76.1),
        "steps": 2,
    }
    return Manifest(**{**known, **fields})


def _one_step(writer: _Writer, step: int, *, bad: bool) -> None:
    wrong: dict[str, Any] = {"nan_count": 3, "posinf_count": 1, "neginf_count": 1} if bad else {}
    writer.add(step, "", 0, mean=-0.0123, std=0.8117, absmax=3.4142, min=-3.4142, max=2.5)
    writer.add(step, "features", 1, zero_count=3)
    writer.add(step, "features.0", 2, mean=1.5e-5, std=12345.6789, absmax=97000.0, **wrong)
    writer.add(step, "features.1", 2, zero_count=6, min=0.0, duration_ns=1_234_567)
    writer.add(step, "rnn", 1, slots=("[0]", "[1][0]", "[1][1]"))
    for number in range(6):
        writer.add(step, "cell", 1, number=number)
    writer.add(step, "head", 1, std=0.0, mean=0.0)
    writer.add(step, "", 0, "grad_output", mean=1e-12)
    writer.add(step, "head", 1, "grad_output")
    for number in reversed(range(6)):
        writer.add(step, "cell", 1, "grad_output", number=number)
    writer.add(step, "features", 1, "grad_output")
    writer.add(
        step,
        "features.0",
        2,
        "grad_output",
        dtype="none",
        **dict.fromkeys(("mean", "std", "min", "max", "absmax", "zero_count")),
        note="no gradient: grad mode off",
    )


def write_net(
    path: Path, *, bad: bool = True, close: bool = True, models: Iterable[str] = ("Net",), **fields: Any
) -> Path:
    """Write two steps of a small network, with a module that is called six times, one with three outputs and one never called."""
    manifest = _manifest(**fields)
    sink = DiskSink(path, manifest)
    writer = _Writer()
    for step in (0, 1):
        _one_step(writer, step, bad=bad and step == 1)
    sink.write_calls(batch(CALLS, writer.calls))
    sink.write_values(batch(VALUES, writer.values))
    sink.flush()
    if close:
        sink.close(manifest, _modules(models, aux="never called"))
    return path


def _write(
    path: Path, calls: list[dict[str, Any]], values: list[dict[str, Any]], *, close: bool = True, **fields: Any
) -> Path:
    manifest = _manifest(**fields)
    sink = DiskSink(path, manifest)
    sink.write_calls(batch(CALLS, calls))
    sink.write_values(batch(VALUES, values))
    sink.flush()
    if close:
        sink.close(manifest, _modules())
    return path


def write_kinds(path: Path) -> Path:
    """Write one step of which every kind was recorded."""
    calls = [
        call(0, 0, "", type="Net", duration_ns=2_000_000),
        call(1, 0, "head", type="Linear", depth=1, duration_ns=1_000_000),
        call(10, 0, "", type="Net", phase="backward", duration_ns=None),
        call(11, 0, "head", type="Linear", depth=1, phase="backward", duration_ns=None),
    ]
    given: list[tuple[int, int | None, str, str, str]] = [
        (2, 0, "", "input", "x"),
        (3, 1, "head", "input", "input"),
        (4, 1, "head", "output", ""),
        (5, 0, "", "output", '["logits"]'),
        (6, 0, "", "output", '["loss"]'),
        (12, 10, "", "grad_output", '["loss"]'),
        (13, 11, "head", "grad_output", ""),
        (14, 11, "head", "grad_input", "input"),
        (15, None, "head", "param_grad", "weight"),
        (16, None, "head", "param_grad", "bias"),
        (17, None, "head", "param", "weight"),
        (18, None, "head", "update", "weight"),
    ]
    values = [
        value(seq, owner, 0, place, kind=kind, slot=slot, phase="backward" if kind.startswith("grad") else "forward")
        for seq, owner, place, kind, slot in given
    ]
    return _write(path, calls, values, steps=1)


def write_first_bad(path: Path, kind: str, given: dict[str, Any] | None) -> Path:
    """Write a call with one value of a kind that is not finite, and what it was given where that was recorded."""
    values = [] if given is None else [value(1, 0, 3, "fc", kind="input", slot="input", **given)]
    owner = None if kind.startswith("param") else 0
    values.append(value(2, owner, 3, "fc", kind=kind, nan_count=1))
    return _write(path, [call(0, 3, "fc", type="Linear")], values, steps=4)


def write_steps(path: Path, steps: Iterable[int], *, close: bool = True) -> Path:
    """Write one forward of the model for each item, in that step."""
    numbered = list(steps)
    calls = [call(seq, step, "", type="Net", call=numbered[:seq].count(step)) for seq, step in enumerate(numbered)]
    return _write(path, calls, [], close=close, steps=max(numbered) + 1)


def write_measured(path: Path, measured: Iterable[dict[str, Any]]) -> Path:
    """Write a call of each of some modules, with one value whose fields are given."""
    given = list(measured)
    calls = [call(2 * seq, 0, f"m{seq}", type="Linear") for seq in range(len(given))]
    values = [value(2 * seq + 1, 2 * seq, 0, f"m{seq}", **fields) for seq, fields in enumerate(given)]
    return _write(path, calls, values, steps=1)


def write_ranks(path: Path, given: Mapping[int, Mapping[int, dict[str, Any]]]) -> Path:
    """Write for each rank and step a call with one value whose fields are given."""
    for rank, steps in given.items():
        manifest = _manifest(rank=rank, world=len(given), steps=1 + max(steps))
        sink = DiskSink(path, manifest, rank=rank)
        sink.write_calls(batch(CALLS, [call(2 * at, step, "fc", type="Linear") for at, step in enumerate(steps)]))
        values = [value(2 * at + 1, 2 * at, step, "fc", **fields) for at, (step, fields) in enumerate(steps.items())]
        sink.write_values(batch(VALUES, values))
        sink.close(manifest, _modules())
    return path


def write_empty(path: Path) -> Path:
    """Write a recording of a run in which no module was called."""
    manifest = _manifest(models=[], steps=0)
    sink = DiskSink(path, manifest)
    sink.close(manifest, MODULES.empty_table())
    return path


def write_named(path: Path, names: Iterable[str], *, model: str) -> Path:
    """Write one call of each of some modules, in two models: one of this name, and a second one."""
    places = [(owner, name) for owner in (model, f"{model}-2") for name in names]
    calls = [call(2 * seq, 0, name, model=owner) for seq, (owner, name) in enumerate(places)]
    values = [value(2 * seq + 1, 2 * seq, 0, name, model=owner) for seq, (owner, name) in enumerate(places)]
    return _write(path, calls, values, steps=1)
