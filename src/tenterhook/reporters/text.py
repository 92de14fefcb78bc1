"""A recording in the terminal: its verdict, what ran in a step as a tree, a list or a table, and what was not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from tenterhook.address import ROOT
from tenterhook.analysis.overview import Overview, Row
from tenterhook.recording import Manifest
from tenterhook.recording.coverage import Coverage
from tenterhook.recording.rank_ends import told_of_unclosed
from tenterhook.reporters.columns import STATISTICS_COLUMNS, Column, Line, Narrow, aligned
from tenterhook.reporters.guides import draw_guides
from tenterhook.reporters.numbers import plural
from tenterhook.reporters.summary import MANY, cost, covered, crowded, facts, in_turn, of_steps, wrap
from tenterhook.reporters.verdict import about_numbers, finite

__all__ = ["FORMS", "Page", "print_page"]

FORMS = ("tree", "order", "table")
"""``tree``: calls nested, a section for each direction. ``order``: one list in the order of execution. ``table``: every value with
all its statistics."""

_REPEATS = 3
_LISTED = 6
_TITLES = {"forward": "forward", "backward": "backward", "recompute": "recomputed by checkpointing"}
_OF_PARAMETERS = {
    "param": "parameters",
    "param_grad": "gradients of parameters",
    "update": "updates of parameters by the optimizer",
}
_MAIN = {"forward": "output", "recompute": "output", "backward": "grad_output"}
"""What a list of calls is about; other kinds are named."""


@dataclass(frozen=True)
class Page:
    """What is to be shown, finished.

    Attributes:
        name: how the recording is called in what to type next.
        rows: what ran in the step, or the sites asked for.
        step: the step that `rows` is of; None for all steps.
        steps: every recorded step.
        rank: the process that `rows` is of.
        chosen: whether it was asked for.
        ranks: every process.
        sites: the sites that were asked for; empty for all.
        running: the processes on this machine that write it now.
        ends: the exceptions that ended the processes, the earliest first.
        unclosed: of several processes, those that were killed, and how far each came.
    """

    name: str
    manifest: Manifest
    overview: Overview
    coverage: Coverage
    rows: Sequence[Row]
    step: int | None
    steps: Sequence[int]
    rank: int = 0
    chosen: bool = False
    ranks: Sequence[int] = (0,)
    sites: Sequence[str] = field(default=())
    running: Sequence[int] = field(default=())
    ends: Mapping[int, str] = field(default_factory=dict)
    unclosed: Mapping[int, str] = field(default_factory=dict)


def print_page(console: Console, page: Page, *, form: str = "tree", limit: int = 100, wide: bool = False) -> None:
    """Print a recording.

    Args:
        console: where to.
        page: what to print.
        form: one of `FORMS`.
        limit: most lines in each section, 0 for all.
        wide: print every column, however wide the lines become.
    """
    _print_verdict(console, page)
    if not page.rows:
        return
    tables = _Tables(console, limit, None if wide else console.width)
    if form == "table":
        console.print()
        console.print(_heading(page, "every value"))
        tables.print(page.rows, _value_columns(page), every=True)
    elif form == "order":
        console.print()
        console.print(_heading(page, "in order of execution"))
        tables.print(page.rows, _order_columns(page))
    else:
        for title, rows in _sections(page.rows):
            console.print()
            console.print(_heading(page, title))
            shown, folded = _fold(rows) if not page.sites else (rows, [])
            tables.print(shown, _tree_columns(page, shown))
            for line in [*folded, *_never_came(shown)]:
                console.print(Text(f"  {line}", style="dim"), soft_wrap=True)
    _print_more(console, page, wrap(tables.narrow.words(), console.width))


def _sections(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Sort rows by what the tree has a section of its own for: the directions, and the kinds of parameter values."""
    found = [(title, [row for row in rows if row.phase == phase]) for phase, title in _TITLES.items()]
    loose = [row for row in rows if row.phase is None]
    for kind, title in _OF_PARAMETERS.items():
        found.append((title, [row for row in loose if row.values[0].kind == kind]))
    found.append(("the rest", [row for row in loose if row.values[0].kind not in _OF_PARAMETERS]))
    return [(title, part) for title, part in found if part]


