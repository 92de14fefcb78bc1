"""``tenterhook show``: its options."""

from __future__ import annotations

from typing import Any

import click

from tenterhook.analysis.asked import check
from tenterhook.cli.group import COUNT, Work, verbose_option
from tenterhook.errors import SelectionError

__all__ = ["command"]


def _ranks(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None or value.strip() == "all":
        return None
    found: list[int] = []
    for part in value.split(","):
        first, colon, end = part.strip().partition(":")
        if not (first.isascii() and first.isdigit()) or (colon and not (end.isascii() and end.isdigit())):
            raise click.BadParameter(f"{part.strip()!r} is no rank\nwrite ranks as 0,3 or 0:8", ctx, param)
        if colon and int(first) >= int(end):
            raise click.BadParameter(f"there is no rank in {part.strip()!r}\nwrite ranks as 0,3 or 0:8", ctx, param)
        found += range(int(first), min(int(end), 1 << 20)) if colon else [int(first)]
    return tuple(found)


def _sites(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    for text in value:
        try:
            check(text)
        except SelectionError as error:
            raise click.BadParameter(str(error), ctx, param) from error
    return value


@click.command("show", short_help="Show what was recorded.")
@click.argument("recording", metavar="[RECORDING]", default="@0")
@click.option(
    "--as",
    "form",
    type=click.Choice(["tree", "order", "table"]),
    help="Nested calls; or one list in the order of execution; or every value with its statistics.  "
    "[default: tree; with --site table]",
)
@click.option(
    "--step",
    type=COUNT,
    metavar="N",
    help="The step to show.  [default: the first recorded; of a run that goes on, the last one that is whole]",
)
@click.option(
    "--site",
    "sites",
    multiple=True,
    metavar="PATTERN",
    callback=_sites,
    help="Only these, in all steps: 'features.*', 'type:Conv2d', 'fc:grad_output', or an address as it is printed, "
    "'Net/lstm:output[0]#1@12'; repeatable.",
)
@click.option("--rank", type=COUNT, metavar="N", help="The process to show.  [default: the first recorded]")
@click.option(
    "--ranks",
    metavar="N,...",
    callback=_ranks,
    help="Read these processes only: '0,3' or '0:8'.  [default: all]",
)
@click.option(
    "--limit",
    type=COUNT,
    default=100,
    show_default=True,
    metavar="N",
    help="Most lines in a section, 0 for all.",
)
@click.option(
    "--wide", is_flag=True, help="Print every column and whole names, however wide the lines become: `| less -S`."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@verbose_option
@click.pass_context
def command(ctx: click.Context, **options: Any) -> Work:
    """Show what was recorded: the verdict, what ran and what flowed through it, and what was not seen.

    RECORDING is a directory (NAME.thk), also one that is being written; or @0 for the newest one here or in ./runs (which is shown
    where none is named), @1 for the one before.

    \b
    tenterhook show
    tenterhook show --step 3 --site 'encoder.**'
    tenterhook show runs/a.thk --site fc:grad_output --as table
    """  # noqa: D301 - click's mark for lines that are not to be filled
    if options["ranks"] is not None and options["rank"] not in (None, *options["ranks"]):
        raise click.UsageError(f"--rank {options['rank']} is not among --ranks\nleave one of them out", ctx)
    return Work("tenterhook.cli.run_show:run", options)
