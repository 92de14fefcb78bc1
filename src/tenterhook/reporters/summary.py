"""What ``tenterhook record`` prints around a script: a header before, and verdict, cover, cost and next after."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from tenterhook import __version__
from tenterhook.analysis.numbers import Numbers
from tenterhook.reporters.numbers import count, plural, share, size, span
from tenterhook.reporters.verdict import about_numbers, finite, some

if TYPE_CHECKING:
    from tenterhook.script_recorder import RecordSummary

__all__ = [
    "MANY",
    "cost",
    "covered",
    "crowded",
    "facts",
    "in_turn",
    "of_steps",
    "print_failure",
    "print_header",
    "print_note",
    "print_summary",
    "print_trouble",
    "why_empty",
    "wrap",
]

MANY = 10
"""From so many forwards of a model in one step on, what ends a step is said."""

_TELLING = 1.0
"""A run of so many seconds tells what hooks add to it: what is done once, at the first call, no longer is the most of it."""

_LABEL = 9
"""Width of the column of labels."""


def print_header(
    console: Console,
    to: Path,
    *,
    select: Sequence[str] | None,
    every: int | Mapping[str, int],
    stats: str | None,
    steps: str | None = None,
) -> None:
    """Print what is about to be recorded, and where to."""
    parts = [f"tenterhook {__version__}"]
    for framework in ("torch", "mindspore"):
        try:
            parts.append(f"{framework} {version(framework)}")
        except PackageNotFoundError:
            continue
    parts.append(" ".join(select) if select else "all modules")
    parts.append(_sampled(every, steps))
    parts.append(f"stats {stats or 'none'}")
    for line in wrap(" | ".join(parts), console.width):
        console.print(Text(line, style="dim"), soft_wrap=True)
    console.print(Text(f"writing {to}", style="dim"), soft_wrap=True)


def _sampled(every: int | Mapping[str, int], steps: str | None) -> str:
    rates = every if isinstance(every, Mapping) else {"**": every}
    if steps is not None and all(rate == 1 for rate in rates.values()):
        return f"steps {steps}"
    asked = ", ".join(_rate(pattern, rate) for pattern, rate in rates.items())
    return asked if steps is None else f"{asked}, of steps {steps} only"


def _rate(pattern: str, rate: int) -> str:
    steps = "every step" if rate == 1 else f"every {rate:,} steps"
    return steps if pattern == "**" else f"{pattern} {steps}"


def print_note(console: Console, text: str) -> None:
    """Print something to know before the script starts."""
    console.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)


def print_summary(
    console: Console, summary: RecordSummary, to: Path, *, who: str = "", world: int = 1, numbers: Numbers | None = None
) -> None:
    """Print how it went: one verdict, why, how much was covered, what it cost, and what to do next.

    Args:
        console: where to.
        summary: how it went.
        to: the recording's directory as it was named.
        who: which of several processes this is of.
        world: how many there are.
        numbers: what is known of the numbers in the recording, of all its processes.
    """
    console.print()  # the script may have left the line as a progress bar does, without a line feed
    console.print(Rule(f"tenterhook, {who}" if who else "tenterhook", align="left", characters="-", style="dim"))
    empty = why_empty(summary)
    if empty:
        verdict, state, style = f"nothing recorded: {empty}", "EMPTY", "bold yellow"
    else:
        counts = (
            of_steps(summary.steps_recorded, summary.steps),
            plural(summary.modules_fired, "module"),
            plural(summary.calls, "call"),
        )
        seen = f"{', '.join(counts)}, {plural(summary.values, 'value')}"
        rows_seen = summary.calls + summary.values
        verdict = f"recorded {seen}"
        if summary.lost_rows:
            verdict = f"saw {seen}; {summary.lost_rows:,} of these {rows_seen:,} rows are not stored"
        verdict += _numbers(numbers, summary, world)
        state, style = "complete", "bold green"
        if summary.partial or summary.error:
            state, style = "PARTIAL" if summary.partial else "STOPPED", "bold yellow"
    rows: list[tuple[str, str]] = []
    if summary.partial:
        rows.append(("why", summary.partial))
    if summary.error:
        rows.append(("ended", _ended(summary.error, world)))
    if numbers is not None and not empty:
        rows += about_numbers(numbers, str(to), ranks=world > 1)
        style = "bold red" if numbers.first_nonfinite else style
    if summary.nothing_called:
        why = "; ".join(f"{name}: {reason}" for name, reason in summary.missing)
        rows.append(("why", why or "the script called no model while it was recorded"))
    else:
        rows.append(("cover", covered(summary.modules_fired, summary.modules_selected, summary.missing)))
    rows += [("told", sentence) for sentence in summary.told]
    full = summary.fullest
    if not empty and full is not None and full.calls >= MANY:
        rows.append(("steps", crowded(full.calls, full.step, full.model)))
    if summary.optimizer_steps:
        rows.append(("steps", in_turn(summary.optimizer_steps)))
    rows.append(
        (
            "cost",
            f"{cost(summary.wall_seconds, summary.hook_seconds)}; {size(summary.size_bytes)}",
        )
    )
    if world > 1:
        rows.append(
            ("ranks", f"{world} write into this recording, and this is what one of them saw: --rank N shows another")
        )
    rows.append(("kept", f"{to}; it is empty and does not count as @0") if empty else ("next", f"tenterhook show {to}"))
    facts(console, verdict, state, style, rows)


def _numbers(numbers: Numbers | None, summary: RecordSummary, world: int) -> str:
    """Say behind what one process recorded whether the numbers are finite."""
    if numbers is None:
        return ""
    if world == 1 and numbers.values == summary.values:
        return finite(numbers)
    return f"; in {'all ranks' if world > 1 else 'the recording'} {plural(numbers.values, 'value')}{finite(numbers)}"


_FROM_OUTSIDE = ("Terminated", "KeyboardInterrupt")
_BANNER = 'torchrun writes "tenterhook FAILED" of that, since it starts the script by way of tenterhook'


def _ended(error: str, world: int) -> str:
    """Say what ended a script, and that it was not recording that did."""
    if error.partition(":")[0] not in _FROM_OUTSIDE:
        banner = f"; {_BANNER}" if os.environ.get("TORCHELASTIC_RUN_ID") else ""
        return f"by {error}, the script's own{banner}"
    launcher = "; a launcher sends that when another rank has failed" if world > 1 and "SIGTERM" in error else ""
    return f"by {error}{launcher}"


def print_failure(console: Console, summary: RecordSummary, to: Path, *, who: str, rank: int, name: str) -> None:
    """Print one line where the script of a rank that has no summary has failed by itself, and how to see what it did until then."""
    if summary.error and summary.error.partition(":")[0] not in _FROM_OUTSIDE:
        what = f"tenterhook, {who}: {name} ended by {summary.error}, its own; until then: tenterhook show {to} --rank {rank}"
        console.print(Text(what), soft_wrap=True)
        if os.environ.get("TORCHELASTIC_RUN_ID"):
            console.print(Text(f"  {_BANNER}"), soft_wrap=True)


def of_steps(recorded: int, made: int) -> str:
    """Write how many steps were recorded, and of how many where those were not all."""
    return plural(recorded, "step") if recorded >= made else f"{count(recorded)} of {plural(made, 'step')}"


def cost(wall: float, hooks: float) -> str:
    """Write how long a run was and what our hooks have added to it; of a short one, whose first steps cost more, only the former.

    Args:
        wall: seconds from the first call of a model, or from the start of a recording, to the end.
        hooks: seconds of these in our hooks.
    """
    rest = wall - hooks
    what = f"{share(hooks / rest)} in our hooks" if rest >= _TELLING else "too short to say what our hooks add"
    return f"{span(wall)}, {what}"


def crowded(calls: int, step: int, model: str) -> str:
    """Say that a step holds many forwards of a model, and why that may be."""
    return (
        f"step {step} holds {calls:,} forwards of {model}: a step ends when an optimizer steps, and what runs between "
        "two steps, an evaluation for one, belongs to the one before"
    )


def in_turn(steps: Sequence[int]) -> str:
    """Say that optimizers step in turn, each step of one counting as a step, and what to do."""
    return (
        f"{len(steps)} optimizers step in turn (they made {', '.join(f'{one:,}' for one in steps)} steps), and each of these ends a step: "
        "rec.step() of th.record, once an iteration, says otherwise"
    )


def why_empty(summary: RecordSummary) -> str | None:
    """Say why nothing was recorded; None where something was."""
    if summary.nothing_called:
        return "no module was called"
    if summary.calls:
        return None
    if not summary.modules_selected:
        return "the selection matches no module"
    return None if summary.modules_fired else "no selected module was called"


def print_trouble(
    console: Console, summary: RecordSummary, to: Path, *, who: str = "", numbers: Numbers | None = None
) -> None:
    """Print what is wrong with a recording or with its numbers, and nothing where all is well: the summary for the quiet."""
    empty = why_empty(summary)
    us = f"tenterhook, {who}" if who else "tenterhook"
    if empty:
        console.print(Text(f"{us}: nothing recorded: {empty}"), soft_wrap=True)
        if summary.missing:
            console.print(Text(f"  {covered(0, summary.modules_selected, summary.missing)}"), soft_wrap=True)
    if summary.partial:
        console.print(Text(f"{us}: {to} is partial: {summary.partial}"), soft_wrap=True)
    if numbers is not None and not empty:
        for label, words in about_numbers(numbers, str(to), ranks=bool(who)):
            if label.endswith("!"):
                console.print(Text(f"{us}: {label} {words}"), soft_wrap=True)
            elif label == "next":
                console.print(Text(f"  {label} {words}"), soft_wrap=True)


def covered(fired: int, selected: int, missing: Sequence[tuple[str, str]]) -> str:
    """Write how much of a selection was seen, and why the rest was not."""
    if not selected:
        return ", ".join(f"{name} ({reason})" for name, reason in missing) or "no module was selected"
    text = f"{fired:,} of {plural(selected, 'selected module')} fired"
    if missing:
        reasons: dict[str, list[str]] = {}
        for name, reason in missing:
            reasons.setdefault(reason, []).append(name)
        parts = [f"{some(names)} ({reason})" for reason, names in reasons.items()]
        text += f"; not seen, or not whole: {', '.join(parts)}"
    return text


def facts(console: Console, verdict: str, state: str, style: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a verdict with its state at the right end, and labelled lines below it; words, such as paths, are never broken."""
    width = max(console.width, 40)
    lines = wrap(verdict, width - _LABEL - len(state) - 2)
    for number, line in enumerate(lines):
        text = Text("VERDICT".ljust(_LABEL) if number == 0 else " " * _LABEL, style=style)
        text.append(line, style="bold not dim default")
        if number == 0:
            text.append(" " * max(2, width - text.cell_len - len(state)) + state)
        console.print(text, soft_wrap=True)
    for label, content in rows:
        for number, line in enumerate(wrap(content, width - _LABEL)):
            text = Text(f" {label}".ljust(_LABEL) if number == 0 else " " * _LABEL, style="cyan")
            text.append(line, style="default")
            console.print(text, soft_wrap=True)


def wrap(text: str, width: int) -> list[str]:
    """Break a text into lines between words; words, such as paths, are never broken."""
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
