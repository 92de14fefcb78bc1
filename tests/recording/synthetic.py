"""Rows of made-up runs, in the schemas of a recording, for tests and benchmarks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tenterhook.recording.schema import CALLS, MODULES, VALUES
from tenterhook.stats import SKETCH_SIZE

PATHS = ("", "conv1", "relu", "fc")
TYPES = ("Net", "Conv2d", "ReLU", "Linear")


def words(values: list[Any]) -> pa.DictionaryArray:
    """Encode words as the schemas want them."""
    return pa.array(values, pa.string()).dictionary_encode().cast(pa.dictionary(pa.int32(), pa.string()))


def batch(schema: pa.Schema, rows: list[dict[str, object]]) -> pa.RecordBatch:
    """Make a batch; what a row leaves out is null."""
    columns = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        columns.append(words(values) if pa.types.is_dictionary(field.type) else pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def call(seq: int, step: int = 0, path: str = "conv1", **fields: Any) -> dict[str, object]:
    """Make a row of calls."""
    row: dict[str, object] = {
        "seq": seq,
        "step": step,
        "model": "Net",
        "path": path,
        "type": TYPES[PATHS.index(path)] if path in PATHS else "Module",
        "call": 0,
        "phase": "forward",
        "pass": 0,
        "depth": 1 if path else 0,
        "thread": 1,
        "start_ns": seq * 1000,
        "duration_ns": 500,
    }
    return {**row, **fields}


def value(seq: int, call_seq: int, step: int = 0, path: str = "conv1", **fields: Any) -> dict[str, object]:
    """Make a row of values."""
    row: dict[str, object] = {
        "seq": seq,
        "call_seq": call_seq,
        "step": step,
        "model": "Net",
        "path": path,
        "kind": "output",
        "slot": "",
        "call": 0,
        "phase": "forward",
        "pass": 0,
        "shape": [2, 3],
        "dtype": "float32",
        "device": "cpu",
        "numel": 6,
        "min": -1.5,
        "max": 2.25,
        "mean": 0.5,
        "std": 1.0,
        "rms": 1.1,
        "absmax": 2.25,
        "nan_count": 0,
        "posinf_count": 0,
        "neginf_count": 0,
        "zero_count": 1,
        "sketch": [float(seq)] * SKETCH_SIZE,
        "digest": 2**64 - 1 - seq,
    }
    return {**row, **fields}


def calls_batch(*rows: dict[str, object]) -> pa.RecordBatch:
    """Make a batch of calls."""
    return batch(CALLS, list(rows))


def values_batch(*rows: dict[str, object]) -> pa.RecordBatch:
    """Make a batch of values."""
    return batch(VALUES, list(rows))


def modules_table(model: str = "Net", paths: tuple[str, ...] = PATHS, **reasons: str) -> pa.Table:
    """Make the modules of a network, all selected and called but those with a reason."""
    rows = [
        {
            "model": model,
            "path": path,
            "raw_path": path,
            "type": TYPES[PATHS.index(path)],
            "aliases": [],
            "parameters": 10,
            "selected": True,
            "calls": 0 if path in reasons else 1,
            "reason": reasons.get(path),
        }
        for path in paths
    ]
    return pa.Table.from_pylist(rows, MODULES)


def step_of_rows(step: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Make one step: the root, three modules in it, and the backward of the last, with an output and a gradient
    each."""
    first = step * 100
    calls = [call(first + index, step, path, parent=None if not path else first) for index, path in enumerate(PATHS)]
    calls.append(call(first + 20, step, "fc", phase="backward", forward=first + 3, depth=0))
    values = [value(first + 10 + index, first + index, step, path) for index, path in enumerate(PATHS)]
    values.append(value(first + 21, first + 20, step, "fc", kind="grad_output", phase="backward"))
    return calls_batch(*calls), values_batch(*values)


def many_values(
    rows: int, *, rank: int = 0, modules: int = 300, first_step: int = 0, sketch: bool = False
) -> pa.RecordBatch:
    """Make a large batch of values with plausible numbers: `modules` outputs a step."""
    generator = np.random.default_rng([rank, first_step, rows])
    index = np.arange(rows)
    step = first_step + index // modules
    seq = first_step * modules + index
    paths = [f"layers.{number // 3}.{('attn', 'mlp', 'norm')[number % 3]}" for number in range(modules)]
    scale = np.exp(generator.normal(size=rows))
    fixed = {
        "model": "Net",
        "kind": "output",
        "slot": "",
        "phase": "forward",
        "dtype": "bfloat16",
        "device": "cuda:0",
        "note": None,
    }
    numbers = {
        "min": -3 * scale,
        "max": 3 * scale,
        "mean": generator.normal(size=rows) * 0.01,
        "std": scale,
        "rms": scale * 1.001,
        "absmax": 3.1 * scale,
    }
    columns: list[pa.Array] = []
    for field in VALUES:
        name = field.name
        if name == "path":
            codes = pa.array((index % modules).astype(np.int32))
            columns.append(pa.DictionaryArray.from_arrays(codes, pa.array(paths)))
        elif name in fixed:
            code = pa.array([0 if fixed[name] is not None else None], pa.int32()).take(
                pa.array(np.zeros(rows, np.int64))
            )
            columns.append(pa.DictionaryArray.from_arrays(code, pa.array([fixed[name] or "x"])))
        elif name == "shape":
            offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * 3)
            columns.append(pa.ListArray.from_arrays(offsets, pa.array(np.tile([8, 2048, 4096], rows))))
        elif name == "sketch":
            flat = pa.array(generator.normal(size=rows * SKETCH_SIZE).astype(np.float32)) if sketch else None
            columns.append(
                pa.FixedSizeListArray.from_arrays(flat, SKETCH_SIZE) if sketch else pa.nulls(rows, field.type)
            )
        elif name in numbers:
            columns.append(pa.array(numbers[name]))
        elif name == "digest":
            columns.append(pa.array(generator.integers(0, 2**64, rows, np.uint64)))
        elif name in ("tensor", "shard"):
            columns.append(pa.nulls(rows, field.type))
        else:
            whole = {"seq": seq, "call_seq": seq, "step": step, "numel": np.full(rows, 67108864)}.get(
                name, np.zeros(rows, np.int64)
            )
            columns.append(pa.array(whole).cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=VALUES)
