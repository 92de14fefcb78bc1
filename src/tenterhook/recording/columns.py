"""Arrow columns from whole numbers: those of a block's rows, the words and lists that they stand for, what was measured."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tenterhook.recording.schema import VALUES
from tenterhook.stats import GROUP_DIGEST, GROUP_SKETCH, GROUP_STATISTICS, SKETCH_SIZE, STATISTICS, RowBuffer

__all__ = ["NONE", "SiteWords", "column", "measured_columns", "used"]

NONE = -1
"""Stands for None: all numbers of a row are 0 or more."""


# All arrays are made from buffers: `pa.array` brings pandas in where that is installed, a fifth of a second of work in the first
# flush, for which the run waits.


def _numbers(values: np.ndarray, kind: pa.DataType, null: np.ndarray | None = None) -> pa.Array:
    """Build an array of numbers, which share the memory of `values`; `null` says where there is none."""
    some = null is not None and bool(null.any())
    valid = pa.py_buffer(np.packbits(~null, bitorder="little")) if some and null is not None else None
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(np.ascontiguousarray(values))])


def _truths(values: np.ndarray) -> pa.Array:
    """Build an array of truth values."""
    packed = pa.py_buffer(np.packbits(values, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, packed])


def _texts(words: Sequence[str]) -> pa.Array:
    """Build an array of text."""
    encoded = [word.encode() for word in words]
    offsets = np.zeros(len(words) + 1, np.int32)
    np.cumsum([len(word) for word in encoded], dtype=np.int32, out=offsets[1:])
    return pa.Array.from_buffers(
        pa.string(), len(words), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    )


def _codes(values: Sequence[Hashable]) -> tuple[np.ndarray, list[Any]]:
    """Number the distinct values in the order in which they come."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) == 1:
        return np.zeros(len(values), np.int32), distinct
    numbers = {value: number for number, value in enumerate(distinct)}
    return np.fromiter(map(numbers.__getitem__, values), np.int32, len(values)), distinct


class _Words:
    """Words by number, of which some may be equal or null."""

    __slots__ = ("_none", "_numbers", "_words")

    def __init__(self, distinct: Sequence[str | None]) -> None:
        numbers, words = _codes(distinct)
        self._none: np.ndarray | None = None  # by number: whether there is no word
        if None in words:
            at = words.index(None)
            self._none = none = numbers == at
            numbers = np.where(none, 0, numbers - (numbers > at)).astype(np.int32)  # what is masked may hold any
            words.pop(at)
        self._numbers = numbers
        self._words = _texts(words)

    def column(self, codes: np.ndarray) -> pa.Array:
        """Build the column of the words with these numbers."""
        if not len(self._words):
            return pa.nulls(len(codes), pa.dictionary(pa.int32(), pa.string()))
        mask = None if self._none is None else self._none[codes]
        return pa.DictionaryArray.from_arrays(_numbers(self._numbers[codes], pa.int32(), mask), self._words)


class SiteWords:
    """The words of sites, kept for the next block: mostly that is of the same sites."""

    __slots__ = ("_known", "_sites")

    def __init__(self) -> None:
        self._sites: list[Any] = []
        self._known: dict[str, _Words] = {}

    def column(self, name: str, codes: np.ndarray, sites: list[Any]) -> pa.Array:
        """Build the column of an attribute of the sites with these numbers."""
        if sites != self._sites:
            self._sites, self._known = sites, {}
        words = self._known.get(name)
        if words is None:
            words = self._known[name] = _Words([getattr(site, name) for site in sites])
        return words.column(codes)


def used(codes: np.ndarray, objects: Sequence[Any]) -> tuple[np.ndarray, list[Any]]:
    """Number anew the objects that occur; -1 stands for None."""
    seen = np.zeros(len(objects) + 1, bool)
    seen[codes] = True
    places = np.flatnonzero(seen)
    renumbered = np.empty(len(objects) + 1, np.int32)
    renumbered[places] = np.arange(len(places), dtype=np.int32)
    found: list[Any] = list(map((*objects, None).__getitem__, places.tolist()))
    return renumbered[codes], found


