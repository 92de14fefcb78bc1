"""Tables of calls and values: columns that are aligned, never cut off a number, and give way when the terminal is narrow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from tenterhook.analysis.overview import Row, Seen
from tenterhook.reporters.numbers import number, shape

__all__ = ["STATISTICS_COLUMNS", "Column", "Line", "aligned"]

_GAP = 2
_SHORTEST_NAME = 16


@dataclass(frozen=True)
class Line:
    """One line of a table: a call with one of its values, or a further value of the call above.

    Attributes:
        row: the call.
        value: the value; None where nothing was seen of the call.
        first: whether this is the call's first line.
        kind: whether the value's kind has to be said, since it is not the one that such a list is about.
    """

    row: Row
    value: Seen | None
    first: bool
    kind: bool = False

    @property
    def what(self) -> str:
        """Which value of the call this is, where that is not plain: its kind, and where it is in a nested one."""
        if self.value is None:
            return ""
        return f":{self.value.site}" if self.kind else self.value.slot


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: its heading.
        cell: what it says of a line.
        right: whether it is aligned to the right.
        style: rich style.
        name: whether it is the one that is shortened when nothing else helps.
        optional: how soon it is left out when the terminal is narrow: the highest first; 0 for never.
        blank: whether it may be left out where it says nothing on any line.
    """

    title: str
    cell: Callable[[Line], str]
    right: bool = False
    style: str = ""
    name: bool = False
    optional: int = 0
    blank: bool = False


def aligned(lines: Sequence[Line], columns: Sequence[Column], width: int) -> Table:
    """Make a table of lines that fits into a width: optional columns are left out, then names are shortened, never numbers."""
    if any(mark(line) for line in lines):
        columns = [*columns, Column("", mark, style="bold red")]
    cells = [[column.cell(line) for line in lines] for column in columns]
    columns, cells = _saying_something(columns, cells)
    widths = [
        max([cell_len(column.title), *map(cell_len, texts)]) for column, texts in zip(columns, cells, strict=True)
    ]
    kept = _fitting(columns, widths, width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim", collapse_padding=True)
    for place in kept:
        column = columns[place]
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            style=column.style,
            min_width=min(widths[place], _SHORTEST_NAME) if column.name else widths[place],
        )
    for place, line in enumerate(lines):
        table.add_row(*(Text(cells[column][place]) for column in kept), style=None if line.first else "dim")
    return table


def mark(line: Line) -> str:
    """Write what is wrong on a line, after an exclamation mark; empty where nothing is."""
    if line.first and line.row.error:
        return "! raised"
    if line.value is None:
        return ""
    found = line.value.nonfinite
    infinite = found.get("+inf", 0) + found.get("-inf", 0)
    parts = [f"{amount:,} {word}" for word, amount in (("nan", found.get("nan", 0)), ("inf", infinite)) if amount]
    return f"! {', '.join(parts)}" if parts else ""


def _saying_something(columns: Sequence[Column], cells: list[list[str]]) -> tuple[Sequence[Column], list[list[str]]]:
    kept = [place for place, column in enumerate(columns) if not column.blank or set(cells[place]) - {"", "-"}]
    return [columns[place] for place in kept], [cells[place] for place in kept]


def _fitting(columns: Sequence[Column], widths: Sequence[int], width: int) -> list[int]:
    kept = list(range(len(columns)))
    for level in sorted({column.optional for column in columns if column.optional}, reverse=True):
        if sum(widths[place] + _GAP for place in kept) - _GAP <= width:
            break
        kept = [place for place in kept if columns[place].optional != level]
    return kept


def _statistic(name: str, title: str | None = None, optional: int = 0) -> Column:
    def cell(line: Line) -> str:
        return "" if line.value is None else number(line.value.statistics.get(name))

    return Column(title or name, cell, right=True, optional=optional, blank=True)


def _shape(line: Line) -> str:
    return "" if line.value is None else shape(line.value.shape)


def _dtype(line: Line) -> str:
    return (line.value.dtype or "") if line.value is not None else ""


def _zeros(line: Line) -> str:
    if line.value is None:
        return ""
    zeros, total = line.value.statistics.get("zero_count"), line.value.statistics.get("numel")
    if zeros is None or not total:
        return "-"
    part = zeros / total
    if 0 < part < 0.01:
        return "<1 %"
    return ">99 %" if 0.99 < part < 1 else f"{100 * part:.0f} %"


def _milliseconds(line: Line) -> str:
    return number(line.row.duration_ns / 1e6) if line.first and line.row.duration_ns is not None else ""


STATISTICS_COLUMNS = (
    Column("shape", _shape, right=True, style="green"),
    Column("dtype", _dtype, style="green", optional=5, blank=True),
    _statistic("mean"),
    _statistic("std"),
    _statistic("min", optional=2),
    _statistic("max", optional=2),
    _statistic("absmax", "|max|"),
    Column("zeros", _zeros, right=True, optional=3, blank=True),
    Column("ms", _milliseconds, right=True, style="dim", optional=6, blank=True),
)
"""What is said of a value. Left out in this order: time, type, zeros, least and greatest."""
