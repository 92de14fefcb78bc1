"""From events to Arrow batches: rows are gathered in plain tuples beside a block of statistics, and turned over in one go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tenterhook.recording.schema import CALLS, VALUES
from tenterhook.stats import GROUP_DIGEST, GROUP_SKETCH, GROUP_STATISTICS, SKETCH_SIZE, STATISTICS, RowBuffer

__all__ = ["CALL_COLUMNS", "VALUE_COLUMNS", "ValueBlock", "calls_batch"]

CALL_COLUMNS: tuple[str, ...] = tuple(CALLS.names)
"""The order of the items of a row of calls."""

_MEASURED = (*STATISTICS, "sketch", "digest")
VALUE_COLUMNS: tuple[str, ...] = ("row", *(name for name in VALUES.names if name not in _MEASURED))
"""The order of the items of a row of values: its number in the block, then all columns that are not measured."""


def _column(values: Sequence[Any], field: pa.Field) -> pa.Array:
    if pa.types.is_dictionary(field.type):
        return pa.array(values, pa.string()).dictionary_encode()
    return pa.array(values, field.type)


def calls_batch(rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    """Build a batch of the calls table from rows in the order of ``CALL_COLUMNS``."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(CALLS)
    return pa.record_batch([_column(values, field) for values, field in zip(columns, CALLS, strict=True)], schema=CALLS)


class ValueBlock:
    """A block of ``capacity`` rows of the values table that is being filled.

    ``buffer`` holds what is measured, row by row; ``rows`` holds the rest, in the order of ``VALUE_COLUMNS``. A row whose
    tuple never arrived (an exception in between) is left out.
    """

    __slots__ = ("buffer", "capacity", "rows", "used")

    def __init__(self, capacity: int, *, sketch: bool, digest: bool = True) -> None:
        self.capacity = capacity
        self.buffer = RowBuffer(capacity, sketch=sketch, digest=digest)
        self.rows: list[tuple[Any, ...]] = []
        self.used = 0

    def batch(self) -> pa.RecordBatch:
        """Build the batch; the block is not to be used afterwards."""
        columns = dict(zip(VALUE_COLUMNS, zip(*self.rows, strict=True), strict=True)) if self.rows else {}
        taken = np.asarray(columns.pop("row", ()), dtype=np.int64)
        measured = self._measured(taken)
        arrays = [
            measured[field.name] if field.name in measured else _column(columns.get(field.name, ()), field)
            for field in VALUES
        ]
        return pa.record_batch(arrays, schema=VALUES)

    def _measured(self, taken: np.ndarray) -> dict[str, pa.Array]:
        buffer = self.buffer
        statistics = buffer.statistics[taken]
        filled = buffer.valid[taken]
        arrays: dict[str, pa.Array] = {}
        no_statistics = (filled & GROUP_STATISTICS) == 0
        for index, name in enumerate(STATISTICS):
            column = statistics[:, index]
            null = no_statistics | np.isnan(column)
            kind = VALUES.field(name).type
            if pa.types.is_integer(kind):
                column = np.where(null, 0, column).astype(np.int64)
            arrays[name] = pa.array(column, kind, mask=null)
        no_sketch = (filled & GROUP_SKETCH) == 0
        if no_sketch.all():
            arrays["sketch"] = pa.nulls(len(taken), VALUES.field("sketch").type)
        else:
            flat = pa.array(np.ascontiguousarray(buffer.sketches[taken]).reshape(-1), pa.float32())
            arrays["sketch"] = pa.FixedSizeListArray.from_arrays(flat, SKETCH_SIZE, mask=pa.array(no_sketch))
        no_digest = (filled & GROUP_DIGEST) == 0
        arrays["digest"] = (
            pa.nulls(len(taken), pa.uint64())
            if no_digest.all()
            else pa.array(buffer.digests[taken], pa.uint64(), mask=no_digest)
        )
        return arrays
