"""From events to Arrow batches: rows are gathered as whole numbers beside a block of statistics, and turned over in one go.

What is the same for every row of a place (model, path, kind, slot) is written once, in a :class:`Site`; a row only
points to it, as to all that is no number. So a row costs a few bytes, and gives the garbage collector nothing to do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tenterhook.native import NATIVE
from tenterhook.recording.columns import NONE, SiteWords, column, measured_columns, used
from tenterhook.recording.schema import CALLS, VALUES
from tenterhook.stats import STATISTICS, RowBuffer

__all__ = ["CALL_ITEMS", "VALUE_ITEMS", "CallBlock", "RowTable", "Site", "ValueBlock"]

_MOST_OBJECTS = 32768  # that one block takes over from another: what is new in each row must not pile up

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


def _arrays(
    cells: np.ndarray,
    objects: list[Any],
    items: tuple[str, ...],
    schema: pa.Schema,
    words: SiteWords,
    done: dict[str, pa.Array] | None = None,
) -> list[pa.Array]:
    columns = dict(zip(items, np.ascontiguousarray(cells.T), strict=True))
    codes, sites = used(columns["site"], objects)
    return [
        done[field.name]
        if done and field.name in done
        else column(columns[field.name], field, objects)
        if field.name in columns
        else words.column(field.name, codes, sites)
        for field in schema
    ]


class RowTable:
    """Rows of whole numbers in memory of somebody else's: other objects go by their code, None by -1.

    What the native path has a type of its own for. ``after`` is a table whose codes this one goes on with.
    """

    __slots__ = ("_codes", "_memory", "capacity", "objects", "reserved", "used")

    def __init__(self, memory: np.ndarray, after: RowTable | None = None) -> None:
        self._memory = memory
        self._codes: dict[Any, int] = {} if after is None else after._codes
        self.capacity = len(memory)
        self.objects: list[Any] = [] if after is None else after.objects  # code -> object
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
                cells.append(NONE)
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


def _table(memory: np.ndarray, after: Any) -> Any:
    if after is not None and len(after.objects) > _MOST_OBJECTS:
        after = None
    if NATIVE is None:
        return RowTable(memory, after)
    return NATIVE.Table(memory.__array_interface__["data"][0], *memory.shape, memory, after)


class CallBlock:
    """A block of ``capacity`` rows of the calls table that is being filled; rows are tuples in the order of ``CALL_ITEMS``.

    ``after`` is the block before it, from which it takes over what is known of the objects in its rows.
    """

    __slots__ = ("_memory", "_words", "table")

    def __init__(self, capacity: int, after: CallBlock | None = None) -> None:
        self._memory = np.empty((capacity, len(CALL_ITEMS)), np.int64)
        self._words = SiteWords() if after is None else after._words
        self.table = _table(self._memory, None if after is None else after.table)

    def batch(self) -> pa.RecordBatch:
        """Build the batch; the block is not to be used afterwards."""
        cells = self._memory[: self.table.used]
        objects = self.table.objects[:]  # the next block goes on with them
        return pa.record_batch(_arrays(cells, objects, CALL_ITEMS, CALLS, self._words), schema=CALLS)


class ValueBlock:
    """A block of ``capacity`` rows of the values table that is being filled.

    ``buffer`` holds what is measured, row by row; ``table`` holds the rest, tuples in the order of ``VALUE_ITEMS``, and counts
    the rows of the buffer that are spoken for. A row whose tuple never arrived (an exception in between) is left out.
    ``after`` is the block before it, from which it takes over what is known of the objects in its rows.
    """

    __slots__ = ("_memory", "_words", "buffer", "table")

    def __init__(self, capacity: int, *, sketch: bool, digest: bool = True, after: ValueBlock | None = None) -> None:
        self.buffer = RowBuffer(capacity, sketch=sketch, digest=digest)
        self._memory = np.empty((capacity, len(VALUE_ITEMS)), np.int64)
        self._words = SiteWords() if after is None else after._words
        self.table = _table(self._memory, None if after is None else after.table)

    def batch(self) -> pa.RecordBatch:
        """Build the batch; the block is not to be used afterwards."""
        cells = self._memory[: self.table.used]
        objects = self.table.objects[:]
        if self.buffer.deferred and (lost := self.buffer.settle()):
            rows = {row: at for at, row in enumerate(cells[:, 0].tolist())}
            for row, why in lost.items():
                if row in rows:
                    cells[rows[row], _NOTE] = len(objects)
                    objects.append(why)
        done = measured_columns(self.buffer, cells[:, 0])
        return pa.record_batch(_arrays(cells, objects, VALUE_ITEMS, VALUES, self._words, done), schema=VALUES)
