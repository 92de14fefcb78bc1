"""What a recording holds, at a glance: counts, where the first non-finite value is, and the rows of one step or of some sites."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tenterhook.address import ROOT, format_place, split_op
from tenterhook.analysis.asked import Part, parts_of
from tenterhook.analysis.nonfinite import COUNTS
from tenterhook.analysis.numbers import Numbers, numbers_of
from tenterhook.errors import NotRecordedError
from tenterhook.recording import Recording
from tenterhook.recording.spelling import spelled
from tenterhook.stats import STATISTICS

__all__ = ["Overview", "Row", "Seen", "overview", "rows_of_sites", "rows_of_step", "steps_of"]


@dataclass(frozen=True)
class Seen:
    """One tensor that was seen.

    Attributes:
        kind: ``output``, ``grad_output``, ...
        slot: where in a nested value.
        shape: its shape; None where no tensor came.
        dtype: ``float32``, ``bfloat16``, ...
        statistics: the basic statistics by name; those that make no sense are None.
        note: why something is missing.
    """

    kind: str
    slot: str
    shape: tuple[int, ...] | None
    dtype: str | None
    statistics: dict[str, float | int | None]
    note: str | None = None

    @property
    def site(self) -> str:
        """Kind and slot as an address has them: ``output[1][0]``, ``input.mask``."""
        return f"{self.kind}{self.slot if self.slot[:1] in ('', '.', '[') else f'.{self.slot}'}"

    @property
    def nonfinite(self) -> dict[str, int]:
        """How many values are no finite numbers: ``{"nan": 3, "+inf": 1}``."""
        return {word: int(self.statistics[name] or 0) for word, name in COUNTS if self.statistics.get(name)}


@dataclass(frozen=True)
class Row:
    """One call with what was seen of it; or, with ``phase`` None, a parameter.

    Attributes:
        seq: its place in the order.
        depth: nesting among the recorded calls of its phase.
        duration_ns: time that it took, None while unknown.
        error: the exception that it raised.
        values: what was seen.
    """

    seq: int
    step: int
    model: str
    path: str
    type: str
    phase: str | None
    call: int
    depth: int
    duration_ns: int | None
    error: str | None
    values: list[Seen]

    def place(self, with_model: bool) -> str:
        """Write where it is, as addresses do."""
        path, op = split_op(self.path) if self.type == "op" else (self.path, "")
        return format_place(path, op=op, model=self.model if with_model else None)

    @property
    def op(self) -> str:
        """Name of the function where this is a functional call; else empty."""
        return split_op(self.path)[1] if self.type == "op" else ""


@dataclass(frozen=True, kw_only=True)
class Overview(Numbers):
    """Counts over a whole recording.

    Attributes:
        steps: the number of steps recorded, and the first and the last of them.
        models: names of the outermost modules, the biggest first.
        modules: number of modules that were called.
        functions: number of functional calls between them, by place and name.
        calls: number of calls by phase.
        error: the last call that raised, and what.
        crowded: the step with the most calls of one model itself: how many, its number and the model's name.
    """

    steps: int
    first_step: int | None
    last_step: int | None
    models: list[str]
    modules: int
    functions: int
    calls: dict[str, int]
    error: tuple[str, str] | None
    crowded: tuple[int, int, str] | None


def overview(recording: Recording) -> Overview:
    """Count what a recording holds, and find its first non-finite value."""
    [steps] = recording.query(
        "select count(distinct step) n, min(step) low, max(step) high from (select step from calls union all select step from values)"
    ).to_pylist()
    phases = recording.query("select phase, count(*) n from calls group by phase order by min(seq)").to_pylist()
    [places] = recording.query(
        "select count(*) filter (type is distinct from 'op') modules, count(*) filter (type = 'op') functions "
        "from (select distinct model, path, type from calls)"
    ).to_pylist()
    raised = recording.query(
        "select model, path, call, step, error from calls where error is not null order by seq desc limit 1"
    ).to_pylist()
    full = recording.query(
        "select count(*) n, step, model from calls where path = '' and phase = 'forward' "
        "group by rank, step, model order by n desc, step limit 1"
    ).to_pylist()
    several = len(recording.models) > 1
    return Overview(
        **vars(numbers_of(recording)),
        steps=steps["n"],
        first_step=steps["low"],
        last_step=steps["high"],
        models=recording.models,
        modules=places["modules"],
        functions=places["functions"],
        calls={row["phase"]: row["n"] for row in phases},
        error=(_call(raised[0], several), raised[0]["error"]) if raised else None,
        crowded=(full[0]["n"], full[0]["step"], full[0]["model"] or ROOT) if full else None,
    )


def steps_of(recording: Recording, rank: int | None = None) -> list[int]:
    """List the steps of which something was recorded, by any rank or by one."""
    where = "" if rank is None else f" where rank = {int(rank)}"
    rows = recording.query(
        f"select distinct step from calls{where} union select distinct step from values{where} order by step"
    )
    return rows["step"].to_pylist()


def rows_of_step(recording: Recording, step: int, *, rank: int, sites: Collection[str] = ()) -> list[Row]:
    """Give what ran in one step, in order.

    Args:
        recording: where to look.
        step: the step.
        rank: the process.
        sites: selections of modules, as `rows_of_sites` takes them; all by default.

    Raises:
        SelectionError: a selection matches no module that was recorded.
        NotRecordedError: the step was not recorded.
    """
    rows = _rows(recording, f"rank = {int(rank)} and step = {int(step)}", sites)
    if not rows and not sites:
        known = steps_of(recording, rank)
        where = f" of rank {rank}" if len(recording.ranks) > 1 else ""
        ones = f"only {known[0]} was" if known else "none was"
        if len(known) > 1:
            ones = f"the recorded ones are {spelled(known, step)}"
        raise NotRecordedError(f"step {step}{where} was not recorded; {ones}")
    return rows


def rows_of_sites(recording: Recording, sites: Collection[str], *, rank: int) -> list[Row]:
    """Give what was seen of some modules over all steps, in order.

    Args:
        recording: where to look.
        sites: selections of modules, each with a kind if that alone is meant, ``features.*``, ``fc:grad_output``; or addresses.
        rank: the process.

    Raises:
        SelectionError: a selection matches no module that was recorded.
    """
    return _rows(recording, f"rank = {int(rank)}", sites)


def _rows(recording: Recording, where: str, sites: Collection[str]) -> list[Row]:
    parts = parts_of(recording, sites) if sites else None
    if parts is not None:
        places = ", ".join(dict.fromkeys(f"({_literal(part.model)}, {_literal(part.path)})" for part in parts))
        where += f" and (coalesce(model, ''), coalesce(path, '')) in ({places})"
    calls = recording.query(f"select * from calls where {where} order by seq").to_pylist()
    values = recording.query(f"select * exclude (sketch) from values where {where} order by seq").to_pylist()
    rows = {row["seq"]: _row(row) for row in calls}
    free: list[Row] = []
    wanted = _by_place(parts or ())
    for value in values:
        if parts is not None and not any(
            part.means_call(value["call"] or 0, value["step"]) and part.means_value(value["kind"], value["slot"] or "")
            for part in wanted[value["model"] or "", value["path"] or ""]
        ):
            continue
        owner = rows.get(value["call_seq"])
        if owner is None:
            owner = _row({**value, "type": "", "phase": None, "depth": 0, "duration_ns": None, "error": None})
            free.append(owner)
        owner.values.append(_seen(value))
    found = [
        row
        for row in rows.values()
        if row.values
        or parts is None
        or any(part.asked.kind is None and part.means_call(row.call, row.step) for part in wanted[row.model, row.path])
    ]
    if parts and not found and not free:
        raise NotRecordedError(
            f"nothing is recorded of {', '.join(map(repr, sites))}\nthe module is in the recording: leave out kind, call or step"
        )
    return sorted([*found, *free], key=lambda row: row.seq)


def _by_place(parts: Collection[Part]) -> dict[tuple[str, str], list[Part]]:
    found: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        found.setdefault((part.model, part.path), []).append(part)
    return found


def _row(row: dict[str, Any]) -> Row:
    return Row(
        seq=row["seq"],
        step=row["step"],
        model=row["model"] or "",
        path=row["path"] or "",
        type=row["type"] or "",
        phase=row["phase"],
        call=row["call"] or 0,
        depth=row["depth"] or 0,
        duration_ns=row["duration_ns"],
        error=row["error"],
        values=[],
    )


def _seen(row: dict[str, Any]) -> Seen:
    return Seen(
        kind=row["kind"],
        slot=row["slot"] or "",
        shape=None if row["shape"] is None else tuple(row["shape"]),
        dtype=row["dtype"],
        statistics={name: row[name] for name in STATISTICS},
        note=row["note"],
    )


def _call(row: dict[str, Any], several: bool) -> str:
    path, op = split_op(row["path"] or "")
    place = format_place(path, op=op, model=row["model"] if several else None)
    return f"{place}#{row['call'] or 0}@{row['step']}"


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
