"""`Recording`: the noun at the waist. All that captures ends in one, all that asks begins with one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tenterhook.errors import AmbiguousError, NotRecordedError, RecordingError, SelectionError
from tenterhook.recording import query
from tenterhook.recording.call import Call, call_from_row
from tenterhook.recording.coverage import Coverage, coverage_of
from tenterhook.recording.describe import describe
from tenterhook.recording.disk import DiskSource
from tenterhook.recording.index import ModuleIndex
from tenterhook.recording.manifest import Manifest
from tenterhook.recording.merged import merge_shards
from tenterhook.recording.naming import look_up
from tenterhook.recording.rank_ends import chosen, told_of_unclosed
from tenterhook.recording.saving import manifest_of_copy, store, without_keys
from tenterhook.recording.sequences import Place, TensorSequence
from tenterhook.recording.source import TABLES, Filters, Module, Source, filtered
from tenterhook.recording.value import STALE, Value, value_from_row
from tenterhook.recording.view import ModuleView
from tenterhook.recording.writer import DiskSink

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["Recording"]


class Recording:
    """What was recorded, live in memory or opened from a directory; it is asked the same questions either way.

    `recording["features.11"].output` gives a value, `recording.order()` what ran, `recording.table("values")` and
    `recording.query("select ...")` the rows, `recording.coverage` what was asked for and not seen. A bare path means
    the model with most parameters; `recording["Net/conv1"]` says which.

    Rows are read when asked for and kept until new ones arrive; for tens of millions of them use `query`, which reads
    the files.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._version = -1
        self._cache: dict[str, Any] = {}
        self._indices: dict[Module, ModuleIndex] = {}
        self._connection: DuckDBPyConnection | None = None
        self._lock = Lock()
        self._still = False

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, ranks: Sequence[int] | int | None = None) -> Recording:
        """Open a recording from its directory; the same as `tenterhook.open`.

        Raises:
            RecordingError: there is no such directory, it is not a recording, it is damaged, or of a newer major
                version; or `ranks` are none.
        """
        return cls(DiskSource(Path(path), chosen(ranks)))

    @property
    def manifest(self) -> Manifest:
        """The manifest: what is known besides the rows."""
        return self._source.manifest

    @property
    def ended_by(self) -> str | None:
        """The exception that ended what was recorded, `"ValueError: bad batch"`; of several ranks, as in `ends`.

        None where the run, or the body of the `with`, came to its end, and where nobody could say: it still runs, or was
        killed (`manifest.complete` is false then).
        """
        return self.manifest.error

    @property
    def ends(self) -> dict[int, str]:
        """The exceptions that ended its ranks, by rank, the earliest first: others may only have lost their connection."""
        if isinstance(self._source, DiskSource):
            return self._source.ends
        return {self.manifest.rank: self.manifest.error} if self.manifest.error else {}

    @property
    def unclosed(self) -> dict[int, str]:
        """Of several ranks, those that were killed, and how far each came: `{1: "was never closed: killed in step 11 ..."}`.

        Those that a process on this machine writes now are none of them; ranks that are not there at all are named by
        `manifest.partial`.
        """
        return self._source.unclosed if isinstance(self._source, DiskSource) else {}

    @property
    def path(self) -> Path | None:
        """The directory, None in memory."""
        return self._source.path

    @property
    def notes(self) -> list[str]:
        """What could not be read of the files that were read so far: the ends of streams that a kill cut off."""
        return self._source.notes

    @property
    def ranks(self) -> list[int]:
        """The processes that wrote it."""
        return self._source.ranks

    def refresh(self) -> None:
        """Look again at a recording that is being written: which files there are, and whether it is finished.

        What is asked for afterwards is answered with all that had come by now. A live recording in memory always is.

        Raises:
            RecordingError: it is damaged.
        """
        if isinstance(self._source, DiskSource):
            self._source.refresh()

    def table(self, name: str = "") -> pa.Table:
        """Give a whole table: `calls`, `values` or `modules`, the first two with a column `rank`.

        Raises:
            RecordingError: there is no such table, or a file of it is damaged.
        """
        if name not in TABLES:
            asked = f"there is no table {name!r} in a recording" if name else "table() needs a name"
            raise RecordingError(f"{asked}; the tables are {', '.join(TABLES)}")
        return self._source.table(name)

    def merged(self, path: str | None = None, *, kind: str | None = None, step: int | None = None) -> pa.Table:
        """Give `values` with one row for each tensor that is spread over ranks, merged of the rows of its parts.

        The result has the columns of `values` but those that only a part has, and `ranks`: those whose rows went into it.
        Rows of tensors that are whole on a rank stay as they are. For what `query` can ask of shards, see the page on the
        format.

        Args:
            path: one module; all by default, which takes much memory for a large recording.
            kind: `output`, `param_grad`, ...; all by default.
            step: one step; all by default.

        Raises:
            NotRecordedError: there is no such module.
        """
        filters: Filters = {} if kind is None else {"kind": kind}
        if path is not None:
            view = self[path]
            filters = {**filters, "model": view.model, "path": view.path}
        if step is not None:
            filters = {**filters, "step": step}
        return merge_shards(self._source.table("values", None, filters))

    def query(self, sql: str) -> pa.Table:
        """Answer one SELECT over `calls`, `values` and `modules`, by DuckDB. Nothing else can be read, nothing written.

        The view `merged` is `values` with the shards of a tensor put together, as the method `merged` does it.

        Raises:
            RecordingError: the query is not one SELECT, is wrong, or meets a damaged file.
        """
        with self._lock:
            connection = self._connection or self._source.connect()
            if self._still or (self._source.path is not None and self.manifest.complete):
                self._connection = connection  # nothing will change, so the next question need not wait for one
            try:
                return query.run(connection, sql)
            finally:
                if connection is not self._connection:
                    connection.close()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Answer all queries of a ``with`` by what was there at the first of them, also where the recording grows."""
        self._still = True
        try:
            yield
        finally:
            self._still = False
            if not (self._source.path is not None and self.manifest.complete):
                self._connection = None

    def first_nonfinite(self) -> Value | None:
        """Give the first value with a NaN or an infinity in it, by step, event and rank; None where all that were measured are finite.

        Of finished files only what can hold it is read, which makes it quick for millions of rows.

        Raises:
            RecordingError: a file is damaged.
        """
        row = self._source.first_nonfinite()
        return None if row is None else value_from_row(row, self._source)

    def order(self) -> list[Call]:
        """Give all calls in execution order, forward and backward; ranks one after the other."""
        table = self._source.table("calls").sort_by([("rank", "ascending"), ("seq", "ascending")])
        return [call_from_row(row, self) for row in table.to_pylist()]

    @property
    def steps(self) -> list[int]:
        """The steps of which something was recorded."""
        return self._cached("steps", self._find_steps)

    @property
    def models(self) -> list[str]:
        """The outermost modules that ran, that with most parameters first."""
        return self._cached("models", self._find_models)

    @property
    def paths(self) -> list[tuple[str, str]]:
        """(model, path) of every module that is known or was seen, in the order of the model."""
        return self._cached("paths", self._find_paths)

    @property
    def coverage(self) -> Coverage:
        """What was asked for, and what of it was seen."""
        told = [*told_of_unclosed(self.unclosed), *self.manifest.missing_steps, *self.manifest.told]
        return coverage_of(self._source.table("modules").to_pylist(), several_models=len(self.models) > 1, told=told)

    def tensor(self, key: str, rank: int | None = None) -> Any:
        """Give a stored tensor by its key in the column `tensor` of `values`.

        Raises:
            NotRecordedError: there is none.
        """
        return self._source.tensor(key, self.ranks[0] if rank is None else rank)

    def __getitem__(self, path: str) -> ModuleView | Any:
        """Give one module, `recording["features.11"]`, `["Net/conv1"]`, `[""]` for the root; or what an address names.

        Addresses are taken as they are printed: `recording["conv1#0@3"]` is the module in that call,
        `recording["conv1:output#0@3"]` the value.

        Raises:
            NotRecordedError: there is no such module, or no such value; the nearest names are listed.
            AmbiguousError: several values are called so.
            SelectionError: the address is malformed.
        """
        return look_up(path, self.models, self._cached("known", lambda: dict.fromkeys(self.paths)), self)

    def __contains__(self, path: object) -> bool:
        if not isinstance(path, str):
            return False
        try:
            self[path]
        except (NotRecordedError, SelectionError):
            return False
        except AmbiguousError:
            return True  # more than one
        return True

    def __iter__(self) -> Iterator[Any]:
        raise RecordingError(
            "a recording is not a sequence; go through recording.order() for its calls, recording.paths for its modules"
        )

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Recording:
        """Write the recording to a directory, tensors included; gives this recording.

        What it lacks, its copy lacks, and says so: one that was killed, or is still going on, is saved as it stands, with
        the reason in `partial`.

        Raises:
            TargetError: the directory exists, or cannot be written.
            RecordingError: it could not be written whole.
        """
        ranks = self.ranks
        if len(ranks) > 1:
            raise RecordingError(
                f"this recording has {len(ranks)} ranks and is on disk already; copy its directory {self.path}"
            )
        self._source.version  # noqa: B018 - whoever writes hands over what it still holds
        calls, values = (self._source.table(name).drop_columns(["rank"]) for name in ("calls", "values"))
        named = dict.fromkeys(values["tensor"].drop_null().to_pylist())
        keys = [key for key in named if self._source.has_tensor(key, ranks[0])]
        copy = manifest_of_copy(self, lost=0 if self.path is None else len(named) - len(keys))
        sink = DiskSink(Path(path), copy, rank=copy.rank, overwrite=overwrite)
        for batch in calls.to_batches():
            sink.write_calls(batch)
        notes = dict.fromkeys(sorted(named.keys() - set(keys)), STALE) if self.path is None else {}
        for key in keys:
            if (why := store(sink, key, self._source.tensor(key, ranks[0]))) is not None:
                notes[key] = why
        if notes:
            values = without_keys(values, notes)
        for batch in values.to_batches():
            sink.write_values(batch)
        sink.close(copy, self._source.table("modules"))
        if sink.failure:
            raise RecordingError(f"{path} was not written whole: {sink.failure}")
        return self

    def __repr__(self) -> str:
        manifest = self.manifest
        where = f"{self.path}" if self.path else "in memory"
        state = "" if manifest.complete else ", not finished"
        state += f", partial: {manifest.partial}" if manifest.partial else ""
        ranks = f", {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""
        models = ", ".join(self.models[:3]) or "no model"
        steps = len(self.steps)
        steps = f"{steps} of {manifest.steps}" if manifest.steps > steps else steps
        return f"Recording of {models} ({where}): {steps} steps{ranks}{state}"

    def __str__(self) -> str:
        return describe(self)

    # what calls and modules ask (see call.Lookup)

    def calls_of(
        self, model: str | None, path: str | None, phase: str | None = None, step: int | None = None
    ) -> Sequence[Call]:
        """Give the calls of one module, of every phase or of one, in all steps or in one, in execution order."""
        return self._index(model, path).calls(phase, step)

    def related(self, call: Call) -> list[Call]:
        """Give the backward calls of a forward call, or the forward call of another."""
        return self._index(call.model, call.path).related(call)

    def values_of(self, call: Call) -> list[Value]:
        """Give the values that belong to one row of calls, in the order in which they were seen."""
        return self._index(call.model, call.path).values(call)

    def loose_of(self, model: str | None, path: str | None, kind: str) -> dict[int, list[Value]]:
        """Give the values of one module that belong to no call, those of its parameters: step -> values."""
        return self._index(model, path).loose(kind)

    def _index(self, model: str | None, path: str | None) -> ModuleIndex:
        return self._indices.setdefault((model, path), ModuleIndex((model, path), self._source, self))

    def sequence(self, model: str | None, path: str | None, kind: str, slot: str | None) -> TensorSequence:
        """Give the stored tensors of one kind of one module over all steps and calls."""
        columns = ["rank", "seq", "step", "slot", "tensor", "shape"]
        table = self._source.table("values", columns, {"model": model, "path": path, "kind": kind})
        table = table.filter(table["tensor"].is_valid())
        name = f"{path or '(root)'}:{kind}"
        if not len(table):
            raise NotRecordedError(f"no tensor of {name} was stored; record(..., tensors=True) stores tensors")
        slots = sorted(table["slot"].cast(pa.string()).unique().to_pylist(), key=str)
        if slot is None and len(slots) > 1:
            raise AmbiguousError(
                f"{name} has {len(slots)} slots ({', '.join(map(str, slots))}); .tensors({kind!r}, slot) takes one"
            )
        if slot is not None:
            if slot not in slots:
                raise NotRecordedError(f"{name} has no slot {slot!r}; its slots are {', '.join(map(repr, slots))}")
            table = filtered(table, None, {"slot": slot})
        table = table.sort_by([("step", "ascending"), ("rank", "ascending"), ("seq", "ascending")])
        rows = zip(*(table[column].to_pylist() for column in ("tensor", "rank", "step", "shape")), strict=True)
        stored = [row for row in rows if self._source.has_tensor(row[0], row[1])]
        return TensorSequence([Place(*row) for row in stored], self._source)

    def _cached(self, key: str, make: Callable[[], Any]) -> Any:
        version = self._source.version
        if version != self._version:
            self._cache, self._version = {}, version
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def _find_steps(self) -> list[int]:
        if self.path is None or not self.manifest.complete:
            return self._source.steps()
        # It may be large: the files are read where they lie.
        return self.query("SELECT step FROM calls UNION SELECT step FROM values ORDER BY step")["step"].to_pylist()

    def _find_models(self) -> list[str]:
        modules = self._source.table("modules", ["model", "parameters"])
        sizes: dict[str, int] = {}
        for model, size in zip(modules["model"].to_pylist(), modules["parameters"].to_pylist(), strict=True):
            sizes[model] = sizes.get(model, 0) + (size or 0)
        for model in self.manifest.models:
            sizes[model.name] = max(sizes.get(model.name, 0), model.parameters or 0)
        for model, _ in self._seen():
            sizes.setdefault(model, 0)
        return sorted(sizes, key=lambda name: -sizes[name])

    def _find_paths(self) -> list[tuple[str, str]]:
        modules = self._source.table("modules", ["model", "path"])
        known = zip(modules["model"].to_pylist(), modules["path"].to_pylist(), strict=True)
        return list(dict.fromkeys([*known, *self._seen()]))

    def _seen(self) -> list[tuple[str, str]]:
        return self._cached("seen", self._find_seen)

    def _find_seen(self) -> list[tuple[str, str]]:
        if self.path is None or not self.manifest.complete:
            seen = self._source.seen()
        else:
            rows = self.query("SELECT model, path FROM calls GROUP BY ALL ORDER BY min(rank), min(seq)").to_pylist()
            seen = [(row["model"], row["path"]) for row in rows]
        return list(dict.fromkeys((model or "", path or "") for model, path in seen))