def _print_verdict(console: Console, page: Page) -> None:
    seen, manifest = page.overview, page.manifest
    counts = [of_steps(seen.steps, manifest.steps), plural(seen.modules, "module")]
    counts += [plural(seen.functions, "function")] if seen.functions else []
    counts.append(plural(sum(seen.calls.values()), "call"))
    text = f"{', '.join(counts)}, {plural(seen.values, 'value')}{finite(seen)}"
    rows: list[tuple[str, str]] = []
    if page.running:
        state, style = "RUNNING", "bold cyan"
        which = ", ".join(map(str, page.running[:4])) + (", ..." if len(page.running) > 4 else "")
        rows.append(("why", f"process {which} is writing it; what had come by now is here"))
        rows += _killed(page)
    elif not manifest.complete:
        state, style = "UNFINISHED", "bold yellow"
        rows += _killed(page) or [
            (
                "why",
                "it was never closed: the run was killed, or goes on elsewhere; what had been written by then is here",
            )
        ]
    elif manifest.partial:
        state, style = "PARTIAL", "bold yellow"
        rows.append(("why", manifest.partial))
    elif manifest.error:
        state, style = "STOPPED", "bold yellow"
    else:
        state, style = "complete", "bold green"
    rows += _ended(page)
    if manifest.resumed:
        steps = "step" if len(manifest.resumed) == 1 else "steps"
        rows.append(("resumed", f"from {steps} {', '.join(map(str, manifest.resumed))}, after it had ended early"))
    if manifest.tensors_stopped:
        rows.append(("tensors", f"no longer stored from some point on: {manifest.tensors_stopped}"))
    if seen.error:
        rows.append(("raised", f"{seen.error[0]}: {seen.error[1]}"))
    style = "bold red" if seen.first_nonfinite else style
    rows += about_numbers(seen, page.name, ranks=len(page.ranks) > 1)
    rows.append(("run", _run(manifest)))
    if manifest.edits:
        rows.append(("edits", f"were on: {_edits(manifest.edits)}"))
    if len(seen.models) > 1:
        rows.append(("models", ", ".join(seen.models)))
    rows.append(("cover", _cover(page)))
    if seen.crowded is not None and seen.crowded[0] >= MANY:
        rows.append(("steps", crowded(*seen.crowded)))
    if manifest.optimizer_steps:
        rows.append(("steps", in_turn(manifest.optimizer_steps)))
    rows += [("gap", sentence) for sentence in manifest.missing_steps]
    rows += [("told", sentence) for sentence in manifest.told]
    facts(console, text, state, style, rows)


def _killed(page: Page) -> list[tuple[str, str]]:
    """Name those of several processes that were killed, or that are not there; where one was asked for, that one."""
    own = {page.rank: page.unclosed[page.rank]} if page.chosen and page.rank in page.unclosed else {}
    told = told_of_unclosed(own or page.unclosed)
    others = len(page.unclosed) - len(own)
    if own and others:
        told.append(f"{plural(others, 'other rank')} {'was' if others == 1 else 'were'} never closed either")
    reasons = [*told, page.manifest.partial]
    return [("why", words) for words in reasons if words]


def _ended(page: Page) -> list[tuple[str, str]]:
    """Say what ended the run; of several processes a line each, the earliest first; where one was asked for, of that alone."""
    error = page.manifest.error
    if len(page.ranks) < 2 or not page.ends:
        return [("ended", f"by {error}")] if error else []
    if page.chosen:
        if page.rank in page.unclosed:
            return []
        own = page.ends.get(page.rank)
        what = f"by {own}" if own is not None else "goes on, or came to its end" if page.running else "came to its end"
        others = len(page.ends) - (own is not None)
        return [
            ("ended", f"rank {page.rank} {what}" + (f"; {plural(others, 'other rank')} ended early" if others else ""))
        ]
    ranks = list(page.ends)
    rows = [("ended", f"rank {rank} by {page.ends[rank]}") for rank in ranks[:_LISTED]]
    return [*rows, ("", f"and {plural(len(ranks) - _LISTED, 'more rank')}")] if len(ranks) > _LISTED else rows


def _edits(edits: Sequence[Mapping[str, object]]) -> str:
    """Write what an edit session did to the model meanwhile, the first few."""
    parts = []
    for edit in edits[:_LISTED]:
        words = " ".join(str(edit.get(name) or "") for name in ("kind", "select", "value")).strip()
        ran = edit.get("ran")
        parts.append(f"{words} ({'never ran' if not ran else f'ran {ran:,} times' if ran != 1 else 'ran once'})")
    more = len(edits) - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more else "")


def _run(manifest: Manifest) -> str:
    parts = [" ".join(manifest.argv)] if manifest.argv else []
    if manifest.framework:
        parts.append(f"{manifest.framework} {manifest.versions.get(manifest.framework, '')}".strip())
    if manifest.started:
        parts.append(manifest.started[:16].replace("T", " "))
    if manifest.cost.wall_seconds:
        parts.append(cost(manifest.cost.wall_seconds, manifest.cost.hook_seconds))
    if manifest.note:
        parts.append(f"note: {manifest.note}")
    return "; ".join(parts) or "nothing is known of the run"


