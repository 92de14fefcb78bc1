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

__all__ = ["lock", "make_merged", "make_view", "new_connection", "quote", "run"]

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
                "a query is one SELECT over the tables calls, values, modules and merged; a recording is never written to"
            )
        relation = connection.sql(sql)
        answer = relation.to_arrow_table() if relation is not None else pa.table({})
        answer.validate(full=True)  # it hands damaged text on as it finds it
        return answer
    except duckdb.Error as error:
        raise RecordingError(f"the query failed: {error}") from error
    except pa.ArrowInvalid as error:
        raise RecordingError(f"the query met a damaged file: {first_line(error)}") from error


_MERGED = """
CREATE VIEW merged AS
WITH parts AS (
    SELECT DISTINCT ON (step, model, path, kind, slot, call, phase, pass, shard, numel = 0) *,
        numel - nan_count - posinf_count - neginf_count AS weight
    FROM values WHERE shard IS NOT NULL ORDER BY rank, seq
), centred AS (
    SELECT *, sum(weight * mean) OVER place / nullif(sum(weight) OVER place, 0) AS centre
    FROM parts WINDOW place AS (PARTITION BY step, model, path, kind, slot, call, phase, pass)
), summed AS (
    SELECT step, model, path, kind, slot, call, phase, pass, arg_min(shape, (rank, seq)) AS shape,
        arg_min(dtype, (rank, seq)) AS dtype, arg_min(device, (rank, seq)) AS device,
        sum(numel)::BIGINT AS numel, min(min) AS min, max(max) AS max, any_value(centre) AS mean,
        sqrt(sum(weight * (std * std + (mean - centre) ** 2)) / nullif(sum(weight), 0)) AS std,
        sqrt(sum(weight * rms * rms) / nullif(sum(weight), 0)) AS rms, max(absmax) AS absmax,
        sum(nan_count)::BIGINT AS nan_count, sum(posinf_count)::BIGINT AS posinf_count,
        sum(neginf_count)::BIGINT AS neginf_count, sum(zero_count)::BIGINT AS zero_count,
        list(sketch) FILTER (sketch IS NOT NULL) AS sketches, bool_or(sketch IS NULL AND numel > 0) AS lacking,
        any_value(note) FILTER (sketch IS NULL AND numel > 0) AS why
    FROM centred GROUP BY step, model, path, kind, slot, call, phase, pass
), holders AS (
    SELECT step, model, path, kind, slot, call, phase, pass, list(DISTINCT rank ORDER BY rank) AS ranks
    FROM values WHERE shard IS NOT NULL GROUP BY ALL
)
SELECT step, model, path, kind, slot, call, phase, pass, shape, dtype, device, numel, min, max, mean, std, rms, absmax,
    nan_count, posinf_count, neginf_count, zero_count,
    CASE WHEN sketches IS NOT NULL AND NOT coalesce(lacking, false) AND numel = list_product(shape)
        THEN [list_sum([one[place] for one in sketches]) for place in range(1, 65)] END::FLOAT[64] AS sketch,
    NULL::UBIGINT AS digest,
    CASE WHEN numel <> list_product(shape)
        THEN numel || ' of ' || list_product(shape)::BIGINT || ' elements: the shards of other ranks are missing'
        ELSE why END AS note, ranks
FROM summed NATURAL JOIN holders
UNION ALL BY NAME
SELECT * EXCLUDE (seq, call_seq, shard, tensor, rank), [rank] AS ranks FROM values WHERE shard IS NULL
"""


def make_merged(connection: DuckDBPyConnection) -> None:
    """Make the view `merged`: `values` with one row for each tensor that is spread over ranks, as `Recording.merged` gives."""
    connection.execute(_MERGED)


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
