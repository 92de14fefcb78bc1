"""Going on with a recording that ended early: what is whole of it stays, the rest is taken away."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from tenterhook.errors import TargetError
from tenterhook.recording.ends import all_parts, ends_of, part_columns, step_reached
from tenterhook.recording.files import RankFiles, load_manifest, part_number, rank_files, reading
from tenterhook.recording.manifest import MANIFEST_NAME, Manifest
from tenterhook.recording.parts import read_part, small_table
from tenterhook.recording.rows import MODULES_NAME, parquet_options
from tenterhook.recording.schema import MODULES
from tenterhook.recording.shards import finish_shard, trim_shard
from tenterhook.recording.target import signed_steps, take_over, write_manifest
from tenterhook.recording.tensors import INDEX_NAME, shard_entries

try:
    import fcntl
except ImportError:  # Windows: two that resume at the very same moment are not told apart there
    fcntl = None

pc: Any = pyarrow.compute  # its functions are made at import, out of a type checker's sight

__all__ = ["Resumed", "begin_at", "resume"]

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}  # of a network file system


@dataclass
class Resumed:
    """Where a recording goes on.

    Attributes:
        step: the first step to record.
        seq: the first number for events.
        start_ns: nanoseconds of the recording that are behind it.
        parts: table -> number of its next part.
        shard: number of the next shard of tensors.
        tensor_bytes: size of the shards that are there.
        steps: number of steps of which rows are kept.
        calls: (model, path, phase) -> rows of calls that are kept.
        modules: rows of the table of modules, of the models that have such calls.
    """

    step: int
    seq: int
    start_ns: int
    parts: dict[str, int]
    shard: int
    tensor_bytes: int
    steps: int
    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    modules: list[dict[str, Any]] = field(default_factory=list)


def resume(target: Path, folder: Path, manifest: Manifest, at: int | None = None) -> Resumed:
    """Take over a rank's folder and cut it back to its last complete step, or to the step that comes next.

    The step at which a process was killed, or an exception ended the session, is not known to be whole: its rows and
    tensors, and those after it, are removed, as are those from `at` on. Steps that are missing before `at` are noted as a
    gap. Where this is interrupted, it can be begun again.

    Args:
        target: the recording's directory.
        folder: the rank's folder in it.
        manifest: of the session that goes on; `started`, `resumed`, `gaps` and `steps` are set.
        at: the number of the step that comes next; None for the one after the last that is complete.

    Raises:
        TargetError: another process writes there, or what was recorded there is something else.
        RecordingError: it is damaged.
    """
    with _alone(folder, target):
        own = folder / MANIFEST_NAME
        with reading(target):
            old = load_manifest(own if own.exists() else target / MANIFEST_NAME)
        _refuse_another_question(target, old, manifest)
        files = rank_files(folder, manifest.rank)
        ends = {table: ends_of(files, table) for table in ("calls", "values")}
        whole = _whole_until(old, step_reached(ends), signed_steps(folder))
        cut = whole if at is None else min(whole, at)
        step = whole if at is None else at
        manifest.started = old.started
        manifest.resumed = old.resumed
        manifest.models = manifest.models or old.models  # a script's are not known before they are called
        manifest.tensors_stopped = old.tensors_stopped  # those of the steps that are kept are missing for good
        manifest.gaps, manifest.steps = _gaps_before(cut, old.gaps), cut  # true from the first cut to the last
        take_over(target, folder, manifest)
        keys = [key for shard in files.shards.values() for key in (entry.key for entry in shard_entries(shard))]
        seq = max([end["seq"] for end in ends.values()] + [int(key) for key in keys if key.isdecimal()]) + 1
        known = _modules_known(folder)
        for name in (MODULES_NAME, INDEX_NAME):
            (folder / name).unlink(missing_ok=True)
        for table in ("calls", "values"):
            _cut_rows(files, table, cut)
        files = rank_files(folder, manifest.rank)
        _trim_shards(files)
        if not _ended_well(old) or step != whole:
            manifest.resumed = [*old.resumed, step]
        manifest.gaps, manifest.steps = _with_gap(manifest.gaps, cut, step), step
        write_manifest(target, manifest, manifest.rank)  # whoever comes after a further kill knows of this time, too
        calls, types = _count_calls(files)
        return Resumed(
            step=step,
            seq=seq,
            start_ns=ends["calls"]["start_ns"] + 1,
            parts={table: part_number(paths[-1]) + 1 if paths else 0 for table, paths in files.parquet.items()},
            shard=max(rank_files(folder, manifest.rank).shards, default=-1) + 1,
            tensor_bytes=sum(path.stat().st_size for path in folder.glob("tensors-*.safetensors")),
            steps=_count_steps(files),
            calls=calls,
            modules=_modules_of(known, calls, types),
        )


def begin_at(step: int, manifest: Manifest) -> Resumed:
    """Begin a recording that is not there yet at a step that is not the first; those before it are a gap."""
    manifest.gaps, manifest.steps = _with_gap([], 0, step), step
    return Resumed(step=step, seq=0, start_ns=0, parts={"calls": 0, "values": 0}, shard=0, tensor_bytes=0, steps=0)


def _ended_well(old: Manifest) -> bool:
    # Of one that was stopped by a full disk, or by a fault of ours, the rows from there on are missing.
    return old.complete and old.error is None and old.partial is None


def _whole_until(old: Manifest, reached: int, signed: int) -> int:
    """Find the first step that is not known to be whole.

    Args:
        old: the manifest that is there. Of an unfinished recording its `steps` is where it was begun or gone on with, and
            what stands before is whole.
        reached: the last step that has rows.
        signed: the step up to which a process that was killed has said that all was whole; the last steps may have no rows.
    """
    if _ended_well(old):
        whole = old.steps
    elif old.complete and old.partial is None:
        whole = max(reached, old.steps - 1)  # an exception came in the last one
    elif old.complete:
        whole = reached  # from somewhere on rows are missing
    else:
        whole = max(reached, old.steps, signed)
    begins = [begin for begin, end in old.gaps if begin <= whole <= end]
    return begins[0] if begins else whole  # nothing has come since the gap that is known to be whole


def _gaps_before(step: int, gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(begin, min(end, step)) for begin, end in gaps if begin < step]


def _with_gap(gaps: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Add the steps from `begin` to before `end` to the gaps, which end before or there."""
    if begin >= end:
        return gaps
    if gaps and gaps[-1][1] == begin:
        return [*gaps[:-1], (gaps[-1][0], end)]
    return [*gaps, (begin, end)]