def _cover(page: Page) -> str:
    coverage = page.coverage
    if not coverage.modules:
        return "what was not seen is told when the run has ended" if page.running else str(coverage).partition("\n")[0]
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


@dataclass
class _Tables:
    """Prints tables of one look.

    Attributes:
        console: where to.
        limit: most lines in each, 0 for all.
        width: how wide they may be; None for as wide as they are.
        narrow: what they had to do without.
    """

    console: Console
    limit: int
    width: int | None
    narrow: Narrow = field(default_factory=Narrow)

    def print(self, rows: Sequence[Row], columns: Sequence[Column], *, every: bool = False) -> None:
        """Print one."""
        lines = _lines(rows, every=every)
        shown = lines[: self.limit] if self.limit else lines
        for line in aligned(shown, columns, self.width, self.narrow):
            self.console.print(line, soft_wrap=True)
        if len(shown) < len(lines):
            left = plural(len(lines) - len(shown), "more line")
            self.console.print(Text(f"  ... and {left}: --limit 0 shows all", style="dim"), soft_wrap=True)


def _lines(rows: Sequence[Row], *, every: bool) -> list[Line]:
    lines: list[Line] = []
    for row in rows:
        wanted = row.values
        main = None
        if not every and row.phase is not None:
            main = _MAIN[row.phase]
            wanted = sorted(row.values, key=lambda seen: seen.kind != main)
        if not wanted:
            lines.append(Line(row, None, first=True))
        lines.extend(
            Line(row, seen, first=place == 0, kind=main is not None and seen.kind != main)
            for place, seen in enumerate(wanted)
        )
    return lines


def _tree_columns(page: Page, rows: Sequence[Row]) -> list[Column]:
    guides = draw_guides(rows)
    several = len(page.overview.models) > 1

    def name(line: Line) -> str:
        row, guide = line.row, guides[line.row.seq]
        if not line.first:
            return f"{guide.continued}  {line.what}"
        label, kind = guide.label, f" {row.type}" if row.type and not row.op else ""
        if several and row.depth == 0:
            label = f"{row.model}/{label}" if row.path else row.model
            if not row.path and row.type == row.model.partition("-")[0]:
                kind = ""
        return f"{guide.prefix}{label}{_which(row, page)}{kind} {line.what}".rstrip()

    return [Column("module", name, name=True), *STATISTICS_COLUMNS]


def _order_columns(page: Page) -> list[Column]:
    several = len(page.overview.models) > 1
    arrows = {"forward": "->", "backward": "<-", "recompute": "=>"}

    def name(line: Line) -> str:
        row = line.row
        if not line.first:
            return f"  {line.what}"
        return f"{row.place(several)}{_which(row, page)} {line.what}".rstrip()

    return [
        Column("", lambda line: arrows.get(line.row.phase or "", "") if line.first else "", style="cyan"),
        Column("module", name, name=True),
        Column("type", lambda line: line.row.type if line.first else "", style="dim", optional=4),
        *STATISTICS_COLUMNS,
    ]


def _value_columns(page: Page) -> list[Column]:
    several = len(page.overview.models) > 1

    def name(line: Line) -> str:
        row, value = line.row, line.value
        kind = "" if value is None else f":{value.site}"
        return f"{row.place(several)}{kind}{_which(row, page)}"

    return [Column("site", name, name=True), *STATISTICS_COLUMNS]


def _which(row: Row, page: Page) -> str:
    call = f"#{row.call}" if row.call else ""
    return call if page.step is not None else f"{call}@{row.step}"


def _print_more(console: Console, page: Page, narrow: Sequence[str]) -> None:
    others = [step for step in page.steps if step != page.step]
    lines = [line for line in narrow if line]
    if page.step is not None and others:
        if len(others) <= _LISTED:
            which = f"{'step' if len(others) == 1 else 'steps'} {', '.join(map(str, others))} {_is_are(others)} recorded as well"
        else:
            which = f"{len(page.steps):,} steps are recorded, {page.steps[0]} to {page.steps[-1]}"
        lines.append(f"{which}: tenterhook show {page.name} --step {others[0] if len(others) == 1 else 'N'}")
    if len(page.ranks) > 1:
        lines.append(f"{len(page.ranks)} ranks are recorded, {page.ranks[0]} to {page.ranks[-1]}: --rank N")
    if lines:
        console.print()
    for line in lines:
        console.print(Text(line, style="dim"), soft_wrap=True)


def _is_are(things: Sequence[object]) -> str:
    return "is" if len(things) == 1 else "are"
