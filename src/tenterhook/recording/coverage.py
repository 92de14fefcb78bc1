"""What was asked for, and what of it was seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Coverage", "coverage_of"]

_SHOWN = 10
_NAMED = 6


@dataclass(frozen=True)
class Coverage:
    """How much of a selection was seen.

    Attributes:
        modules: number of modules known.
        selected: paths that were selected.
        fired: selected paths of which at least one forward call was recorded.
        missing: (path, reason) of each selected module that was not seen, or of which some kind was not.
        told: which ranks were killed, which steps are missing, and what was changed so that the rest could be seen, as sentences.
    """

    modules: int
    selected: list[str]
    fired: list[str]
    missing: list[tuple[str, str]]
    told: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all that was asked for was seen."""
        return not self.missing

    def __str__(self) -> str:
        return "\n".join([self._counted(), *self.told])

    def _counted(self) -> str:
        if not self.modules:
            return "nothing is known of the modules: the recording was not finished"
        counts = f"{len(self.fired)} of {len(self.selected)} selected modules were seen"
        if not self.missing:
            return counts if len(self.fired) == len(self.selected) else f"{counts}, no reason is known for the others"
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.missing:
            by_reason.setdefault(reason, []).append(path)
        shown = [f"  {self._who(paths)}: {reason}" for reason, paths in list(by_reason.items())[:_SHOWN]]
        if len(by_reason) > _SHOWN:
            left = sum(map(len, list(by_reason.values())[_SHOWN:]))
            shown.append(f"  ... and {left} more, for {len(by_reason) - _SHOWN} other reasons")
        return "\n".join([f"{counts}; not seen, or not whole:", *shown])

    def _who(self, paths: list[str]) -> str:
        """Name modules that have a reason in common, the first few of many."""
        if len(paths) > 1 and len(paths) == len(self.selected):
            return f"all {len(paths)}"
        more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
        return f"{', '.join(paths[:_NAMED])}{more}"


def coverage_of(rows: Iterable[dict[str, Any]], *, several_models: bool, told: Iterable[str] = ()) -> Coverage:
    """Count the rows of the table `modules`.

    Args:
        rows: the rows, one for each module.
        several_models: whether to write `Net/conv1` in place of `conv1`.
        told: what was changed so that hooks see everything.
    """
    rows = list(rows)
    selected, fired, missing = [], [], []
    for row in rows:
        if not row["selected"]:
            continue
        path = row["path"] or "(root)"
        name = f"{row['model']}/{path}" if several_models else path
        selected.append(name)
        if row["calls"]:
            fired.append(name)
        if row["reason"]:
            missing.append((name, row["reason"]))
        elif not row["calls"]:
            missing.append((name, "never called"))
    return Coverage(modules=len(rows), selected=selected, fired=fired, missing=missing, told=list(told))
