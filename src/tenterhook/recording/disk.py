"""The rows and tensors of a directory: finished, killed half-way, or still being written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tenterhook.errors import NotRecordedError, RecordingError
from tenterhook.recording import query
from tenterhook.recording.files import RankFiles, first_line, plain_file, rank_files, reading
from tenterhook.recording.manifest import MANIFEST_NAME, Manifest
from tenterhook.recording.source import TABLES, WRITTEN, Filters, filtered, read_schema, with_rank
from tenterhook.recording.target import RANK_FOLDER
from tenterhook.recording.tensors import TensorStore

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["DiskSource", "read_part"]

_MAX_MANIFEST = 16 << 20
_TRIES = 20  # times to look again when a stream became Parquet under our eyes


class DiskSource:
    """The rows and tensors in a directory (see `source.Source`)."""

    def __init__(self, path: Path, ranks: Sequence[int] | None = None, *, check: bool = True) -> None:
        if not path.exists():
            raise RecordingError(f"there is no recording at {path}: no such directory")
        if not path.is_dir():
            raise RecordingError(f"{path} is a file; a recording is a directory (NAME.thk)")
        self._path = path
        self._folders = _rank_folders(path)
        self._manifests = _manifests(path, self._folders)
        if ranks is not None:
            missing = [rank for rank in ranks if rank not in self._folders]
            if missing:
                raise RecordingError(f"{path} has no rank {missing[0]}; it has {_span(sorted(self._folders))}")
            self._folders = {rank: self._folders[rank] for rank in sorted(set(ranks))}
        self._manifest = _merge(self._manifests, len(self._folders) if ranks is None else None)
        self._version = 0
        self._notes: dict[str, str] = {}
        self._check = check
        self._look()

    @property
    def notes(self) -> list[str]:
        """What could not be read of the files that were read so far, as sentences."""
        return list(self._notes.values())

    @property
    def files(self) -> list[RankFiles]:
        """The files of each rank that is read."""
        return self._files

    @property
    def manifest(self) -> Manifest:
        """The manifest; of several ranks, the first's, complete when all are."""
        return self._manifest

    @property
    def path(self) -> Path | None:
        """The directory."""
        return self._path

    @property
    def ranks(self) -> list[int]:
        """The processes that are read."""
        return sorted(self._folders)

    @property
    def version(self) -> int:
        """Constant, unless the files were looked at again."""
        return self._version

    def table(self, name: str, columns: list[str] | None = None, filters: Filters | None = None) -> pa.Table:
        """Give the rows of a table.

        Raises:
            RecordingError: there is no such table, or a file of it is damaged.
        """
        if name not in TABLES:
            raise RecordingError(f"there is no table {name!r} in a recording; the tables are {', '.join(TABLES)}")
        for _ in range(_TRIES):
            try:
                if name == "modules":
                    return filtered(self._modules(), columns, filters)
                parts = [self._rank_table(files, name, columns, filters) for files in self._files]
                return _joined(parts, name, columns)
            except FileNotFoundError:
                self._look()  # a stream became Parquet between looking and reading
        raise RecordingError(f"{self._path} changes faster than it can be read; try again")

    def has_tensor(self, key: str, rank: int) -> bool:
        """Say whether a tensor is stored."""
        return rank in self._stores and key in self._stores[rank]

    def tensor(self, key: str, rank: int) -> Any:
        """Give a stored tensor: an ndarray, read-only and memory-mapped.

        Raises:
            NotRecordedError: it was not stored.
            RecordingError: its file is damaged.
        """
        if rank not in self._stores:
            raise NotRecordedError(f"{self._path} has no rank {rank}")
        return self._stores[rank].get(key)

    def connect(self) -> DuckDBPyConnection:
        """Give a database with views over the Parquet files and what is still in streams; it can read nothing else."""
        loose = self._all_streams()
        connection = query.new_connection()
        allowed: list[Path] = []
        for name, rows in loose.items():
            paths = [plain_file(path).absolute() for files in self._files for path in files.parquet[name]]
            query.make_view(connection, name, paths, rows)
            allowed += paths
        connection.register("modules", self.table("modules"))
        query.lock(connection, allowed)
        return connection

    def _all_streams(self) -> dict[str, pa.Table]:
        for _ in range(_TRIES):
            try:
                return {
                    name: _joined([_streams(files, name, self._notes) for files in self._files], name, None)
                    for name in ("calls", "values")
                }
            except FileNotFoundError:
                self._look()
        raise RecordingError(f"{self._path} changes faster than it can be read; try again")

    def _look(self) -> None:
        self._files = [rank_files(folder, rank) for rank, folder in sorted(self._folders.items())]
        if self._check:
            for path in (path for files in self._files for paths in files.parquet.values() for path in paths):
                _check_ends(path)
        self._stores = {
            files.rank: TensorStore(files.folder, files.shards, finished=self._manifest.complete)
            for files in self._files
        }
        self._version += 1

    def _rank_table(self, files: RankFiles, name: str, columns: list[str] | None, filters: Filters | None) -> pa.Table:
        inner = None if columns is None else [column for column in columns if column != "rank"]
        parts = [_parquet(path, name, inner, filters) for path in files.parquet[name]]
        if files.streams[name]:
            loose = pa.concat_tables([_stream(path, name, self._notes) for path in files.streams[name]])
            parts.append(filtered(loose, inner, filters))
        if not parts:
            parts = [filtered(WRITTEN[name].empty_table(), inner, None)]
        table = with_rank(pa.concat_tables(parts), files.rank)
        return table if columns is None else table.select(columns)

    def _modules(self) -> pa.Table:
        tables = []
        for files in self._files:
            path = files.folder / "modules.parquet"
            if path.exists():
                with reading(path):
                    tables.append(
                        pq.read_table(str(plain_file(path)), columns=WRITTEN["modules"].names).cast(WRITTEN["modules"])
                    )
        if len(tables) < 2:
            return tables[0] if tables else WRITTEN["modules"].empty_table()
        return _merge_modules(tables)