def _refuse_another_question(target: Path, old: Manifest, new: Manifest) -> None:
    """Refuse to go on with what was recorded of another model, or in another way: half of it would be something else."""
    fields = ("select", "kinds", "tensors", "world")
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in fields}
    if old.framework and new.framework:  # a script's is known when its first model is called
        pairs["framework"] = old.framework, new.framework
    pairs |= {name: (old.options[name], now) for name, now in new.options.items() if name in old.options}
    if old.models and new.models:
        for name in ("name", "type", "modules"):
            both = (", ".join(str(getattr(model, name)) for model in one.models) for one in (old, new))
            pairs[f"model.{name}"] = (next(both), next(both))
    for name, (before, now) in pairs.items():
        if before != now:
            raise TargetError(
                f"{target} cannot be resumed: it was recorded with {name}={before}, and now {name}={now} is asked for"
            )


@contextlib.contextmanager
def _alone(folder: Path, target: Path) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TargetError(f"{target} is being resumed by another process; choose another directory") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise TargetError(f"{target} cannot be resumed: {error.strerror}") from error
        yield
    finally:
        os.close(descriptor)


def _cut_rows(files: RankFiles, table: str, step: int) -> None:
    """Turn streams into Parquet, and leave out the rows from `step` on.

    The last part first: where that is interrupted, what is left has no hole in the middle.
    """
    for part in reversed(all_parts(files, table)):
        if part.suffix == ".parquet":
            if not pc.any(pc.greater_equal(part_columns(part, table, ["step"])["step"], step)).as_py():
                continue
        rows = read_part(part, table)
        rows = rows.filter(pc.less(rows["step"], step)).unify_dictionaries()
        draft = part.with_suffix(".parquet.tmp")
        pq.write_table(rows, str(draft), **parquet_options(rows.schema))
        draft.replace(part.with_suffix(".parquet"))
        part.with_suffix(".arrows").unlink(missing_ok=True)


def _trim_shards(files: RankFiles) -> None:
    """Take the tensors at the end away that no row names any more, and give the shard that was growing its header.

    Tensors are written at once and rows within the interval, so what a kill left without a row is at the end; it may be
    more than one shard, since small ones are finished early.
    """
    named: set[str] = set()
    for part in files.parquet["values"]:
        named.update(part_columns(part, "values", ["tensor"])["tensor"].drop_null().to_pylist())
    for _, path in sorted(files.shards.items(), reverse=True):
        entries = shard_entries(path)
        kept = list(entries)
        while kept and kept[-1].key not in named:
            kept.pop()
        if path.suffix == ".part":
            finish_shard(path, kept)
        elif len(kept) < len(entries):
            trim_shard(path, kept)
        if kept:
            break


def _count_steps(files: RankFiles) -> int:
    steps: set[int] = set()
    for table, parts in files.parquet.items():
        for part in parts:
            steps.update(pc.unique(part_columns(part, table, ["step"])["step"]).to_pylist())
    return len(steps)


def _count_calls(files: RankFiles) -> tuple[Counter[tuple[str, str, str]], dict[tuple[str, str], str]]:
    """Count the rows of calls by model, path and phase; and give the type of each module among them, in order."""
    counts: Counter[tuple[str, str, str]] = Counter()
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for part in files.parquet["calls"]:
        rows = part_columns(part, "calls", ["model", "path", "type", "phase", "seq"])
        words = rows.column_names[:-1]
        rows = pa.table({name: rows[name].cast(pa.string()) for name in words} | {"seq": rows["seq"]})
        for row in rows.group_by(words).aggregate([([], "count_all"), ("seq", "min")]).to_pylist():
            place = row["model"], row["path"]
            counts[row["model"], row["path"], row["phase"]] += row["count_all"]
            if row["type"] != "op":
                begun = row["seq_min"], row["type"]
                first[place] = min(first.get(place, begun), begun)
    return counts, {place: kind for place, (_, kind) in sorted(first.items(), key=lambda item: item[1])}


def _modules_known(folder: Path) -> list[dict[str, Any]]:
    path = folder / MODULES_NAME
    return small_table(path, MODULES).to_pylist() if path.exists() else []


def _modules_of(
    known: list[dict[str, Any]], calls: Counter[tuple[str, str, str]], types: dict[tuple[str, str], str]
) -> list[dict[str, Any]]:
    """List the modules of the models that have calls, as an earlier process knew them, or else as their calls tell."""
    models = {model for model, _ in types}
    rows = {(row["model"], row["path"]): row for row in known if row["model"] in models}
    for (model, path), kind in types.items():
        if (model, path) not in rows:
            row = dict.fromkeys(MODULES.names) | {"model": model, "path": path, "raw_path": path, "type": kind}
            rows[model, path] = row | {"aliases": [], "selected": True}
    return [row | {"calls": calls[place[0], place[1], "forward"]} for place, row in rows.items()]
