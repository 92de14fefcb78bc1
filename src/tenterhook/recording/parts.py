"""One file of a table: a Parquet part, or the whole batches of a stream; what is damaged is refused in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tenterhook.errors import RecordingError
from tenterhook.recording.files import first_line, plain_file, reading
from tenterhook.recording.source import WRITTEN, Filters, no_rows

__all__ = ["MAX_ROWS", "check_ends", "parquet_rows", "read_part", "small_table", "stream_rows"]

MAX_ROWS = 1 << 24
"""Rows that a part may have; ours have less than a million."""


def read_part(path: Path, name: str) -> pa.Table:
    """Read one file of a table: Parquet, or what is whole of a stream.

    Raises:
        RecordingError: it is damaged.
    """
    if path.suffix == ".arrows":
        return stream_rows(path, name)
    check_ends(path)
    return parquet_rows(path, name, None, None)


def check_ends(path: Path) -> None:
    """Refuse a Parquet file that is truncated.

    Raises:
        RecordingError: it does not begin and end as Parquet does.
    """
    # Parquet keeps its table of contents at the end: a truncated file is known by it without being read.
    with reading(path), plain_file(path).open("rb") as file:
        start = file.read(4)
        file.seek(-min(4, path.stat().st_size), os.SEEK_END)
        if start != b"PAR1" or file.read(4) != b"PAR1":
            raise RecordingError(
                f"{path} is truncated or is not Parquet; the other files of the recording may still be whole"
            )


def parquet_rows(path: Path, name: str, columns: list[str] | None, filters: Filters | None) -> pa.Table:
    """Read the rows of a Parquet part whose columns have the values in `filters`, and of them `columns`.

    Raises:
        RecordingError: it is damaged.
    """
    import pyarrow.dataset as ds  # noqa: PLC0415 - it brings pandas in where that is installed, a fifth of a second

    schema = WRITTEN[name]
    with reading(path):
        source = ds.dataset(str(path), schema=schema, format="parquet")
        part = next(iter(source.get_fragments()))
        if part.metadata.num_rows > MAX_ROWS:
            raise RecordingError(
                f"{path} is damaged: it declares {part.metadata.num_rows} rows, which no part of ours has"
            )
        present = set(part.physical_schema.names)
        if missing := [column for column in schema.names if column not in present]:
            raise RecordingError(f"{path} is damaged or not a recording's: it has no column {missing[0]}")
        needed = None if columns is None else list(dict.fromkeys([*columns, *(filters or {})]))
        condition = None
        for column, wanted in (filters or {}).items():
            test = ds.field(column).is_null() if wanted is None else ds.field(column) == wanted
            condition = test if condition is None else condition & test
        table = source.to_table(columns=needed, filter=condition)
        for column in table.column_names:
            if not schema.field(column).nullable and table[column].null_count:
                raise RecordingError(f"{path} is damaged: its column {column} has rows without a value")
            _check(table[column])
        return table if columns is None else table.select(columns)


def small_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a Parquet file that is no part of `calls` or `values` and small beside them: modules, the index of tensors.

    Raises:
        RecordingError: it is damaged, or lacks a column.
    """
    # Not by read_table, which would import pyarrow.dataset.
    with reading(path), pq.ParquetFile(str(plain_file(path))) as file:
        if missing := [name for name in schema.names if name not in file.schema_arrow.names]:
            raise RecordingError(f"{path} is damaged or not a recording's: it has no column {missing[0]}")
        table = file.read(columns=schema.names).select(schema.names).cast(schema)
        table.validate(full=True)  # text included: Parquet's reader hands damaged bytes on as they are
        return table


def _check(column: pa.ChunkedArray) -> None:
    """Refuse text that is none and words that are in no dictionary: Parquet's reader hands damaged bytes on as they are."""
    column.validate(full=True)
    if pa.types.is_dictionary(column.type):
        for chunk in column.chunks:
            chunk.dictionary.validate(full=True)


def stream_rows(path: Path, name: str, notes: dict[str, str] | None = None) -> pa.Table:
    """Read the complete batches of a stream; what follows them was cut off, or is being written, and is noted."""
    schema = WRITTEN[name]
    batches: list[pa.RecordBatch] = []
    size = plain_file(path).stat().st_size
    good = 0
    if size:
        # Mapped, so that a declared size is compared with the file and never allocated.
        with reading(path), pa.memory_map(str(path)) as file:
            try:
                reader = pa.ipc.open_stream(file)
                if reader.schema.names != schema.names:
                    raise RecordingError(f"{path} is damaged: its columns are not those of {name}")
                while True:
                    good = file.tell()
                    batch = reader.read_next_batch()
                    batch.validate(full=True)
                    batches.append(batch)
            except StopIteration:
                good = size
            except (pa.ArrowException, OSError) as error:
                _note(notes, path, f"its last {size - good} of {size} bytes hold no whole batch ({first_line(error)})")
    with reading(path):
        table = pa.Table.from_batches(batches, batches[0].schema) if batches else no_rows(schema)
        return table.unify_dictionaries().cast(schema)


def _note(notes: dict[str, str] | None, path: Path, words: str) -> None:
    if notes is not None:
        notes[str(path)] = f"{path.name}: {words}"
