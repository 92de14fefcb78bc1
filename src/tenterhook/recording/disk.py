"""The rows and tensors of a directory: finished, killed half-way, or still being written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from tenterhook.errors import NotRecordedError, RecordingError
from tenterhook.recording import query
from tenterhook.recording.buckets import Buckets, Summary
from tenterhook.recording.files import RankFiles, load_manifest, part_number, plain_file, rank_files
from tenterhook.recording.manifest import MANIFEST_NAME, Manifest
from tenterhook.recording.nonfinite import first_in_files, first_in_rows
from tenterhook.recording.parts import check_ends, parquet_rows, small_table, stream_rows
from tenterhook.recording.rank_ends import missing, named, unclosed
from tenterhook.recording.rows import MODULES_NAME
from tenterhook.recording.source import (
    TABLES,
    WRITTEN,
    Filters,
    Module,
    filtered,
    no_rows,
    read_schema,
    table_of_rows,
    with_rank,
)
from tenterhook.recording.tail import StreamTail
from tenterhook.recording.target import RANK_FOLDER, signed_steps
from tenterhook.recording.tensors import TensorStore

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["DiskSource"]

_ALL = -1  # of a part that is finished and has been read
_TRIES = 20  # times to look again when a stream became Parquet under our eyes


class DiskSource:
    """The rows and tensors in a directory (see `source.Source`)."""

    def __init__(self, path: Path, ranks: Sequence[int] | None = None, *, check: bool = True) -> None:
        if not path.exists():
            raise RecordingError(f"there is no recording at {path}: no such directory")
        if not path.is_dir():
            raise RecordingError(f"{path} is a file; a recording is a directory (NAME.thk)")
        self._path = path  # as it was named
        self._place = path.absolute()  # the program may change its directory
        self._wanted = ranks
        self._version = 0
        self._notes: dict[str, str] = {}
        self._check = check
        self._checked: set[Path] = set()
        self._stores: dict[int, TensorStore] = {}
        self._tails: dict[Path, StreamTail] = {}
        self._known: dict[Path, Summary] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the manifests again, and look which files there are.

        Raises:
            RecordingError: a manifest or a finished file is damaged.
        """
        folders = _rank_folders(self._place)
        manifests = _manifests(self._place, folders, self._path)
        if self._wanted is not None:
            absent = [rank for rank in self._wanted if rank not in folders]
            if absent:
                has = named(folders) if folders else "none"
                raise RecordingError(f"{self._path} has no rank {absent[0]}; it has {has}")
            folders = {rank: folders[rank] for rank in sorted(set(self._wanted))}
            manifests = [one for one in manifests if one.rank in folders] or manifests
        self._folders = folders
        self._manifests = manifests
        self._ends = _ends(manifests)
        self._manifest = _merge(manifests, all_ranks=self._wanted is None)
        if not self._manifest.complete:  # of one that has no end the steps signed for are known to have run
            self._manifest.steps = max(self._manifest.steps, *map(signed_steps, folders.values()), 0)
        self.look()

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
    def ends(self) -> dict[int, str]:
        """The exceptions that ended the ranks which are read, the earliest first."""
        return self._ends

    @property
    def unclosed(self) -> dict[int, str]:
        """What is known of those of several ranks that were never closed and that nobody here writes (see `rank_ends`)."""
        for _ in range(_TRIES):
            try:
                return unclosed(self._manifests, self._folders)
            except FileNotFoundError:
                self.look()
        raise self._too_fast()

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
                self.look()  # a stream became Parquet between looking and reading
        raise self._too_fast()

    def module_rows(self, name: str, module: Module, mark: Any) -> tuple[pa.Table, Any]:
        """Give the rows of one module that have come since a mark, and the new mark: how many rows each part has given.

        Finished parts are read once; of streams, each batch.
        """
        seen: dict[tuple[int, int], int] = {} if mark is None else mark
        for _ in range(_TRIES):
            try:
                return self._fresh_rows(name, module, seen)
            except FileNotFoundError:
                self.look()
        raise self._too_fast()

    def _fresh_rows(
        self, name: str, module: Module, seen: dict[tuple[int, int], int]
    ) -> tuple[pa.Table, dict[tuple[int, int], int]]:
        now, found = dict(seen), []
        for files in self._files:
            rows = []
            for path in (*files.parquet[name], *files.streams[name]):
                part = files.rank, part_number(path)
                taken = now.get(part, 0)
                if taken == _ALL:
                    continue
                if path.suffix == ".parquet":
                    fresh = parquet_rows(path, name, None, {"model": module[0], "path": module[1]}).slice(taken)
                    now[part] = _ALL
                else:
                    fresh = pa.Table.from_batches(self._tail(path, name).buckets.after(module, taken), WRITTEN[name])
                    now[part] = taken + len(fresh)
                rows.append(fresh)
            if rows:
                found.append(with_rank(pa.concat_tables(rows), files.rank))
        return _joined(found, name, None), now

    def _tail(self, path: Path, name: str) -> StreamTail:
        tail = self._tails.setdefault(path, StreamTail(path, name))
        tail.read_on()
        if tail.note is not None:
            self._notes[str(path)] = tail.note
        return tail

    def seen(self) -> list[Module]:
        """Give the modules that have rows in `calls`: rank after rank, in the order of their first call."""
        return [module for part in self._summaries("calls") for module in part.modules]

    def steps(self) -> list[int]:
        """Give the steps of which there are rows, in order."""
        found: set[int] = set()
        for name in ("calls", "values"):
            found.update(*(part.steps for part in self._summaries(name)))
        return sorted(found)

    def _summaries(self, name: str) -> list[Summary | Buckets]:
        """Say of each part which steps and modules it holds; of finished ones that is read once."""
        for _ in range(_TRIES):
            try:
                return [self._summary(path, name) for files in self._files
                        for path in (*files.parquet[name], *files.streams[name])]  # fmt: skip
            except FileNotFoundError:
                self.look()
        raise self._too_fast()

    def _summary(self, path: Path, name: str) -> Summary | Buckets:
        if path.suffix == ".arrows":
            return self._tail(path, name).buckets
        if path not in self._known:
            buckets = Buckets()
            columns = ["seq", "step", "model", "path"]
            for batch in parquet_rows(path, name, columns, None).to_batches():
                buckets.add(batch)
            self._known[path] = Summary(buckets.steps, buckets.modules)
        return self._known[path]

    def first_nonfinite(self) -> dict[str, Any] | None:
        """Give the first row of `values`, by step, event and rank, that counts a NaN or an infinity; None without one."""
        for _ in range(_TRIES):
            try:
                return self._first_nonfinite()
            except FileNotFoundError:
                self.look()
        raise self._too_fast()

    def _first_nonfinite(self) -> dict[str, Any] | None:
        parquet = {plain_file(path): files.rank for files in self._files for path in files.parquet["values"]}
        found = [first_in_files(parquet)]
        for files in self._files:
            for path in files.streams["values"]:
                found.append(first_in_rows(stream_rows(path, "values", self._notes), files.rank))
        first = min((one for one in found if one is not None), key=lambda one: one[:3], default=None)
        return None if first is None else with_rank(first.row, first.rank).to_pylist()[0]

    def has_tensor(self, key: str, rank: int) -> bool:
        """Say whether a tensor is stored."""
        return rank in self._stores and key in self._stores[rank]

    def tensor(self, key: str, rank: int, *, own: bool = True) -> Any:
        """Give a stored tensor: an ndarray, memory-mapped; `own` says whether it may be written to, which changes no file.

        Raises:
            NotRecordedError: it was not stored.
            RecordingError: its file is damaged.
        """
        if rank not in self._stores:
            raise NotRecordedError(f"{self._path} has no rank {rank}")
        return self._stores[rank].get(key, own=own)

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
        query.make_merged(connection)
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
                self.look()
        raise self._too_fast()

    def _too_fast(self) -> RecordingError:
        return RecordingError(f"{self._path} changes faster than it can be read; try again")

    def look(self) -> None:
        """Look which files there are; what has been read of them before is kept."""
        self._files = [rank_files(folder, rank) for rank, folder in sorted(self._folders.items())]
        if self._check:
            for path in (path for files in self._files for paths in files.parquet.values() for path in paths):
                if path not in self._checked:
                    check_ends(path)
                    self._checked.add(path)
        for files in self._files:
            store = self._stores.setdefault(files.rank, TensorStore(files.folder))
            store.look(files.shards, finished=self._manifest.complete)
        streams = {path for files in self._files for paths in files.streams.values() for path in paths}
        self._tails = {path: tail for path, tail in self._tails.items() if path in streams}
        self._version += 1

    def _rank_table(self, files: RankFiles, name: str, columns: list[str] | None, filters: Filters | None) -> pa.Table:
        inner = None if columns is None else [column for column in columns if column != "rank"]
        parts = [parquet_rows(path, name, inner, filters) for path in files.parquet[name]]
        if files.streams[name]:
            loose = pa.concat_tables([stream_rows(path, name, self._notes) for path in files.streams[name]])
            parts.append(filtered(loose, inner, filters))
        if not parts:
            parts = [filtered(no_rows(WRITTEN[name]), inner, None)]
        table = with_rank(pa.concat_tables(parts), files.rank)
        return table if columns is None else table.select(columns)

    def _modules(self) -> pa.Table:
        tables = []
        for files in self._files:
            path = files.folder / MODULES_NAME
            if path.exists():
                tables.append(small_table(path, WRITTEN["modules"]))
        if len(tables) < 2:
            return tables[0] if tables else no_rows(WRITTEN["modules"])
        return _merge_modules(tables)


