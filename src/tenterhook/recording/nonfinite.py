"""The first value that is not finite, found by the statistics that Parquet keeps of each group of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from tenterhook.errors import RecordingError
from tenterhook.recording.files import reading
from tenterhook.recording.schema import VALUES

pc: Any = pyarrow.compute  # its functions are made at import, out of a type checker's sight

__all__ = ["Found", "first_in_files", "first_in_rows"]

_COUNTS = ("nan_count", "posinf_count", "neginf_count")
_PLACE = ("step", "seq")


class Found(NamedTuple):
    """A row that counts something not finite.

    Attributes:
        step: its step.
        seq: number of its event.
        rank: the process that wrote it.
        row: the row, a table of the schema `VALUES`.
    """

    step: int
    seq: int
    rank: int
    row: pa.Table


class _Place(NamedTuple):
    step: int
    seq: int
    rank: int
    path: Path
    group: int
    at: int


def first_in_files(files: Mapping[Path, int]) -> Found | None:
    """Find the first row of Parquet parts that counts something not finite; groups without one are not read.

    Args:
        files: the parts, with their ranks.

    Raises:
        RecordingError: a part is damaged.
    """
    first: _Place | None = None
    for path, rank in files.items():
        with reading(path), pq.ParquetFile(str(path)) as file:
            for group, begins in _candidates(file):
                if first is not None and begins > first.step:
                    continue
                rows = file.read_row_group(group, columns=[*_PLACE, *_COUNTS], use_threads=False)
                at = _earliest(rows)
                if at is not None:
                    place = _Place(rows["step"][at].as_py(), rows["seq"][at].as_py(), rank, path, group, at)
                    first = place if first is None else min(first, place)
    if first is None:
        return None
    with reading(first.path), pq.ParquetFile(str(first.path)) as file:
        row = file.read_row_group(first.group, columns=VALUES.names, use_threads=False).slice(first.at, 1)
        row.validate(full=True)  # before its dictionaries are followed
        row = row.cast(VALUES).take(pa.array([0]))
    return Found(*first[:3], row)


def first_in_rows(rows: pa.Table, rank: int) -> Found | None:
    """Find the first such row of a table of the schema `VALUES`."""
    at = _earliest(rows)
    return None if at is None else Found(rows["step"][at].as_py(), rows["seq"][at].as_py(), rank, rows.slice(at, 1))


def _candidates(file: pq.ParquetFile) -> Iterator[tuple[int, int]]:
    """Give the groups of rows that may hold one, each with its first step (-1 where that is not known)."""
    meta = file.metadata
    leaves = {meta.schema.column(at).path: at for at in range(meta.num_columns)}
    if missing := [name for name in (*_PLACE, *_COUNTS) if name not in leaves]:
        raise RecordingError(f"it has no column {missing[0]}")
    for group in range(meta.num_row_groups):
        columns = meta.row_group(group)
        steps, *counts = (columns.column(leaves[name]).statistics for name in ("step", *_COUNTS))
        if any(count is None or not count.has_min_max or count.max > 0 for count in counts):
            yield group, steps.min if steps is not None and steps.has_min_max else -1


def _earliest(rows: pa.Table) -> int | None:
    bad = np.zeros(len(rows), bool)
    for name in _COUNTS:
        bad |= pc.greater(rows[name], 0).fill_null(False).to_numpy()
    places = np.flatnonzero(bad)
    if not len(places):
        return None
    if any(rows[name].null_count for name in _PLACE):
        raise RecordingError("the table values is damaged: it has rows without a step or a number")
    step, seq = (rows[name].to_numpy()[places] for name in _PLACE)
    return int(places[np.lexsort((seq, step))[0]])
