"""The command line: ``tenterhook``.

One file per command says its options and imports next to nothing; what the command does lies in a file ``run_<command>.py`` that is
imported once the options are known to be right. So ``--help`` and a mistyped option answer at once.

Exit codes, the same for every command:

| code | meaning |
|---|---|
| 0 | clean |
| 1 | findings, or differences |
| 2 | usage: what was asked for cannot be done |
| 3 | a recording that cannot be read, or two that cannot be compared |
| 4 | nothing matched, nothing recorded: never a vacuous success |
| 10 | ``record`` only: the script ended well, and there are findings |
| 70 | a fault in tenterhook itself |
| 130 | interrupted |

With ``record`` the script's own failing exit code wins over all of these.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn, cast

import click

from tenterhook import __version__
from tenterhook._printable import printable
from tenterhook.cli.group import LazyGroup, Settings, Work, verbose_option
from tenterhook.errors import NotRecordedError, RecordingError, SelectionError, TargetError, TenterhookError

__all__ = ["COMMANDS", "EXIT_CODES", "main", "tenterhook"]

COMMANDS = {
    "record": "tenterhook.cli.record:command",
    "show": "tenterhook.cli.show:command",
    "doctor": "tenterhook.cli.doctor:command",
}
"""Every command and where it is declared, in the order of the help."""

EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (SelectionError, 4),
    (NotRecordedError, 4),
    (TargetError, 2),
    (RecordingError, 3),
    (TenterhookError, 2),
    (click.ClickException, 2),
    (KeyboardInterrupt, 130),
    (click.Abort, 130),
)
"""The first class that an error is an instance of gives the exit code."""

_FAULT = 70


@click.group(
    "tenterhook", cls=LazyGroup, commands_at=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, "-V", "--version", message="tenterhook %(version)s")
@verbose_option
def tenterhook() -> None:
    """See what happens inside a neural network: what runs, in which order, and what flows through, forward and backward.

    Start with `tenterhook record train.py` (your script as it is), then `tenterhook show`. COMMAND --help says more.

    \b
    Exit codes: 0 all is well; 1 findings; 2 wrong use; 3 a recording that cannot
    be read; 4 nothing was recorded, or nothing matches; 70 a fault of tenterhook
    itself; 130 interrupted. After record, that of a script that fails wins.
    """  # noqa: D301 - click's mark for lines that are not to be filled


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave the process.

    Args:
        args: the arguments, without the program's name; those of the process by default.
    """
    settings = Settings()
    try:
        result = tenterhook.main(args, prog_name="tenterhook", standalone_mode=False, obj=settings)
        body = _body(result) if isinstance(result, Work) else None
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(_report(error, verbose=settings.verbose))
    if body is None:
        sys.exit(result if isinstance(result, int) else 0)
    _work(body, cast("Work", result), settings)


def _work(body: Callable[..., int], work: Work, settings: Settings) -> NoReturn:
    # A script runs in here: its own end (SystemExit, KeyboardInterrupt) passes through as it is, and nothing of click is below it.
    try:
        code = body(**work.options)
    except (Exception, click.Abort) as error:
        code = _report(error, verbose=settings.verbose)
    sys.exit(code)


def _body(work: Work) -> Callable[..., int]:
    module, _, function = work.body.partition(":")
    return getattr(import_module(module), function)


def _report(error: BaseException, *, verbose: bool) -> int:
    """Print an error in at most a few lines and give its exit code."""
    code = next((code for kind, code in EXIT_CODES if isinstance(error, kind)), _FAULT)
    if verbose:
        traceback.print_exception(type(error), error, error.__traceback__)
    if code == 130:
        click.echo("tenterhook: interrupted", err=True)
    elif code == _FAULT:
        click.echo(f"tenterhook: a fault in tenterhook itself: {type(error).__name__}: {error}", err=True)
        click.echo(
            "  -v before the command shows where; please report it with the output of 'tenterhook doctor'", err=True
        )
    else:
        for line in _lines(error):
            click.echo(printable(line), err=True)
    return code


def _lines(error: BaseException) -> list[str]:
    """Write an error as ``tenterhook: what``, then its further lines and what to do, indented."""
    text = error.format_message() if isinstance(error, click.ClickException) else str(error) or type(error).__name__
    first, *rest = text.strip().splitlines()
    if not rest:  # "what; what to do" is as much as "what", a line feed, and "what to do"
        first, *rest = first.split("; ", 1)
    lines = [f"tenterhook: {first}", *(f"  {line.strip()}" for line in rest)]
    if isinstance(error, click.UsageError) and error.ctx is not None and not rest:
        lines.append(f"  see: {error.ctx.command_path} --help")
    return lines