def _rank_folders(path: Path) -> dict[int, Path]:
    with os.scandir(path) as entries:
        return {
            int(entry.name[5:]): path / entry.name
            for entry in entries
            if RANK_FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        }


def _manifests(path: Path, folders: dict[int, Path], named: Path) -> list[Manifest]:
    found = [folder / MANIFEST_NAME for _, folder in sorted(folders.items()) if (folder / MANIFEST_NAME).exists()]
    if not found and (path / MANIFEST_NAME).exists():
        found = [path / MANIFEST_NAME]
    if not found:
        raise RecordingError(f"{named} is not a recording: it has no {MANIFEST_NAME}")
    return [load_manifest(file) for file in found]


def _merge(manifests: list[Manifest], *, all_ranks: bool) -> Manifest:
    first = msgspec.structs.replace(manifests[0])
    if len(manifests) > 1 or first.world > 1:
        absent = missing(first.world, [manifest.rank for manifest in manifests]) if all_ranks else None
        first.complete = absent is None and all(manifest.complete for manifest in manifests)
        reasons = [_of_ranks(manifests, "partial"), absent]
        first.partial = "; ".join(filter(None, reasons)) or None
        first.error = "; ".join(f"rank {rank}: {words}" for rank, words in _ends(manifests).items()) or None
        first.tensors_stopped = _of_ranks(manifests, "tensors_stopped")
        first.lost_rows = sum(manifest.lost_rows for manifest in manifests)
        _merge_gaps(first, manifests)
    return first


