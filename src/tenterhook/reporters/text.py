"""A recording in the terminal: its verdict, what ran in a step as a tree, a list or a table, and what was not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tenterhook.address import ROOT
from tenterhook.analysis.overview import Overview, Row, Seen
from tenterhook.recording import Manifest
from tenterhook.recording.coverage import Coverage
from tenterhook.reporters.numbers import number, plural, shape, share, span
from tenterhook.reporters.summary import covered, facts

__all__ = ["FORMS", "Page", "print_page"]

FORMS = ("tree", "order", "table")
"""``tree``: calls nested, a section for each direction. ``order``: one list in the order of execution. ``table``: every value with
all its statistics."""

_NAME = 16
_REPEATS = 3
_TITLES = {"forward": "forward", "backward": "backward", "recompute": "recomputed by checkpointing", None: "parameters"}
_MAIN = {"forward": ("output", "input"), "recompute": ("output", "input"), "backward": ("grad_output", "grad_input")}


@dataclass(frozen=True)
class Page:
    """What is to be shown, finished.

    Attributes:
        name: how the recording is called in what to type next.
        rows: what ran in the step, or the sites asked for.
        step: the step that `rows` is of; None for all steps.
        steps: every recorded step.
        rank: the process that `rows` is of.
        ranks: every process.
        sites: the sites that were asked for; empty for all.
    """

    name: str
    manifest: Manifest
    overview: Overview
    coverage: Coverage
    rows: Sequence[Row]
    step: int | None
    steps: Sequence[int]
    rank: int = 0
    ranks: Sequence[int] = (0,)
    sites: Sequence[str] = field(default=())


def print_page(console: Console, page: Page, *, form: str = "tree", limit: int = 100) -> None:
    """Print a recording.

    Args:
        console: where to.
        page: what to print.
        form: one of `FORMS`.
        limit: most lines in each section, 0 for all.
    """
    _print_verdict(console, page)
    if not page.rows:
        return
    if form == "table":
        console.print()
        console.print(_heading(page, "every value"))
        _print_table(console, page.rows, _value_columns(console.width, page), limit, values=True)
    elif form == "order":
        console.print()
        console.print(_heading(page, "in order of execution"))
        _print_table(console, page.rows, _order_columns(console.width, page), limit)
    else:
        for phase in (*_MAIN, None):
            rows = [row for row in page.rows if row.phase == phase]
            if rows:
                console.print()
                console.print(_heading(page, _TITLES[phase]))
                shown, folded = _fold(rows) if not page.sites else (rows, [])
                _print_table(console, shown, _tree_columns(console.width, page, shown), limit)
                for line in [*folded, *_never_came(shown)]:
                    console.print(Text(f"  {line}", style="dim"), soft_wrap=True)
    _print_more(console, page)


def _print_verdict(console: Console, page: Page) -> None:
    seen, manifest = page.overview, page.manifest
    counts = [plural(seen.steps, "step"), plural(seen.modules, "module"), plural(sum(seen.calls.values()), "call")]
    text = f"{', '.join(counts)}, {plural(seen.values, 'value')}"
    rows: list[tuple[str, str]] = []
    if not manifest.complete:
        state, style = "UNFINISHED", "bold yellow"
        rows.append(
            ("why", "it was never closed: the run was killed, or goes on; what had been written by then is here")
        )
    elif manifest.partial:
        state, style = "PARTIAL", "bold yellow"
        rows.append(("why", manifest.partial))
    else:
        state, style = "complete", "bold green"
    if seen.error:
        rows.append(("raised", f"{seen.error[0]}: {seen.error[1]}"))
    if seen.nonfinite:
        what = ", ".join(f"{amount:,} {word}" for word, amount in seen.first_counts.items())
        text += f", {seen.nonfinite:,} of them not finite"
        style = "bold red"
        rows.append(("first !", f"{seen.first_nonfinite} has {what}"))
    elif seen.values:
        text += ", all finite"
    rows.append(("run", _run(manifest)))
    if len(seen.models) > 1:
        rows.append(("models", ", ".join(seen.models)))
    rows.append(("cover", _cover(page.coverage)))
    facts(console, text, state, style, rows)


def _run(manifest: Manifest) -> str:
    parts = [" ".join(manifest.argv)] if manifest.argv else []
    if manifest.framework:
        parts.append(f"{manifest.framework} {manifest.versions.get(manifest.framework, '')}".strip())
    if manifest.started:
        parts.append(manifest.started[:16].replace("T", " "))
    if manifest.cost.wall_seconds:
        parts.append(span(manifest.cost.wall_seconds))
        parts.append(share(manifest.cost.hook_seconds / manifest.cost.wall_seconds) + " in our hooks")
    if manifest.note:
        parts.append(f"note: {manifest.note}")
    return "; ".join(parts) or "nothing is known of the run"


def _cover(coverage: Coverage) -> str:
    if not coverage.modules:
        return str(coverage)
    return covered(len(coverage.fired), len(coverage.selected), coverage.missing)


def _heading(page: Page, what: str) -> Text:
    parts = [what]
    parts.insert(0, "all steps" if page.step is None else f"step {page.step}")
    if len(page.ranks) > 1:
        parts.append(f"rank {page.rank}")
    return Text(", ".join(parts), style="bold")


def _fold(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """Leave out what repeats: of a module called more often than three times in a step, the later calls."""
    shown = [row for row in rows if row.call < _REPEATS]
    left: dict[str, int] = {}
    for row in rows:
        if row.call >= _REPEATS:
            left[row.path or ROOT] = left.get(row.path or ROOT, 0) + 1
    by_count: dict[int, list[str]] = {}
    for path, amount in left.items():
        by_count.setdefault(amount, []).append(path)
    lines = []
    for amount, paths in by_count.items():
        names = ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
        lines.append(f"... and {plural(amount, 'more call')} of {names}")
    return shown, lines


def _never_came(rows: Sequence[Row]) -> list[str]:
    """Say in words what a line of dashes means, once for each reason."""
    reasons: dict[str, int] = {}
    for row in rows:
        for seen in row.values:
            if seen.note:
                reasons[seen.note] = reasons.get(seen.note, 0) + 1
    return [f"- {reason} ({plural(amount, 'value')})" for reason, amount in reasons.items()]


@dataclass(frozen=True)
class _Line:
    """One line of a table: a call with one of its values, or a further value of the call above."""

    row: Row
    value: Seen | None
    first: bool
    name: str


@dataclass(frozen=True)
class _Column:
    title: str
    cell: Callable[[_Line], str]
    right: bool = False
    style: str = ""


def _print_table(
    console: Console, rows: Sequence[Row], columns: list[_Column], limit: int, *, values: bool = False
) -> None:
    lines = _lines(rows, every=values)
    shown = lines[:limit] if limit else lines
    marked = any(_mark(line) for line in shown)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", collapse_padding=True)
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            style=column.style,
            min_width=_NAME if column.title in ("module", "site") else None,
        )
    if marked:
        table.add_column("", no_wrap=True, style="bold red", min_width=max(len(_mark(line)) for line in shown))
    for line in shown:
        cells = [Text(column.cell(line)) for column in columns]
        table.add_row(*cells, *([_mark(line)] if marked else []), style=None if line.first else "dim")
    console.print(table)
    if len(shown) < len(lines):
        console.print(
            Text(f"  ... and {plural(len(lines) - len(shown), 'more line')}: --limit 0 shows all", style="dim"),
            soft_wrap=True,
        )


def _lines(rows: Sequence[Row], *, every: bool) -> list[_Line]:
    lines: list[_Line] = []
    for row in rows:
        wanted = row.values
        if not every and row.phase is not None:
            main = next((kind for kind in _MAIN[row.phase] if any(seen.kind == kind for seen in row.values)), None)
            wanted = [seen for seen in row.values if seen.kind == main] if main else row.values
        name = row.path or ROOT
        if not wanted:
            lines.append(_Line(row, None, True, name))
        lines.extend(_Line(row, seen, number_ == 0, name) for number_, seen in enumerate(wanted))
    return lines


def _tree_columns(width: int, page: Page, rows: Sequence[Row]) -> list[_Column]:
    guides = _guides(rows)
    several = len(page.overview.models) > 1

    def name(line: _Line) -> str:
        row = line.row
        if not line.first:
            return f"{guides[row.seq].continued}  {line.value.slot if line.value else ''}"
        label = guides[row.seq].label
        if several and row.depth == 0:
            label = f"{row.model}/{label}"
        call = f"#{row.call}" if row.call else ""
        step = f"@{row.step}" if page.step is None else ""
        slot = f" {line.value.slot}" if line.value and line.value.slot and row.phase else ""
        return f"{guides[row.seq].prefix}{label}{call}{step} {row.type}{slot}".rstrip()

    return [_Column("module", name), *_statistics(width)]


def _order_columns(width: int, page: Page) -> list[_Column]:
    def name(line: _Line) -> str:
        return _full_name(line, page) if line.first else f"  {line.value.slot if line.value else ''}"

    arrows = {"forward": "->", "backward": "<-", "recompute": "=>"}
    return [
        _Column("", lambda line: arrows.get(line.row.phase, "") if line.first else "", style="cyan"),
        _Column("module", name),
        *([_Column("type", lambda line: line.row.type if line.first else "", style="dim")] if width >= 100 else []),
        *_statistics(width - (16 if width >= 100 else 0)),
    ]


def _value_columns(width: int, page: Page) -> list[_Column]:
    def name(line: _Line) -> str:
        value = line.value
        kind = f":{value.kind}{value.slot if value.slot[:1] in ('', '.', '[') else '.' + value.slot}" if value else ""
        return f"{line.row.path or ROOT}{kind}{f'#{line.row.call}' if line.row.call else ''}" + (
            f"@{line.row.step}" if page.step is None else ""
        )

    return [_Column("site", name), *_statistics(width)]


def _full_name(line: _Line, page: Page) -> str:
    row = line.row
    model = f"{row.model}/" if len(page.overview.models) > 1 else ""
    call = f"#{row.call}" if row.call else ""
    step = f"@{row.step}" if page.step is None else ""
    slot = f" {line.value.slot}" if line.value and line.value.slot and row.phase else ""
    return f"{model}{row.path or ROOT}{call}{step}{slot}"


def _statistics(width: int) -> list[_Column]:
    def statistic(name: str, title: str | None = None) -> _Column:
        return _Column(title or name, lambda line: _number(line, name), right=True)

    columns = [_Column("shape", lambda line: shape(line.value.shape) if line.value else "", right=True, style="green")]
    if width >= 110:
        columns.append(_Column("dtype", lambda line: (line.value.dtype or "") if line.value else "", style="green"))
    columns += [statistic("mean"), statistic("std")]
    if width >= 100:
        columns += [statistic("min"), statistic("max")]
    columns.append(statistic("absmax", "|max|"))
    if width >= 90:
        columns.append(_Column("zeros", _zeros, right=True))
    if width >= 110:
        columns.append(_Column("ms", _milliseconds, right=True, style="dim"))
    return columns


def _number(line: _Line, name: str) -> str:
    if line.value is None:
        return ""
    return number(line.value.statistics.get(name))


def _zeros(line: _Line) -> str:
    if line.value is None:
        return ""
    zeros, total = line.value.statistics.get("zero_count"), line.value.statistics.get("numel")
    if zeros is None or not total:
        return "-"
    if zeros == 0:
        return "0"
    part = zeros / total
    return "<1 %" if part < 0.01 else ">99 %" if 0.99 < part < 1 else f"{100 * part:.0f} %"


def _milliseconds(line: _Line) -> str:
    return number(line.row.duration_ns / 1e6) if line.first and line.row.duration_ns is not None else ""


def _mark(line: _Line) -> str:
    if line.first and line.row.error:
        return "! raised"
    if line.value is None:
        return ""
    found = line.value.nonfinite
    infinite = found.get("+inf", 0) + found.get("-inf", 0)
    parts = [f"{amount:,} {word}" for word, amount in (("nan", found.get("nan", 0)), ("inf", infinite)) if amount]
    return f"! {', '.join(parts)}" if parts else ""


@dataclass(frozen=True)
class _Guide:
    prefix: str
    continued: str
    label: str


def _guides(rows: Sequence[Row]) -> dict[int, _Guide]:
    """Draw the lines of the tree, and shorten each name by that of the call around it."""
    guides: dict[int, _Guide] = {}
    around: list[str] = []
    for row, open_levels in zip(rows, _open_levels(rows), strict=True):
        depth = min(row.depth, len(around))
        del around[depth:]
        parent = around[-1] if around else None
        label = row.path or ROOT
        if parent and label.startswith(parent + "."):
            label = label[len(parent) + 1 :]
        around.append(row.path)
        bars = "".join("│ " if level in open_levels else "  " for level in range(1, depth))
        more = depth in open_levels
        guides[row.seq] = _Guide(
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


def _print_more(console: Console, page: Page) -> None:
    others = len(page.steps) - 1
    lines = []
    if page.step is not None and others > 0:
        lines.append(
            f"{plural(others, 'more step')} recorded, {page.steps[0]} to {page.steps[-1]}: tenterhook show {page.name} --step N"
        )
    if len(page.ranks) > 1:
        lines.append(f"{len(page.ranks)} ranks recorded, {page.ranks[0]} to {page.ranks[-1]}: --rank N")
    if lines:
        console.print()
    for line in lines:
        console.print(Text(line, style="dim"), soft_wrap=True)
