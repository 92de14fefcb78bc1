"""The lines that draw a tree of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenterhook.address import ROOT
from tenterhook.analysis.overview import Row

__all__ = ["Guide", "draw_guides"]


@dataclass(frozen=True)
class Guide:
    """How a call stands in the tree.

    Attributes:
        prefix: the lines before its name.
        continued: the lines before what else belongs to it.
        label: its path, shortened by that of the call around it.
    """

    prefix: str
    continued: str
    label: str


def draw_guides(rows: Sequence[Row]) -> dict[int, Guide]:
    """Draw the tree of calls of one phase, each with its depth, in order; the result is by sequence number."""
    guides: dict[int, Guide] = {}
    around: list[str] = []
    for row, open_levels in zip(rows, _open_levels(rows), strict=True):
        depth = min(row.depth, len(around))
        del around[depth:]
        parent = around[-1] if around else None
        label = row.path or ROOT
        if row.op and parent is not None:
            label = f"{row.op}()"
        elif parent and label.startswith(parent + "."):
            label = label[len(parent) + 1 :]
        around.append(row.path)
        bars = "".join("│ " if level in open_levels else "  " for level in range(1, depth))
        more = depth in open_levels
        guides[row.seq] = Guide(
            bars + (("├ " if more else "└ ") if depth else ""),
            bars + (("│ " if more else "  ") if depth else ""),
            label,
        )
    return guides


def _open_levels(rows: Sequence[Row]) -> list[frozenset[int]]:
    """Say for each row at which levels, its own included, more siblings follow."""
    found: list[frozenset[int]] = []
    below: frozenset[int] = frozenset()
    for row in reversed(rows):
        mine = frozenset(level for level in below if level <= row.depth)
        found.append(mine)
        below = mine | {row.depth}
    return found[::-1]