def _merge_gaps(first: Manifest, manifests: list[Manifest]) -> None:
    """Keep the gaps that all ranks have; those of single ones are told with their rank."""
    common = [gap for gap in first.gaps if all(gap in manifest.gaps for manifest in manifests)]
    own = [msgspec.structs.replace(one, gaps=[gap for gap in one.gaps if gap not in common]) for one in manifests]
    first.gaps = common
    first.told = [*(f"rank {one.rank}: {words}" for one in own for words in one.missing_steps), *first.told]


def _of_ranks(manifests: list[Manifest], name: str) -> str | None:
    told = ((manifest.rank, getattr(manifest, name)) for manifest in manifests)
    return "; ".join(f"rank {rank}: {words}" for rank, words in told if words) or None


def _ends(manifests: list[Manifest]) -> dict[int, str]:
    """Say what ended each rank, the earliest first: the others may only have lost their connection to it."""
    ended = sorted(manifests, key=lambda one: (one.ended is None, one.ended, one.rank))
    return {one.rank: (one.error.splitlines() or [""])[0] for one in ended if one.error}


def _streams(files: RankFiles, name: str, notes: dict[str, str]) -> pa.Table:
    tables = [stream_rows(path, name, notes) for path in files.streams[name]]
    return with_rank(pa.concat_tables(tables) if tables else no_rows(WRITTEN[name]), files.rank)


def _joined(tables: list[pa.Table], name: str, columns: list[str] | None) -> pa.Table:
    tables = [table for table in tables if len(table)]
    if not tables:
        return filtered(no_rows(read_schema(name)), columns, None)
    return tables[0].unify_dictionaries() if len(tables) == 1 else pa.concat_tables(tables).unify_dictionaries()


def _merge_modules(tables: list[pa.Table]) -> pa.Table:
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for row in pa.concat_tables(tables).to_pylist():
        kept = merged.setdefault((row["model"], row["path"]), row)
        if kept is not row:
            kept["calls"] = (kept["calls"] or 0) + (row["calls"] or 0)
            kept["selected"] = kept["selected"] or row["selected"]
            kept["reason"] = kept["reason"] or row["reason"]
    return table_of_rows(merged.values(), WRITTEN["modules"])
