"""A recording in a few lines, as ``print`` shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenterhook.recording.rank_ends import told_of_unclosed

if TYPE_CHECKING:
    from tenterhook.recording.recording import Recording

__all__ = ["describe"]


def describe(recording: Recording) -> str:
    """Write what a recording holds, whether its numbers are finite, and how it ended."""
    manifest = recording.manifest
    [seen] = recording.query(
        "select count(*) n, count(distinct (model, path)) modules, count(nan_count) measured from values"
    ).to_pylist()
    recorded = len(recording.steps)
    steps = f"{recorded} of {manifest.steps} steps" if manifest.steps > recorded else f"{recorded} steps"
    ranks = f" by {len(recording.ranks)} ranks" if len(recording.ranks) > 1 else ""
    first = recording.first_nonfinite() if seen["measured"] else None
    finite = "all finite" if seen["measured"] == seen["n"] else f"{seen['measured']:,} of them measured, those finite"
    end = "complete" if manifest.complete else "not finished"
    lines = [
        f"Recording of {', '.join(recording.models[:3]) or 'no model'} ({recording.path or 'in memory'})",
        f"  {steps}{ranks}, {seen['n']:,} values of {seen['modules']:,} modules and functions",
        f"  {f'first not finite: {first!r}' if first is not None else f'values: {finite}' if seen['measured'] else 'no statistics'}",
        f"  {end}" + (f", ended by {manifest.error}" if manifest.error else ""),
        *(f"  {words}" for words in told_of_unclosed(recording.unclosed)),
    ]
    return "\n".join([*lines, f"  partial: {manifest.partial}"] if manifest.partial else lines)