def _lists(codes: np.ndarray, distinct: Sequence[tuple[int, ...] | None], kind: pa.DataType) -> pa.Array:
    """Build a column of lists of whole numbers."""
    sizes = np.array([len(value or ()) for value in distinct], np.int32)
    items = np.array([item for value in distinct for item in value or ()], np.int64)
    starts = np.cumsum(sizes, dtype=np.int32) - sizes
    offsets = np.zeros(len(codes) + 1, np.int32)
    np.cumsum(sizes[codes], out=offsets[1:])
    at = np.arange(offsets[-1]) + np.repeat(starts[codes] - offsets[:-1], sizes[codes])
    mask = _truths(np.array([value is None for value in distinct])[codes]) if None in distinct else None
    listed = _numbers(items[at], pa.int64())
    return pa.ListArray.from_arrays(_numbers(offsets, pa.int32()), listed, type=kind, mask=mask)


def column(cells: np.ndarray, field: pa.Field, objects: Sequence[Any]) -> pa.Array:
    """Build the column of a field from a block's numbers, which are codes of objects where the field is not one of numbers."""
    if pa.types.is_integer(field.type):
        return _numbers(cells.astype(str(field.type)), field.type, cells == NONE)
    codes, distinct = used(cells, objects)
    if distinct == [None]:
        return pa.nulls(len(codes), field.type)
    if pa.types.is_dictionary(field.type):
        return _Words(distinct).column(codes)
    if pa.types.is_list(field.type):
        return _lists(codes, distinct, field.type)
    null = np.array([value is None for value in distinct])[codes]
    texts = _texts([value or "" for value in distinct])
    taken = pa.DictionaryArray.from_arrays(_numbers(codes, pa.int32(), null), texts)
    return taken.cast(field.type)


def measured_columns(buffer: RowBuffer, rows: np.ndarray) -> dict[str, pa.Array]:
    """Build the columns of what was measured in these rows of a buffer, which is not to be used afterwards."""
    count = len(rows)
    filled = buffer.valid[rows]
    if not filled.any():
        return {name: pa.nulls(count, VALUES.field(name).type) for name in (*STATISTICS, "sketch", "digest")}
    # A copy less, where the columns do not keep much more memory than they need.
    whole = 2 * count >= len(buffer.valid) and np.array_equal(rows, np.arange(count))
    statistics = np.ascontiguousarray((buffer.statistics[:count] if whole else buffer.statistics[rows]).T)
    null = np.isnan(statistics) | ((filled & GROUP_STATISTICS) == 0)
    some_null = null.any(axis=1).tolist()
    arrays: dict[str, pa.Array] = {}
    for at, name in enumerate(STATISTICS):
        kind = VALUES.field(name).type
        figures = statistics[at]
        if pa.types.is_integer(kind):
            figures = (np.where(null[at], 0, figures) if some_null[at] else figures).astype(np.int64)
        arrays[name] = _numbers(figures, kind, null[at] if some_null[at] else None)
    arrays["sketch"] = _sketches(buffer.sketches[:count] if whole else buffer.sketches[rows], filled)
    no_digest = (filled & GROUP_DIGEST) == 0
    arrays["digest"] = (
        pa.nulls(count, pa.uint64()) if no_digest.all() else _numbers(buffer.digests[rows], pa.uint64(), no_digest)
    )
    return arrays


def _sketches(sketches: np.ndarray, filled: np.ndarray) -> pa.Array:
    missing = (filled & GROUP_SKETCH) == 0
    if missing.all():
        return pa.nulls(len(filled), VALUES.field("sketch").type)
    mask = _truths(missing) if missing.any() else None
    flat = _numbers(sketches.reshape(-1), pa.float32())
    return pa.FixedSizeListArray.from_arrays(flat, SKETCH_SIZE, mask=mask)
