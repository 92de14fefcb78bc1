"""Tables of calls and values: columns that are aligned, never cut a number, and give way when the terminal is narrow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from tenterhook.analysis.masks import is_meant, signs_of
from tenterhook.analysis.overview import Row, Seen
from tenterhook.reporters.numbers import number, shape

__all__ = ["STATISTICS_COLUMNS", "Column", "Line", "Narrow", "aligned"]

_GAP = 2
_SHORTEST_NAME = 16
_SHORTEST_OF_ALL = 8


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
        name: whether it is the one that is shortened when optional columns are gone.
        optional: how soon it is left out when the terminal is narrow: the highest first; those below 1 only when the name has been
            shortened, too; None for never.
        blank: whether it may be left out where it says nothing on any line.
    """

    title: str
    cell: Callable[[Line], str]
    right: bool = False
    style: str = ""
    name: bool = False
    optional: float | None = None
    blank: bool = False


@dataclass
class Narrow:
    """What tables had to do without, since the terminal is narrow.

    Attributes:
        columns: titles of the columns that were left out of some table, with their places.
        names: whether names were shortened.
    """

    columns: dict[str, int] = field(default_factory=dict)
    names: bool = False

    def words(self) -> str:
        """Say it, and how to see all; empty where nothing is missing."""
        missing = (
            [f"left out for width: {', '.join(sorted(self.columns, key=self.columns.__getitem__))}"]
            if self.columns
            else []
        )
        missing += ["names are shortened"] if self.names else []
        return f"{'; '.join(missing)} (--wide shows all)" if missing else ""


def aligned(lines: Sequence[Line], columns: Sequence[Column], width: int | None, narrow: Narrow) -> list[Text]:
    """Set lines in columns that fit into a width, a heading before them: columns are left out, names shortened, never a number.

    Args:
        lines: what to set.
        columns: the columns.
        width: how wide they may be; None for as wide as they are.
        narrow: is told what was left out and shortened.
    """
    if any(mark(line) for line in lines):
        columns = [*columns, Column("", mark, style="bold red")]
    cells = [[column.cell(line) for line in lines] for column in columns]
    columns, cells = _saying_something(columns, cells)
    widths = [
        max([cell_len(column.title), *map(cell_len, texts)]) for column, texts in zip(columns, cells, strict=True)
    ]
    kept = list(range(len(columns)))
    if width is not None:
        kept = _fit(columns, widths, width)
        narrow.columns |= {column.title: place for place, column in enumerate(columns) if place not in kept}
        narrow.names = narrow.names or any(
            cell_len(text) > widths[place] for place in kept for text in cells[place] if columns[place].name
        )
    found = [_set([columns[place].title for place in kept], [columns[place] for place in kept], kept, widths)]
    found[0].stylize("dim")
    for at, line in enumerate(lines):
        text = _set([cells[place][at] for place in kept], [columns[place] for place in kept], kept, widths, styled=True)
        if not line.first:
            text.stylize("dim")
        found.append(text)
    return found


def _set(
    words: Sequence[str], columns: Sequence[Column], kept: Sequence[int], widths: Sequence[int], *, styled: bool = False
) -> Text:
    """Set one line, without blanks at its end."""
    line = Text()
    for place, (word, column) in enumerate(zip(words, columns, strict=True)):
        width = widths[kept[place]]
        shown = word if cell_len(word) <= width else f"{set_cell_size(word, width - 1).rstrip()}\N{HORIZONTAL ELLIPSIS}"
        blank = " " * (width - cell_len(shown))
        line.append(" " * _GAP if place else "")
        line.append(
            f"{blank}{shown}" if column.right else f"{shown}{blank}", style=_style(column, shown) if styled else None
        )
    line.rstrip()
    return line


def mark(line: Line) -> str:
    """Write what is wrong on a line, after an exclamation mark; without one the -inf of a mask; empty where nothing is."""
    if line.first and line.row.error:
        return "! raised"
    if line.value is None:
        return ""
    found = line.value.nonfinite
    minus = found.get("-inf", 0)
    if not found.get("nan") and not found.get("+inf") and minus:
        value = line.value
        meant = is_meant(value.kind, value.slot, line.row.op, signs_of(value.statistics))
        return f"{'' if meant else '! '}{minus:,} -inf"
    infinite = found.get("+inf", 0) + minus
    parts = [f"{amount:,} {word}" for word, amount in (("nan", found.get("nan", 0)), ("inf", infinite)) if amount]
    return f"! {', '.join(parts)}" if parts else ""


def _saying_something(columns: Sequence[Column], cells: list[list[str]]) -> tuple[Sequence[Column], list[list[str]]]:
    kept = [place for place, column in enumerate(columns) if not column.blank or set(cells[place]) - {"", "-"}]
    return [columns[place] for place in kept], [cells[place] for place in kept]


def _style(column: Column, word: str) -> str:
    return "dim" if column.cell is mark and not word.startswith("!") else column.style


def _fit(columns: Sequence[Column], widths: list[int], width: int) -> list[int]:
    """Choose the columns that fit, and shorten the width of the name where that does not suffice."""
    kept = list(range(len(columns)))

    def too_much() -> int:
        return sum(widths[place] + _GAP for place in kept) - _GAP - width

    def leave_out(levels: Sequence[float]) -> None:
        nonlocal kept
        for level in levels:
            if too_much() > 0:
                kept = [place for place in kept if columns[place].optional != level]

    levels = sorted({column.optional for column in columns if column.optional is not None}, reverse=True)
    leave_out([level for level in levels if level >= 1])
    _shorten(columns, widths, too_much(), _SHORTEST_NAME)
    leave_out([level for level in levels if level < 1])
    _shorten(columns, widths, too_much(), _SHORTEST_OF_ALL)
    return kept


def _shorten(columns: Sequence[Column], widths: list[int], by: int, shortest: int) -> None:
    for place, column in enumerate(columns):
        if column.name and by > 0:
            widths[place] = max(min(widths[place], shortest), widths[place] - by)


def _statistic(name: str, title: str | None = None, optional: float | None = None) -> Column:
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
    Column("shape", _shape, right=True, style="green", optional=0.2),
    Column("dtype", _dtype, style="green", optional=5, blank=True),
    _statistic("mean", optional=0.4),
    _statistic("std", optional=0.6),
    _statistic("min", optional=2),
    _statistic("max", optional=2),
    _statistic("absmax", "|max|"),
    Column("zeros", _zeros, right=True, optional=3, blank=True),
    Column("ms", _milliseconds, right=True, style="dim", optional=6, blank=True),
)
"""What is said of a value. Left out in this order: time, type, zeros, least and greatest; behind shortened names std, mean, shape."""
