"""Tensors that are spread over ranks, put together again from what each rank has said of its part."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa

from tenterhook.recording.schema import VALUES
from tenterhook.stats import STATISTICS, merge

__all__ = ["MERGED", "merge_shards"]

_PLACE = ("step", "model", "path", "kind", "slot", "call", "phase", "pass")
_OF_A_PART = {"seq", "call_seq", "shard", "tensor"}

MERGED: pa.Schema = pa.schema(
    [
        *(field for field in VALUES if field.name not in _OF_A_PART),
        pa.field("ranks", pa.list_(pa.int32()), nullable=False),  # whose rows went into this one
    ]
)
"""The schema of merged values: `VALUES` without what only a part has, and the ranks."""


def merge_shards(values: pa.Table) -> pa.Table:
    """Give one row for each tensor, of the rows that the ranks wrote of their parts of it.

    Rows of whole tensors stay as they are, one for each rank. Counts, extrema and `numel` of the parts merge exactly,
    `mean`, `std` and `rms` to rounding, sketches to the rounding of float32; digests cannot be merged and are null.

    Args:
        values: rows of the table `values`, with the column `rank`.

    Returns:
        A table of the schema `MERGED`, in the order of the rows. Where parts are missing (a rank that died, a recording
        opened with `ranks=`), `numel` is what is there, the sketch is null and `note` says how much.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in values.to_pylist():
        # What is whole on a rank is that rank's own: its batch, its copy of a parameter.
        of_rank = row["rank"] if row["shard"] is None else -1
        groups.setdefault((*(row[name] for name in _PLACE), of_rank), []).append(row)
    merged = [_whole(rows) if rows[0]["shard"] is not None else {**rows[0], "ranks": [rows[0]["rank"]]}
              for rows in groups.values()]  # fmt: skip
    return pa.Table.from_pylist(merged, MERGED)


def _whole(rows: list[dict[str, Any]]) -> dict[str, Any]:
    parts: dict[tuple[int, ...], dict[str, Any]] = {}
    for row in rows:  # ranks that replicate a part say the same of it: it counts once; an empty part lies anywhere
        if row["numel"] != 0:
            parts.setdefault(tuple(row["shard"]), row)
    first = rows[0]
    whole = {**first, "ranks": sorted({row["rank"] for row in rows}), "note": None, "digest": None}
    measured = list(parts.values()) or [first]
    if any(row["numel"] is None for row in measured):
        return {**whole, **dict.fromkeys(STATISTICS), "sketch": None, "note": first["note"]}
    described = merge(measured)
    size = math.prod(first["shape"])
    if described["numel"] != size:
        described["sketch"] = None
        whole["note"] = f"{described['numel']} of {size} elements: the shards of other ranks are missing"
    elif described["sketch"] is None:
        whole["note"] = next((row["note"] for row in measured if row["sketch"] is None), None)
    return {**whole, **described}
