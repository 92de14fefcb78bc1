"""The tables of a recording: their columns, types and meaning. The format's page in the docs says the same in prose.

Everything that is written passes through these schemas, and everything that is read is checked against them.
"""

from __future__ import annotations

import pyarrow as pa

from tenterhook.stats import SKETCH_SIZE, STATISTICS

__all__ = ["CALLS", "FORMAT_VERSION", "MODULES", "PHASES", "VALUES"]

FORMAT_VERSION = "1.0"
"""``major.minor``: readers accept older minors and refuse newer majors."""

PHASES = ("forward", "backward", "recompute")
"""``recompute`` is a forward that activation checkpointing runs again inside the backward pass."""

_WORD = pa.dictionary(pa.int32(), pa.string())

CALLS: pa.Schema = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),  # order of the call's first event, per rank
        pa.field("step", pa.int64(), nullable=False),
        pa.field("model", _WORD),  # name of the outermost module: "Net", "Net-2"
        pa.field(
            "path", _WORD
        ),  # relative to the model; "" is the root; a functional call is "(root)/relu", of type "op"
        pa.field("type", _WORD),  # class name
        pa.field("call", pa.int32()),  # n-th call of this module in the step; backward rows bear their forward's number
        pa.field("phase", _WORD),
        pa.field("pass", pa.int32()),  # n-th backward pass through the same call (retain_graph); 0 in forward
        pa.field("depth", pa.int32()),  # nesting among the recorded calls of the same phase, 0 = outermost
        pa.field("parent", pa.int64()),  # seq of the enclosing call of the same phase; null at the outermost
        pa.field("forward", pa.int64()),  # backward and recompute rows: seq of the forward call they belong to
        pa.field("thread", pa.int64()),
        pa.field("start_ns", pa.int64()),  # monotonic, from the start of the recording
        pa.field("duration_ns", pa.int64()),  # null while unknown (the call raised, or the backward's end is not seen)
        pa.field("error", pa.string()),  # "ValueError: ..." of the call that raised
        pa.field("source", _WORD),  # functional calls: "file.py:12" of the user's code; null for modules
    ]
)

_COUNTS = {"numel", "nan_count", "posinf_count", "neginf_count", "zero_count"}

VALUES: pa.Schema = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),  # order of the event, one numbering with calls.seq
        pa.field("call_seq", pa.int64()),  # seq of the row in calls that this value belongs to; null for parameters
        pa.field("step", pa.int64(), nullable=False),
        pa.field("model", _WORD),
        pa.field("path", _WORD),  # module path; for param kinds the path of the owning module
        pa.field("kind", _WORD),  # input, output, grad_input, grad_output, param, param_grad, update
        pa.field(
            "slot", _WORD
        ),  # "" for a bare tensor; "[0]", ".hidden_states[3]", '["logits"]'; "x" for inputs; "weight" for parameters
        pa.field("call", pa.int32()),
        pa.field("phase", _WORD),
        pa.field("pass", pa.int32()),
        pa.field("shape", pa.list_(pa.int64())),
        pa.field(
            "shard", pa.list_(pa.int64())
        ),  # of a tensor spread over ranks: index of this rank's first element in it
        pa.field("dtype", _WORD),  # "float32", "bfloat16", ... ; "none" for a gradient that never came
        pa.field("device", _WORD),
        *(pa.field(name, pa.int64() if name in _COUNTS else pa.float64()) for name in STATISTICS),
        pa.field("sketch", pa.list_(pa.float32(), SKETCH_SIZE)),
        pa.field("digest", pa.uint64()),  # 64-bit digest of the bytes: equal bytes, equal digest
        pa.field("tensor", pa.string()),  # key into the tensor store; null when the tensor was not kept
        pa.field("note", _WORD),  # why something is null: "meta tensor", "no gradient: grad mode off", ...
    ]
)

MODULES: pa.Schema = pa.schema(
    [
        pa.field("model", pa.string()),
        pa.field("path", pa.string()),
        pa.field("raw_path", pa.string()),  # with wrapper prefixes
        pa.field("type", pa.string()),
        pa.field("aliases", pa.list_(pa.string())),
        pa.field("parameters", pa.int64()),  # number of elements of the module's own parameters
        pa.field("source", pa.string()),  # "file.py:12" of the class, null when unknown
        pa.field("selected", pa.bool_()),
        pa.field("calls", pa.int64()),  # forward calls recorded
        pa.field("reason", pa.string()),  # why a selected module (or a kind of it) was not seen; null when all was
    ]
)
