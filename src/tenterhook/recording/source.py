"""Where a `Recording` takes its rows from: the right side of a recording, in memory or on disk alike."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from tenterhook.recording.manifest import Manifest
from tenterhook.recording.schema import CALLS, MODULES, VALUES

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = [
    "RANK",
    "TABLES",
    "WRITTEN",
    "Filters",
    "Module",
    "Source",
    "filtered",
    "no_rows",
    "read_schema",
    "table_of_rows",
    "with_rank",
]

WRITTEN = {"calls": CALLS, "values": VALUES, "modules": MODULES}
"""The schemas in which the tables are written."""

TABLES = tuple(WRITTEN)

RANK = pa.field("rank", pa.int32(), nullable=False)
"""The column that reading adds to `calls` and `values`."""

Module = tuple["str | None", "str | None"]
"""The name of an outermost module, and the path of a module in it."""

Filters = dict[str, "str | int | None"]
"""Column -> the value it must have."""


class Source(Protocol):
    """Rows and tensors of one recording."""

    @property
    def manifest(self) -> Manifest:
        """The manifest as it stands."""
        ...

    @property
    def path(self) -> Path | None:
        """The directory; None in memory."""
        ...

    @property
    def ranks(self) -> list[int]:
        """The processes that wrote it."""
        ...

    @property
    def notes(self) -> list[str]:
        """What could not be read of what was read so far, as sentences."""
        ...

    @property
    def version(self) -> int:
        """Changes whenever rows have come in: what was read before is then out of date."""
        ...

    def table(self, name: str, columns: list[str] | None = None, filters: Filters | None = None) -> pa.Table:
        """Give the rows of a table, with the column `rank` in `calls` and `values`."""
        ...

    def module_rows(self, name: str, module: Module, mark: Any) -> tuple[pa.Table, Any]:
        """Give the rows of one module in `calls` or `values` that have come since a mark, and the new mark.

        Args:
            name: the table.
            module: the module.
            mark: what an earlier call gave; None for all rows.
        """
        ...

    def seen(self) -> list[Module]:
        """Give the modules that have rows in `calls`, in the order in which they were met."""
        ...

    def steps(self) -> list[int]:
        """Give the steps of which there are rows, in order."""
        ...

    def first_nonfinite(self) -> dict[str, Any] | None:
        """Give the first row of `values`, by step, event and rank, that counts a NaN or an infinity; None without one."""
        ...

    def has_tensor(self, key: str, rank: int) -> bool:
        """Say whether a tensor is stored."""
        ...

    def tensor(self, key: str, rank: int, *, own: bool = True) -> Any:
        """Give a stored tensor.

        Raises:
            NotRecordedError: it was not stored.
        """
        ...

    def connect(self) -> DuckDBPyConnection:
        """Give a database with the views `calls`, `values` and `modules` that can read nothing else."""
        ...


def read_schema(name: str) -> pa.Schema:
    """Give the schema in which a table is read: that in which it is written, and `rank`."""
    return WRITTEN[name] if name == "modules" else WRITTEN[name].append(RANK)


def with_rank(table: pa.Table, rank: int) -> pa.Table:
    """Add the column `rank` to a table as it is written."""
    # From a buffer: pyarrow imports pandas, a fifth of a second, to make a scalar or an array of anything else.
    ranks = pa.py_buffer(np.full(len(table), rank, np.int32))
    return table.append_column(RANK, pa.Array.from_buffers(pa.int32(), len(table), [None, ranks]))


def no_rows(schema: pa.Schema) -> pa.Table:
    """Give a table without rows; `pa.Schema.empty_table` imports pandas."""
    return pa.Table.from_batches([], schema)


def table_of_rows(rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Build a table from rows of plain values; `pa.Table.from_pylist` imports pandas."""
    lines = "\n".join(map(json.dumps, rows)).encode()
    if not lines:
        return no_rows(schema)
    read = pj.read_json(
        io.BytesIO(lines),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(lines) + 1),
        parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error"),
    )
    return read.cast(schema)  # which says where there is no null


def filtered(table: pa.Table, columns: list[str] | None, filters: Filters | None) -> pa.Table:
    """Give the rows whose columns have the values in `filters`, and of them `columns`."""
    for name, wanted in (filters or {}).items():
        column = pc.field(name)
        if pa.types.is_dictionary(table.schema.field(name).type):
            column = column.cast(pa.string())
        table = table.filter(column.is_null() if wanted is None else column == wanted)
    return table if columns is None else table.select(columns)
