"""Rows on their way to disk: an Arrow stream that is readable up to its last batch, rolled into Parquet parts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tenterhook.recording.schema import MODULES

__all__ = ["MODULES_NAME", "RowWriter", "compact", "parquet_options", "part_name", "write_modules"]

MODULES_NAME = "modules.parquet"

ROLL_BYTES = 96 << 20
ROW_GROUP = 16 << 10
_SMALL_BATCH = 1024  # rows; what readers do for each batch is paid for by so many
_PART_WIDTH = 5


def part_name(table: str, number: int, suffix: str) -> str:
    """Give the name of a part: `values-00003.parquet`."""
    return f"{table}-{number:0{_PART_WIDTH}d}.{suffix}"


class RowWriter:
    """Writes one table of one rank: to a stream, and in another thread each stream of `roll_bytes` to Parquet.

    A batch is in the file when `append` returns. Nothing is held back in this process, so a killed process loses
    nothing of it, and a forked child that exits writes nothing.

    Attributes:
        rows: rows in all parts.
    """

    def __init__(
        self,
        folder: Path,
        table: str,
        schema: pa.Schema,
        compactor: ThreadPoolExecutor,
        *,
        roll_bytes: int = ROLL_BYTES,
        number: int = 0,
    ):
        self.rows = 0
        self._folder = folder
        self._table = table
        self._schema = schema
        self._compactor = compactor
        self._roll_bytes = roll_bytes
        self._number = number
        self._rolled: list[Future[None]] = []
        self._open()

    def append(self, batches: Sequence[pa.RecordBatch]) -> int:
        """Write batches, small ones as one, with one dictionary for each column. Gives the bytes written."""
        # Each call into Arrow gives the interpreter away and takes it from the run again: as few as will do.
        table = pa.Table.from_batches(batches, self._schema)
        if len(batches) > 1:
            table = table.unify_dictionaries()
            if len(table) < len(batches) * _SMALL_BATCH:
                table = table.combine_chunks()
        self._stream.write_table(table)
        self.rows += len(table)
        before, self._size = self._size, self._file.tell()
        written = self._size - before
        if self._size >= self._roll_bytes:
            self.roll()
        return written

    def roll(self) -> None:
        """End this stream, have it compacted, begin the next. Waits while another is being compacted."""
        self._shut()
        self._wait(leave=1)
        self._compact_later()
        self._number += 1
        self._open()

    def stop(self) -> None:
        """Leave the files as they are: for a disk that takes no more."""
        for part in (self._stream, self._file):
            try:
                part.close()
            except (OSError, pa.ArrowException):
                continue  # the end mark did not fit; readers do without it

    def close(self) -> None:
        """Finish: all rows are in Parquet, the streams are gone."""
        self._shut()
        self._compact_later()
        self._wait(leave=0)

    def _compact_later(self) -> None:
        source = self._folder / part_name(self._table, self._number, "arrows")
        try:
            self._rolled.append(self._compactor.submit(compact, source, source.with_suffix(".parquet")))
        except RuntimeError:  # the interpreter is on its way out and gives no more threads
            compact(source, source.with_suffix(".parquet"))

    def _wait(self, leave: int) -> None:
        while len(self._rolled) > leave:
            self._rolled.pop(0).result()

    def _open(self) -> None:
        self._file = pa.OSFile(str(self._folder / part_name(self._table, self._number, "arrows")), "wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        self._size = self._file.tell()

    def _shut(self) -> None:
        self._stream.close()
        self._file.close()


def compact(source: Path, target: Path) -> None:
    """Turn a stream into Parquet, published by rename, and remove it. An empty one after the first leaves nothing."""
    with pa.memory_map(str(source)) as file, pa.ipc.open_stream(file) as reader:
        table = reader.read_all().unify_dictionaries()
    if len(table) or source.stem.endswith("-" + "0" * _PART_WIDTH):
        draft = target.with_name(target.name + ".tmp")
        with pq.ParquetWriter(str(draft), table.schema, **parquet_options(table.schema)) as writer:
            writer.write_table(table, row_group_size=ROW_GROUP)
        draft.replace(target)
    source.unlink()


def write_modules(folder: Path, modules: pa.Table) -> None:
    """Write the table of modules, published by rename."""
    draft = folder / f"{MODULES_NAME}.tmp"
    pq.write_table(modules.select(MODULES.names).cast(MODULES), str(draft), **parquet_options(MODULES))
    draft.replace(folder / MODULES_NAME)


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """Give the Parquet encoding: dictionaries for words, byte planes for floats, deltas for whole numbers, zstd."""
    words: list[str] = []
    encodings: dict[str, str] = {}
    for field in schema:
        nested = pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type)
        kind = field.type.value_type if nested else field.type
        name = f"{field.name}.list.element" if nested else field.name
        if pa.types.is_dictionary(kind):
            words.append(name)
        elif pa.types.is_floating(kind):
            encodings[name] = "BYTE_STREAM_SPLIT"
        elif pa.types.is_integer(kind):
            encodings[name] = "PLAIN" if kind == pa.uint64() else "DELTA_BINARY_PACKED"
    return {"compression": "zstd", "use_dictionary": words, "column_encoding": encodings}
