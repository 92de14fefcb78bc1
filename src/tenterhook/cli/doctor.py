"""``tenterhook doctor``: its options."""

from __future__ import annotations

from typing import Any

import click

from tenterhook.cli.group import Work, verbose_option

__all__ = ["command"]


@click.command("doctor", short_help="Say what is installed here, and what cannot be hooked.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@verbose_option
def command(**options: Any) -> Work:
    """Say what is installed here, what cannot be hooked here, and what is set: the facts for a bug report."""
    return Work("tenterhook.cli.run_doctor:run", options)
