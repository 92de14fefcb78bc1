"""What ``tenterhook show`` does: reads a recording, and hands what it found to the reporter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tenterhook.analysis.overview import overview, rows_of_sites, rows_of_step, steps_of
from tenterhook.cli.console import stdout_console
from tenterhook.cli.envelope import print_json
from tenterhook.cli.places import find
from tenterhook.errors import NotRecordedError
from tenterhook.recording import Recording, open_recording
from tenterhook.recording.rank_ends import named
from tenterhook.recording.target import writers
from tenterhook.reporters.text import Page, print_page

__all__ = ["page_of", "run"]

_EMPTY = 4


def run(
    *,
    recording: str,
    form: str | None,
    step: int | None,
    sites: Sequence[str],
    rank: int | None,
    limit: int,
    ranks: Sequence[int] | None = None,
    wide: bool = False,
    as_json: bool,
) -> int:
    """Show a recording.

    Returns:
        0, or 4 where nothing was recorded.

    Raises:
        RecordingError: there is none, or it cannot be read.
        NotRecordedError: the step or rank was not recorded.
        SelectionError: no module that was recorded matches.
    """
    path = find(recording)
    opened = open_recording(path, ranks=ranks)
    page = page_of(opened, recording if recording.startswith("@") else str(path), step, sites, rank)
    if as_json:
        print_json(_data(page, str(path), limit), status=_status(page))
    else:
        print_page(stdout_console(), page, form=form or ("table" if sites else "tree"), limit=limit, wide=wide)
    return 0 if page.overview.values or sum(page.overview.calls.values()) else _EMPTY


def page_of(
    opened: Recording, name: str, step: int | None = None, sites: Sequence[str] = (), rank: int | None = None
) -> Page:
    """Gather what a page about a recording shows.

    Raises:
        NotRecordedError: the step or rank was not recorded.
        SelectionError: no module that was recorded matches.
    """
    with opened.still():
        return _page(opened, name, step, sites, rank)


def _page(opened: Recording, name: str, step: int | None, sites: Sequence[str], rank: int | None) -> Page:
    ranks, chosen = opened.ranks or [0], rank is not None
    if rank is None:
        rank = ranks[0]
    elif rank not in ranks:
        raise NotRecordedError(f"rank {rank} was not recorded; {named(ranks)} {'was' if len(ranks) == 1 else 'were'}")
    steps = steps_of(opened, rank if chosen else None)
    running = [] if opened.manifest.complete or opened.path is None else writers(opened.path)
    if sites and step is None:
        rows = rows_of_sites(opened, sites, rank=rank)
    elif steps or step is not None:
        if step is None:  # of a run that goes on, the last step that is whole
            step = steps[-2 if len(steps) > 1 else -1] if running else steps[0]
        rows = rows_of_step(opened, step, rank=rank, sites=sites)
    else:
        rows = []
    return Page(
        name=name,
        manifest=opened.manifest,
        overview=overview(opened),
        coverage=opened.coverage,
        rows=rows,
        step=step,
        steps=steps,
        rank=rank,
        chosen=chosen,
        ranks=ranks,
        sites=sites,
        running=running,
        ends=opened.ends,
        unclosed=opened.unclosed,
    )


def _status(page: Page) -> str:
    if not page.manifest.complete:
        return "running" if page.running else "unfinished"
    return "partial" if page.manifest.partial else "stopped" if page.manifest.error else "complete"


def _data(page: Page, path: str, limit: int) -> dict[str, Any]:
    return {
        "path": path,
        "manifest": msgspec.to_builtins(page.manifest),
        "overview": page.overview,
        "coverage": page.coverage,
        "step": page.step,
        "steps": page.steps,
        "rank": page.rank,
        "ranks": page.ranks,
        "ends": page.ends,
        "unclosed": page.unclosed,
        "rows": page.rows[:limit] if limit else page.rows,
        "rows_total": len(page.rows),
    }
