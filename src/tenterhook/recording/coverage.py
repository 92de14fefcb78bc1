"""What was asked for, and what of it was seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Coverage", "coverage_of"]

_SHOWN = 10


@dataclass(frozen=True)
class Coverage:
    """How much of a selection was seen.

    Attributes:
        modules: number of modules known.
        selected: paths that were selected.
        fired: selected paths of which at least one forward call was recorded.
        missing: (path, reason) of each selected module that was not seen, or of which some kind was not.
        told: what was changed so that it could be seen, as sentences.
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
        if not self.modules:
            return "nothing is known of the modules: the recording was not finished"
        return "\n".join([self._counted(), *self.told])

    def _counted(self) -> str:
        counts = f"{len(self.fired)} of {len(self.selected)} selected modules were seen"
        if not self.missing:
            return counts if len(self.fired) == len(self.selected) else f"{counts}, no reason is known for the others"
        shown = [f"  {path}: {reason}" for path, reason in self.missing[:_SHOWN]]
        if len(self.missing) > _SHOWN:
            shown.append(f"  ... and {len(self.missing) - _SHOWN} more")
        return "\n".join([f"{counts}; not seen, or not whole:", *shown])


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
