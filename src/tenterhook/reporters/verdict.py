"""What is said of the numbers of a recording: whether they are finite, where the first fault is, and what passes nothing on."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tenterhook.analysis.nonfinite import FirstNonfinite
from tenterhook.analysis.numbers import Numbers
from tenterhook.analysis.stuck import Stuck
from tenterhook.reporters.numbers import plural

__all__ = ["about_numbers", "finite", "some"]

_SHOWN = 6


def finite(seen: Numbers) -> str:
    """Say behind a number of values how many are not finite, and of how many that is not known."""
    if seen.nonfinite is None:
        return ", none of them measured (no statistics)"
    unknown = f"{seen.unmeasured:,} not measured (no statistics)"
    masks = f"{plural(seen.masks, 'mask')} of -inf" if seen.masks else ""
    if seen.nonfinite > seen.masks:
        bad = f"{seen.nonfinite - seen.masks:,} of them not finite"
        return "".join(f", {part}" for part in (bad, masks, unknown if seen.unmeasured else "") if part)
    if seen.unmeasured:
        return f", {unknown}, the others finite{f' but for {masks}' if masks else ''}"
    return f", all finite{f' but for {masks}' if masks else ''}" if seen.values else ""


def about_numbers(seen: Numbers, name: str, *, ranks: bool) -> list[tuple[str, str]]:
    """Give the lines, with their labels, on what is not finite and on what is stuck.

    Args:
        seen: what is known of the numbers.
        name: how the recording is called in what to type next.
        ranks: whether it has several.
    """
    rows: list[tuple[str, str]] = []
    if seen.first_nonfinite:
        rows += _first(seen.first_nonfinite, "first !", ranks, name)
    if seen.first_born:
        rows += _first(seen.first_born, "then !", ranks)
    if seen.first_mask:
        why = "-inf that a function put there or was given, or beside zeros alone"
        rows.append(("masks", f"the first is {seen.first_mask.address}; {why}"))
    return rows + _stuck(seen.stuck)


def _first(first: FirstNonfinite, label: str, ranks: bool, name: str | None = None) -> list[tuple[str, str]]:
    """Say where something not finite is; with what to type next where a recording is named."""
    what = ", ".join(f"{amount:,} {word}" for word, amount in first.counts.items())
    where, rank = (f" of rank {first.rank}", f" --rank {first.rank}") if ranks or first.rank > 0 else ("", "")
    if name is None:
        return [(label, f"{first.address}{where} has {what}")]
    site = shlex.quote(first.place)
    return [
        (label, f"{first.address}{where} has {what}; {first.origin}"),
        ("next", f"tenterhook show {name}{rank} --step {first.step} --site {site}"),
    ]


def _stuck(stuck: Sequence[Stuck]) -> list[tuple[str, str]]:
    """Name the activations that pass nothing on, a line for each thing that they give."""
    by_what: dict[str, list[Stuck]] = {}
    for one in stuck:
        by_what.setdefault(one.gives, []).append(one)
    rows = []
    for what, those in by_what.items():
        names = some([f"{one.place} ({one.type})" if one.type else one.place for one in those])
        give = f"activation{' gives' if len(those) == 1 else 's give'} only {what}"
        rows.append(("stuck !", f"{len(those):,} {give}, in every call: {names}"))
    return rows


def some(names: Sequence[str]) -> str:
    """Write the first few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