def _rank_folders(path: Path) -> dict[int, Path]:
    with os.scandir(path) as entries:
        return {
            int(entry.name[5:]): path / entry.name
            for entry in entries
            if RANK_FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        }


def _manifests(path: Path, folders: dict[int, Path]) -> list[Manifest]:
    found = [folder / MANIFEST_NAME for _, folder in sorted(folders.items()) if (folder / MANIFEST_NAME).exists()]
    if not found and (path / MANIFEST_NAME).exists():
        found = [path / MANIFEST_NAME]
    if not found:
        raise RecordingError(f"{path} is not a recording: it has no {MANIFEST_NAME}")
    manifests = []
    for file in found:
        with reading(file):
            size = plain_file(file).stat().st_size
            if size > _MAX_MANIFEST:
                raise RecordingError(f"{file} is {size} bytes long, which no recording of ours is")
            manifests.append(Manifest.from_json(file.read_bytes(), where=str(file)))
    return manifests


def _merge(manifests: list[Manifest], folders: int | None) -> Manifest:
    first = manifests[0]
    if len(manifests) > 1 or first.world > 1:
        whole = folders is None or len(manifests) >= first.world
        first.complete = whole and all(manifest.complete for manifest in manifests)
        reasons = [_of_ranks(manifests, "partial")]
        if not whole:
            reasons.append(f"only {len(manifests)} of {first.world} ranks are there")
        first.partial = "; ".join(filter(None, reasons)) or None
        first.error = _of_ranks(manifests, "error")
        first.tensors_stopped = _of_ranks(manifests, "tensors_stopped")
        first.lost_rows = sum(manifest.lost_rows for manifest in manifests)
    return first


def _of_ranks(manifests: list[Manifest], name: str) -> str | None:
    told = ((manifest.rank, getattr(manifest, name)) for manifest in manifests)
    return "; ".join(f"rank {rank}: {words}" for rank, words in told if words) or None


def read_part(path: Path, name: str) -> pa.Table:
    """Read one file of a table: Parquet, or what is whole of a stream.

    Raises:
        RecordingError: it is damaged.
    """
    if path.suffix == ".arrows":
        return _stream(path, name)
    _check_ends(path)
    return _parquet(path, name, None, None)


def _check_ends(path: Path) -> None:
    # Parquet keeps its table of contents at the end: a truncated file is known by it without being read.
    with reading(path), plain_file(path).open("rb") as file:
        start = file.read(4)
        file.seek(-min(4, path.stat().st_size), os.SEEK_END)
        if start != b"PAR1" or file.read(4) != b"PAR1":
            raise RecordingError(
                f"{path} is truncated or is not Parquet; the other files of the recording may still be whole"
            )


def _parquet(path: Path, name: str, columns: list[str] | None, filters: Filters | None) -> pa.Table:
    schema = WRITTEN[name]
    with reading(path):
        source = ds.dataset(str(path), schema=schema, format="parquet")
        present = set(next(iter(source.get_fragments())).physical_schema.names)
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
            _check_text(table[column])
        return table if columns is None else table.select(columns)


def _check_text(column: pa.ChunkedArray) -> None:
    """Refuse text that is none: Parquet's reader hands damaged bytes on as they are."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        for chunk in column.chunks:
            chunk.dictionary.validate(full=True)
    elif pa.types.is_string(kind):
        column.validate(full=True)


def _stream(path: Path, name: str, notes: dict[str, str] | None = None) -> pa.Table:
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
        table = pa.Table.from_batches(batches, batches[0].schema) if batches else schema.empty_table()
        return table.unify_dictionaries().cast(schema)


def _note(notes: dict[str, str] | None, path: Path, words: str) -> None:
    if notes is not None:
        notes[str(path)] = f"{path.name}: {words}"


def _streams(files: RankFiles, name: str, notes: dict[str, str]) -> pa.Table:
    tables = [_stream(path, name, notes) for path in files.streams[name]]
    return with_rank(pa.concat_tables(tables) if tables else WRITTEN[name].empty_table(), files.rank)


def _joined(tables: list[pa.Table], name: str, columns: list[str] | None) -> pa.Table:
    tables = [table for table in tables if len(table)]
    if not tables:
        return filtered(read_schema(name).empty_table(), columns, None)
    return tables[0].unify_dictionaries() if len(tables) == 1 else pa.concat_tables(tables).unify_dictionaries()


def _merge_modules(tables: list[pa.Table]) -> pa.Table:
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for row in pa.concat_tables(tables).to_pylist():
        kept = merged.setdefault((row["model"], row["path"]), row)
        if kept is not row:
            kept["calls"] = (kept["calls"] or 0) + (row["calls"] or 0)
            kept["selected"] = kept["selected"] or row["selected"]
            kept["reason"] = kept["reason"] or row["reason"]
    return pa.Table.from_pylist(list(merged.values()), WRITTEN["modules"])


def _span(ranks: list[int]) -> str:
    return f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}" if ranks else "none"
