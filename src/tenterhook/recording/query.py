"""SQL over a recording: DuckDB, shut off from everything but the recording's own files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from tenterhook.errors import RecordingError
from tenterhook.recording.files import first_line

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["lock", "make_view", "new_connection", "quote", "run"]

MEMORY_LIMIT = "2GB"


def new_connection() -> DuckDBPyConnection:
    """Open an empty database in memory that spills to the temporary directory beyond 2 GB."""
    import duckdb  # noqa: PLC0415 - a tenth of a second that only queries need

    connection = duckdb.connect(":memory:")
    connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
    connection.execute(f"SET temp_directory = {quote(tempfile.gettempdir() + '/tenterhook-spill')}")
    return connection


def lock(connection: DuckDBPyConnection, files: list[Path]) -> None:
    """Forbid all but reading `files`: other files, the network, extensions, Python's variables, and undoing this."""
    if files:
        connection.execute(f"SET allowed_paths = [{', '.join(quote(str(file)) for file in files)}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET lock_configuration = true")


def quote(text: str) -> str:
    """Write a string as SQL."""
    return "'" + text.replace("'", "''") + "'"


def run(connection: DuckDBPyConnection, sql: str) -> pa.Table:
    """Answer one SELECT.

    Raises:
        RecordingError: it is not one SELECT, or DuckDB refuses it (its own words are kept).
    """
    import duckdb  # noqa: PLC0415 - as above

    try:
        statements = connection.extract_statements(sql)
        # An allowed file may be written as well as read, so only questions are let through.
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise RecordingError(
                "a query is one SELECT over the tables calls, values and modules; a recording is never written to"
            )
        relation = connection.sql(sql)
        return relation.to_arrow_table() if relation is not None else pa.table({})
    except duckdb.Error as error:
        raise RecordingError(f"the query failed: {error}") from error


def make_view(connection: DuckDBPyConnection, name: str, files: list[Path], loose: pa.Table) -> None:
    """Make a view over Parquet files, whose folders say the rank, and over rows that are not in Parquet yet.

    Args:
        connection: an open database, not yet locked.
        name: name of the view.
        files: Parquet files in folders `rank-00000`.
        loose: rows with the column `rank`.

    Raises:
        RecordingError: a file is damaged.
    """
    connection.register(f"{name}_loose", loose)
    if not files:
        connection.execute(f'CREATE VIEW "{name}" AS SELECT * FROM {name}_loose')
        return
    listed = ", ".join(quote(str(file)) for file in files)
    rank = r"CAST(regexp_extract(filename, '.*rank-(\d+)[/\\][^/\\]*$', 1) AS INTEGER) AS rank"
    parts = f"SELECT * EXCLUDE (filename), {rank} FROM read_parquet([{listed}], filename = true)"
    if len(loose):
        parts += f" UNION ALL BY NAME SELECT * FROM {name}_loose"
    import duckdb  # noqa: PLC0415 - as above

    try:
        connection.execute(f'CREATE VIEW "{name}" AS {parts}')
    except duckdb.Error as error:  # it reads the first file's table of contents at once
        raise RecordingError(f"a file of the table {name} is damaged: {first_line(error)}") from error
