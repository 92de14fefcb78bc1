"""From events to Arrow batches: rows are gathered as whole numbers beside a block of statistics, and turned over in one go.

What is the same for every row of a place (model, path, kind, slot) is written once, in a :class:`Site`; a row only
points to it, as to all that is no number. So a row costs a few bytes, and gives the garbage collector nothing to do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tenterhook.native import NATIVE
from tenterhook.recording.schema import CALLS, VALUES
from tenterhook.stats import GROUP_DIGEST, GROUP_SKETCH, GROUP_STATISTICS, SKETCH_SIZE, STATISTICS, RowBuffer

__all__ = ["CALL_ITEMS", "VALUE_ITEMS", "CallBlock", "RowTable", "Site", "ValueBlock"]

_NONE = -1  # stands for None: all numbers of a row are 0 or more

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


def _used(codes: np.ndarray, objects: Sequence[Any]) -> tuple[np.ndarray, list[Any]]:
    """Number anew the objects that occur; -1 stands for None."""
    seen = np.zeros(len(objects) + 1, bool)
    seen[codes] = True
    places = np.flatnonzero(seen)
    renumbered = np.empty(len(objects) + 1, np.int32)
    renumbered[places] = np.arange(len(places), dtype=np.int32)
    return renumbered[codes], [objects[place] if place < len(objects) else None for place in places.tolist()]


def _column(cells: np.ndarray, field: pa.Field, objects: Sequence[Any]) -> pa.Array:
    if pa.types.is_integer(field.type):
        null = cells == _NONE
        return pa.array(cells.astype(str(field.type)), field.type, mask=null if null.any() else None)
    codes, distinct = _used(cells, objects)
    if pa.types.is_dictionary(field.type):
        return _words(codes, distinct)
    if distinct == [None]:
        return pa.nulls(len(codes), field.type)
    values = [list(value) if isinstance(value, tuple) else value for value in distinct]
    return pa.array(values, field.type).take(pa.array(codes))


def _arrays(
    cells: np.ndarray, objects: Sequence[Any], items: tuple[str, ...], schema: pa.Schema, done: dict[str, pa.Array]
) -> list[pa.Array]:
    columns = dict(zip(items, np.ascontiguousarray(cells.T), strict=True))
    codes, sites = _used(columns["site"], objects)
    return [
        done[field.name]
        if field.name in done
        else _column(columns[field.name], field, objects)
        if field.name in columns
        else _words(codes, [getattr(site, field.name) for site in sites])
        for field in schema
    ]


class RowTable:
    """Rows of whole numbers in memory of somebody else's: other objects go by their code, None by -1.

    What the native path has a type of its own for.
    """

    __slots__ = ("_codes", "_memory", "capacity", "objects", "reserved", "used")

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._codes: dict[Any, int] = {}
        self.capacity = len(memory)
        self.objects: list[Any] = []  # code -> object
        self.reserved = 0  # rows of a block beside it that are spoken for
        self.used = 0

    def reserve(self) -> int:
        """Take the next row of the block beside it, -1 where there is none left."""
        if self.reserved >= self.capacity:
            return -1
        self.reserved += 1
        return self.reserved - 1

    def add(self, row: tuple[Any, ...]) -> bool:
        """Add a row; False where there is no room."""
        if self.used >= self.capacity:
            return False
        codes = self._codes
        cells: list[int] = []
        for item in row:
            if item is None:
                cells.append(_NONE)
            elif isinstance(item, int):
                cells.append(item)
            else:
                code = codes.get(item)
                if code is None:
                    code = codes[item] = len(self.objects)
                    self.objects.append(item)
                cells.append(code)
        self._memory[self.used] = cells
        self.used += 1
        return True


def _table(memory: np.ndarray) -> Any:
    if NATIVE is None:
        return RowTable(memory)
    return NATIVE.Table(memory.__array_interface__["data"][0], *memory.shape, memory)


class CallBlock:
    """A block of ``capacity`` rows of the calls table that is being filled; rows are tuples in the order of ``CALL_ITEMS``."""

    __slots__ = ("_memory", "table")

    def __init__(self, capacity: int) -> None:
        self._memory = np.empty((capacity, len(CALL_ITEMS)), np.int64)
        self.table = _table(self._memory)

    def batch(self) -> pa.RecordBatch:
        """Build the batch; the block is not to be used afterwards."""
        cells = self._memory[: self.table.used]
        return pa.record_batch(_arrays(cells, self.table.objects, CALL_ITEMS, CALLS, {}), schema=CALLS)


class ValueBlock:
    """A block of ``capacity`` rows of the values table that is being filled.

    ``buffer`` holds what is measured, row by row; ``table`` holds the rest, tuples in the order of ``VALUE_ITEMS``, and counts
    the rows of the buffer that are spoken for. A row whose tuple never arrived (an exception in between) is left out.
    """

    __slots__ = ("_memory", "buffer", "table")

    def __init__(self, capacity: int, *, sketch: bool, digest: bool = True) -> None:
        self.buffer = RowBuffer(capacity, sketch=sketch, digest=digest)
        self._memory = np.empty((capacity, len(VALUE_ITEMS)), np.int64)
        self.table = _table(self._memory)

    def batch(self) -> pa.RecordBatch:
        """Build the batch; the block is not to be used afterwards."""
        cells = self._memory[: self.table.used]
        objects = self.table.objects
        if self.buffer.deferred and (lost := self.buffer.settle()):
            rows = {row: at for at, row in enumerate(cells[:, 0].tolist())}
            for row, why in lost.items():
                if row in rows:
                    cells[rows[row], _NOTE] = len(objects)
                    objects = [*objects, why]
        return pa.record_batch(_arrays(cells, objects, VALUE_ITEMS, VALUES, self._measured(cells[:, 0])), schema=VALUES)

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
