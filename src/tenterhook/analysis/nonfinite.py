"""Where the first number of a recording is that is not finite, and where it may have come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tenterhook.address import Address, format_place, split_op
from tenterhook.analysis.masks import SIGNS, Signs, is_handed_on, is_meant
from tenterhook.recording import Recording

__all__ = ["COUNTS", "NOT_FINITE", "FirstNonfinite", "Nonfinite", "address_of", "find_nonfinite"]

COUNTS = (("nan", "nan_count"), ("+inf", "posinf_count"), ("-inf", "neginf_count"))
"""How numbers that are not finite are called, and the statistic that counts them."""

NOT_FINITE = "(nan_count > 0 or posinf_count > 0 or neginf_count > 0)"
"""The condition of a query for values that hold one."""


@dataclass(frozen=True)
class FirstNonfinite:
    """The first value of a recording of some sort with numbers in it that are not finite.

    Attributes:
        address: its address.
        counts: what is in it: ``{"nan": 3}``.
        place: its module, as ``tenterhook show --site`` takes it.
        step: its step.
        rank: the process that saw it.
        origin: what is known of where it came from.
    """

    address: str
    counts: dict[str, int]
    place: str
    step: int
    rank: int
    origin: str


@dataclass(frozen=True)
class Nonfinite:
    """What a recording holds that is not finite.

    Attributes:
        first: the first value; masks do not count.
        first_born: the first with a NaN or +inf, where `first` has -inf alone.
        masks: how many values hold -inf that are meant.
        first_mask: the first of these.
    """

    first: FirstNonfinite | None
    first_born: FirstNonfinite | None
    masks: int
    first_mask: FirstNonfinite | None


_Place = tuple[int, int, int]  # step, seq, rank


def find_nonfinite(recording: Recording, *, several: bool) -> Nonfinite:
    """Find them.

    Args:
        recording: where to look.
        several: whether places are told with their model.
    """
    groups = recording.query(
        f"select path, kind, slot, {SIGNS}, count(*) n, min({{'step': step, 'seq': seq, 'rank': rank}}) place "
        f"from values where {NOT_FINITE} group by all"
    ).to_pylist()
    places: dict[str, list[_Place]] = {"first": [], "born": [], "mask": []}
    masks, faults, handed_on = 0, set[str](), set[str]()
    for group in groups:
        signs, op = Signs(group["born"], group["zeros"], group["small"]), split_op(group["path"] or "")[1]
        meant = is_meant(group["kind"], group["slot"] or "", op, signs)
        if meant and group["kind"] == "output" and is_handed_on(op, signs):
            handed_on.add(group["path"])
            continue  # counted below
        masks += group["n"] if meant else 0
        place = _place(group["place"])
        places["mask" if meant else "first"].append(place)
        if signs.born:
            places["born"].append(place)
        if not meant and op and group["kind"] == "output":
            faults.add(group["path"])
    for row in _handed_on(recording, handed_on, faults):
        masks += 0 if row["fault"] else row["n"]
        places["first" if row["fault"] else "mask"].append(_place(row["place"]))
    found = {
        what: _first(recording, min(those), several) if those else None
        for what, those in places.items()
        if what != "born" or (those and min(those) != min(places["first"]))
    }
    return Nonfinite(found["first"], found.get("born"), masks, found["mask"])


def _place(found: dict[str, int]) -> _Place:
    return found["step"], found["seq"], found["rank"]


def _handed_on(recording: Recording, paths: set[str], faults: set[str]) -> list[dict[str, Any]]:
    """Count the -inf that functions hand on: masks, or what a function before in the same forward got wrong.

    Args:
        recording: where to look.
        paths: the functions.
        faults: the functions that got something wrong in some step.
    """
    if not paths:
        return []
    module = "regexp_replace({}.path, '(^|/)[^/]*$', '')"
    fault = "false"
    if faults:
        fault = f"""exists (select 1 from values f where f.path in {_listed(faults)} and f.kind = 'output' and f.step = v.step
            and f.rank = v.rank and f.seq < v.seq and f.model is not distinct from v.model
            and {module.format("f")} = {module.format("v")}
            and (f.nan_count > 0 or f.posinf_count > 0 or f.neginf_count > 0))"""
    return recording.query(
        f"""
        select fault, count(*) n, min(place) place from (
            select {{'step': step, 'seq': seq, 'rank': rank}} place, {fault} fault, {SIGNS} from values v
            where path in {_listed(paths)} and kind = 'output' and {NOT_FINITE}
        ) where small and not born and not zeros group by fault
        """
    ).to_pylist()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _listed(texts: set[str]) -> str:
    return "(" + ", ".join(map(_quoted, sorted(texts))) + ")"


_ORIGINS = {
    "input": "nothing before it was not finite: it came from outside, or out of a function between modules (--ops shows these)",
    "param": "the parameter itself is not finite",
}
_BROUGHT_IN_BY = {"output": "input", "grad_input": "grad_output"}
_FLOWS = {"output": "output", "grad_output": "gradient"}  # kinds that follow one another from place to place


def _first(recording: Recording, place: _Place, several: bool) -> FirstNonfinite:
    step, seq, rank = place
    [row] = recording.query(
        f"select * exclude (sketch) from values where step = {step} and seq = {seq} and rank = {rank} and {NOT_FINITE} limit 1"
    ).to_pylist()
    path, op = split_op(row["path"] or "")
    counts = {word: int(row[name]) for word, name in COUNTS if row[name]}
    return FirstNonfinite(
        address=address_of(row, several=several),
        counts=counts,
        place=format_place(path, op=op, model=row["model"] if several else None),
        step=step,
        rank=rank,
        origin=_origin(recording, row, several=several)
        + ("; -inf alone may be a mask that it makes" if list(counts) == ["-inf"] and not op else "")
        + ("; it did not reach the model's output" if _was_repaired(recording, row) else "")
        + _between_samples(recording, row),
    )


def _was_repaired(recording: Recording, row: dict[str, Any]) -> bool:
    """Tell whether all that the model gave after a value of its forward, in the same step, is known to be finite."""
    if row["kind"] not in ("input", "output") or not row["path"]:
        return False
    [given] = recording.query(
        f"select count(*) n, count(*) filter (nan_count is null or {NOT_FINITE}) bad from values where path = '' "
        f"and kind = 'output' and {_same_step(row)} and seq > {int(row['seq'])} and model = {_quoted(row['model'])}"
    ).to_pylist()
    return bool(given["n"]) and not given["bad"]


def _same_step(row: dict[str, Any]) -> str:
    return f"step = {int(row['step'])} and rank = {int(row['rank'])}"


def _recorded_before(recording: Recording, row: dict[str, Any], *, several: bool) -> str:
    """Say that what came before a value in its step is finite, masks aside, and of what flows what came last.

    In backward what ran later has its gradient earlier.
    """
    before = f"{_same_step(row)} and seq < {int(row['seq'])}"
    [masks] = recording.query(f"select count(*) n from values where {before} and {NOT_FINITE}").to_pylist()
    words = f"what was recorded before it is finite{', but for masks' if masks['n'] else ''}"
    flow = _FLOWS.get(row["kind"])
    last = recording.query(
        f"select path, model from values where kind = '{row['kind']}' and {before} order by seq desc limit 1"
    ).to_pylist()
    if flow is None or not last:
        return words
    path, op = split_op(last[0]["path"] or "")
    return f"{words}: the {flow} before it was that of {format_place(path, op=op, model=last[0]['model'] if several else None)}"


def _between_samples(recording: Recording, row: dict[str, Any]) -> str:
    """Say which steps right before that of a row were not recorded."""
    [found] = recording.query(
        "select max(step) last from (select step, rank from calls union all select step, rank from values) "
        f"where step < {int(row['step'])} and rank = {int(row['rank'])}"
    ).to_pylist()
    begin, end = (-1 if found["last"] is None else found["last"]) + 1, row["step"] - 1
    if begin > end:
        return ""
    return (
        f"; step {end} before it was not recorded"
        if begin == end
        else f"; steps {begin} to {end} before it were not recorded"
    )


def _origin(recording: Recording, row: dict[str, Any], *, several: bool) -> str:
    """Say whether a value arose in its module or came in with what that was given; rows before it are finite."""
    kind = row["kind"]
    if kind in _ORIGINS:
        return _ORIGINS[kind]
    source = _BROUGHT_IN_BY.get(kind)
    is_function = bool(split_op(row["path"] or "")[1])  # what functions are given is not recorded
    if source is None or row["call_seq"] is None or is_function:
        return _recorded_before(recording, row, several=several)
    [given] = recording.query(
        f"select count(*) n, count(*) filter (nan_count is null) unknown from values where kind = '{source}' "
        f"and rank = {int(row['rank'])} and call_seq = {int(row['call_seq'])}"
    ).to_pylist()
    if not given["n"]:
        kinds = ",".join(dict.fromkeys([source, *sorted(set(recording.manifest.kinds or ["output"]))]))
        return f"its {source} was not recorded, so it may have come in with that: --kinds {kinds} tells"
    if given["unknown"]:
        return f"not all of its {source} has statistics, so it may have come in with that"
    return f"its {source} was finite, so it arose in this module or in its parameters"


def address_of(row: dict[str, Any], *, several: bool) -> str:
    """Write the address of a row of `values`, with its model where there are several."""
    path, op = split_op(row["path"] or "")
    model = row["model"] if several else None
    return str(Address(path, row["kind"], row["slot"] or "", model, op, row["call"], row["step"]))
