"""The machinery that the commands share: commands imported when they are asked for, and the settings of one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import click

__all__ = ["COUNT", "LazyGroup", "Settings", "Work", "verbose_option"]


@dataclass
class Settings:
    """What holds for the whole call, wherever on the line it was said.

    Attributes:
        verbose: show the traceback of an error.
    """

    verbose: bool = False


@dataclass(frozen=True)
class Work:
    """What a command gives back once its options are read: what is to be done, not yet imported.

    Attributes:
        body: ``module:function``; called with the options, it returns the exit code.
        options: the keyword arguments.
    """

    body: str
    options: Mapping[str, Any] = field(default_factory=dict)


class _Count(click.ParamType[int]):
    """A number from 0 on; of click's own kind the help would say "x>=0"."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it."""
        text = str(value)
        if not (text.isascii() and text.isdigit()):
            self.fail(f"{text!r} is no number from 0 on", param, ctx)
        return int(text)


COUNT = _Count()
"""The type of options that take a number from 0 on."""


class LazyGroup(click.Group):
    """A group that imports a command's file only when that command is named or listed.

    Args:
        commands_at: ``module:attribute`` of each command, by name, in the order of the help.
    """

    def __init__(self, *args: Any, commands_at: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._commands_at = dict(commands_at)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands in the order in which they were given."""
        return list(self._commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in self._commands_at:
            return None
        module, _, attribute = self._commands_at[cmd_name].partition(":")
        return getattr(import_module(module), attribute)


def _set_verbose(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Settings).verbose = True


verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_set_verbose,
    help="Show the traceback of an error.",
)
"""``-v``, the same before and after the command's name."""
