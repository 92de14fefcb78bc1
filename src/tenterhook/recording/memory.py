"""A recording in memory: a sink and a source in one.

Memory grows with the rows (about 150 bytes each, 400 with a sketch) and with the tensors stored. For whole runs,
record to disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tenterhook.errors import NotRecordedError, RecordingError
from tenterhook.recording import query
from tenterhook.recording.buckets import Buckets
from tenterhook.recording.manifest import Manifest
from tenterhook.recording.nonfinite import first_in_rows
from tenterhook.recording.schema import MODULES
from tenterhook.recording.source import TABLES, WRITTEN, Filters, Module, filtered, with_rank
from tenterhook.recording.value import STALE

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["Alias", "MemorySink"]


@dataclass(frozen=True, slots=True)
class Alias:
    """A tensor that was stored without a copy.

    Attributes:
        tensor: shares its memory with what the program goes on to use.
        is_stale: says whether it was changed since it was stored.
    """

    tensor: Any
    is_stale: Callable[[], bool]


class MemorySink:
    """Keeps batches and tensors as they come; can be read while it is written to.

    Attributes:
        before_read: called before each reading, so that whoever writes can hand over what it still holds.
        failure: always None; memory does not stop.
    """

    def __init__(self, manifest: Manifest | None = None, *, rank: int = 0) -> None:
        self.before_read: Callable[[], None] | None = None
        self.failure: str | None = None
        self._manifest = manifest if manifest is not None else Manifest(rank=rank)
        self._rank = rank
        self._lock = RLock()
        self._batches: dict[str, list[pa.RecordBatch]] = {"calls": [], "values": []}
        self._tables: dict[str, tuple[int, pa.Table]] = {}
        self._buckets = {"calls": Buckets(), "values": Buckets()}
        self._bucketed = {"calls": 0, "values": 0}  # batches that are in them
        self._modules: pa.Table | None = None
        self._tensors: dict[str, Any] = {}
        self._version = 0
        self._closed = False

    # as a sink

    def write_calls(self, batch: pa.RecordBatch) -> None:
        """Keep rows of the schema `CALLS`."""
        self._append("calls", batch)

    def write_values(self, batch: pa.RecordBatch) -> None:
        """Keep rows of the schema `VALUES`."""
        self._append("values", batch)

    def write_tensor(self, key: str, tensor: Any) -> bool:
        """Keep a tensor, of whatever framework, as it is, or an `Alias` of one; True, since memory has no budget."""
        with self._lock:
            self._tensors[key] = tensor
        return True

    def write_modules(self, modules: pa.Table) -> None:
        """Keep the modules before the end, so that a live recording can name models; `close` replaces them."""
        with self._lock:
            if self._modules is None or not self._modules.equals(modules):
                self._modules = modules
                self._version += 1

    def steps_ended(self, before: int) -> None:
        """Do nothing: memory does not outlive the process."""

    def describe(self, manifest: Manifest) -> None:
        """Do nothing: the manifest that it was given is the same."""

    def flush(self) -> None:
        """Do nothing: what was handed over is here."""

    def close(self, manifest: Manifest, modules: pa.Table) -> None:
        """Keep the finished manifest and the modules."""
        if self._closed:
            return
        self._closed = True
        self.write_modules(modules)
        self._manifest = manifest
        self._manifest.complete = True

    def break_off(self, manifest: Manifest) -> None:
        """Do nothing: what was handed over is here, and the manifest says that it is not complete."""

    def abandon(self) -> None:
        """Do nothing: memory is given back by itself."""

    def forked(self) -> None:
        """Go on in a child of the process with what was there, a copy of its own."""
        self._lock = RLock()

    def _append(self, name: str, batch: pa.RecordBatch) -> None:
        with self._lock:
            self._batches[name].append(batch)
            self._version += 1

    # as a source

    @property
    def manifest(self) -> Manifest:
        """The manifest as it stands."""
        return self._manifest

    @property
    def path(self) -> Path | None:
        """None: it is in memory."""
        return None

    @property
    def ranks(self) -> list[int]:
        """The one process that this is."""
        return [self._rank]

    @property
    def notes(self) -> list[str]:
        """None: what is in memory can be read."""
        return []

    @property
    def version(self) -> int:
        """Number of batches so far, what the writer still holds included."""
        self._drain()
        return self._version

    def table(self, name: str, columns: list[str] | None = None, filters: Filters | None = None) -> pa.Table:
        """Give the rows of a table, with the column `rank` in `calls` and `values`.

        Raises:
            RecordingError: there is no such table.
        """
        if name not in TABLES:
            raise RecordingError(f"there is no table {name!r} in a recording; the tables are {', '.join(TABLES)}")
        self._drain()
        return filtered(self._whole(name), columns, filters)

    def module_rows(self, name: str, module: Module, mark: Any) -> tuple[pa.Table, Any]:
        """Give the rows of one module that have come since a mark, and the new mark: the number of its rows."""
        seen = 0 if mark is None else mark
        with self._lock:
            batches = self._sorted(name).after(module, seen)
        rows = pa.Table.from_batches(batches, WRITTEN[name])
        return with_rank(rows, self._rank), seen + len(rows)

    def seen(self) -> list[Module]:
        """Give the modules that have rows in `calls`, in the order in which they were met."""
        self._drain()
        with self._lock:
            return self._sorted("calls").modules

    def steps(self) -> list[int]:
        """Give the steps of which there are rows, in order."""
        self._drain()
        with self._lock:
            return sorted(self._sorted("calls").steps | self._sorted("values").steps)

    def first_nonfinite(self) -> dict[str, Any] | None:
        """Give the first row of `values` that counts a NaN or an infinity; None without one."""
        found = first_in_rows(self.table("values"), self._rank)
        return None if found is None else found.row.to_pylist()[0]

    def has_tensor(self, key: str, rank: int) -> bool:
        """Say whether a tensor is stored, as it was when it was seen."""
        return key in self._tensors and not self.is_stale(key)

    def is_stale(self, key: str) -> bool:
        """Say whether a tensor was stored without a copy, and was changed later."""
        stored = self._tensors.get(key)
        return isinstance(stored, Alias) and stored.is_stale()

    def tensor(self, key: str, rank: int, *, own: bool = True) -> Any:
        """Give a stored tensor, the very object that was stored.

        Raises:
            NotRecordedError: there is none of that key, or it was changed later.
        """
        try:
            stored = self._tensors[key]
        except KeyError:
            raise NotRecordedError(f"no tensor {key!r} is in this recording") from None
        if not isinstance(stored, Alias):
            return stored
        if stored.is_stale():
            raise NotRecordedError(f"tensor {key!r} was {STALE}")
        return stored.tensor

    def connect(self) -> DuckDBPyConnection:
        """Give a database with the three tables in it and nothing else in reach."""
        connection = query.new_connection()
        for name in TABLES:
            connection.register(name, self.table(name))
        query.make_merged(connection)
        query.lock(connection, [])
        return connection

    def _drain(self) -> None:
        if self.before_read is not None and not self._closed:
            self.before_read()

    def _sorted(self, name: str) -> Buckets:
        # When asked and not when written: recording pays nothing for it.
        for batch in self._batches[name][self._bucketed[name] :]:
            self._buckets[name].add(batch)
        self._bucketed[name] = len(self._batches[name])
        return self._buckets[name]

    def _whole(self, name: str) -> pa.Table:
        with self._lock:
            if name == "modules":
                return self._modules if self._modules is not None else MODULES.empty_table()
            batches = self._batches[name]
            count, table = self._tables.get(name, (0, None))
            if table is None or count != len(batches):
                fresh = pa.Table.from_batches(batches[count:], WRITTEN[name])
                fresh = with_rank(fresh, self._rank)
                table = fresh if table is None else pa.concat_tables([table, fresh])
                # One dictionary for all batches: filters and DuckDB need not translate between them.
                table = table.unify_dictionaries()
                self._tables[name] = (len(batches), table)
            return table
