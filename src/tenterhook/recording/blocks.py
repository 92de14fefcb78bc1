"""From events to Arrow batches: rows are gathered in one flat list beside a block of statistics, and turned over in one go.

What is the same for every row of a place (model, path, kind, slot) is written once, in a :class:`Site`; a row only
points to it. A flat list of plain values costs one ``extend`` a row, and gives the garbage collector nothing to do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tenterhook.recording.schema import CALLS, VALUES
from tenterhook.stats import GROUP_DIGEST, GROUP_SKETCH, GROUP_STATISTICS, SKETCH_SIZE, STATISTICS, RowBuffer

__all__ = ["CALL_ITEMS", "VALUE_ITEMS", "Site", "ValueBlock", "calls_batch"]

CALL_ITEMS: tuple[str, ...] = ("site", *(name for name in CALLS.names if name not in ("model", "path", "type")))
"""The order of the items of a row of calls."""

_MEASURED = (*STATISTICS, "sketch", "digest")
_OF_SITE = ("model", "path", "kind", "slot")
VALUE_ITEMS: tuple[str, ...] = ("row", "site", *(n for n in VALUES.names if n not in _MEASURED and n not in _OF_SITE))
"""The order of the items of a row of values: its number in the block, its site, then what is not measured."""

_NOTE = VALUE_ITEMS.index("note")


class Site:
    """What all rows of one place have in common; rows are told apart by the identity of their site."""

    __slots__ = ("kind", "model", "path", "slot", "type")

    def __init__(self, model: str, path: str, type: str, kind: str = "", slot: str = "") -> None:
        self.model = model
        self.path = path
        self.type = type
        self.kind = kind
        self.slot = slot


def _codes(values: Sequence[Hashable]) -> tuple[np.ndarray, list[Any]]:
    """Number the distinct values in the order in which they come."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) == 1:
        return np.zeros(len(values), np.int32), distinct
    numbers = {value: number for number, value in enumerate(distinct)}
    return np.fromiter(map(numbers.__getitem__, values), np.int32, len(values)), distinct


def _words(codes: np.ndarray, distinct: Sequence[str | None]) -> pa.Array:
    """Build a column of words, of which some may be equal or null, from their numbers."""
    inner, words = _codes(distinct)
    if words == [None]:
        return pa.nulls(len(codes), pa.dictionary(pa.int32(), pa.string()))
    indices, mask = inner[codes], None
    if None in words:
        at = words.index(None)
        mask = indices == at
        indices = indices - (indices > at)  # a new array: what is masked may hold any number
        indices[mask] = 0
        words.pop(at)
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32(), mask=mask), pa.array(words, pa.string()))


def _column(values: Sequence[Any], field: pa.Field) -> pa.Array:
    if pa.types.is_dictionary(field.type):
        return _words(*_codes(values))
    if pa.types.is_list(field.type):
        codes, distinct = _codes(values)
        return pa.array([None if shape is None else list(shape) for shape in distinct], field.type).take(
            pa.array(codes)
        )
    return pa.array(values, field.type)


def _arrays(cells: list[Any], items: tuple[str, ...], schema: pa.Schema, done: dict[str, pa.Array]) -> list[pa.Array]:
    width = len(items)
    codes, sites = _codes(cells[items.index("site") :: width])
    place = {name: at for at, name in enumerate(items)}
    return [
        done[field.name]
        if field.name in done
        else _column(cells[place[field.name] :: width], field)
        if field.name in place
        else _words(codes, [getattr(site, field.name) for site in sites])
        for field in schema
    ]


def calls_batch(cells: list[Any]) -> pa.RecordBatch:
    """Build a batch of the calls table from the items of its rows, in the order of ``CALL_ITEMS``."""
    return pa.record_batch(_arrays(cells, CALL_ITEMS, CALLS, {}), schema=CALLS)


class ValueBlock:
    """A block of ``capacity`` rows of the values table that is being filled.

    ``buffer`` holds what is measured, row by row; ``cells`` holds the rest, row after row in the order of
    ``VALUE_ITEMS``. A row whose items never arrived (an exception in between) is left out.
    """

    __slots__ = ("buffer", "capacity", "cells", "used")

    def __init__(self, capacity: int, *, sketch: bool, digest: bool = True) -> None:
        self.capacity = capacity
        self.buffer = RowBuffer(capacity, sketch=sketch, digest=digest)
        self.cells: list[Any] = []
        self.used = 0

    def batch(self) -> pa.RecordBatch:
        """Build the batch; the block is not to be used afterwards."""
        width = len(VALUE_ITEMS)
        taken = np.array(self.cells[::width], np.int64)
        if self.buffer.deferred:
            lost = self.buffer.settle()
            for at, row in enumerate(taken.tolist() if lost else ()):
                if row in lost:
                    self.cells[at * width + _NOTE] = lost[row]
        return pa.record_batch(_arrays(self.cells, VALUE_ITEMS, VALUES, self._measured(taken)), schema=VALUES)

    def _measured(self, taken: np.ndarray) -> dict[str, pa.Array]:
        buffer = self.buffer
        filled = buffer.valid[taken]
        statistics = np.ascontiguousarray(buffer.statistics[taken].T)
        arrays: dict[str, pa.Array] = {}
        no_statistics = (filled & GROUP_STATISTICS) == 0
        for name, figures in zip(STATISTICS, statistics, strict=True):
            null = no_statistics | np.isnan(figures)
            kind = VALUES.field(name).type
            if pa.types.is_integer(kind):
                arrays[name] = pa.array(np.where(null, 0, figures).astype(np.int64), kind, mask=null)
            else:
                arrays[name] = pa.array(figures, kind, mask=null)
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
