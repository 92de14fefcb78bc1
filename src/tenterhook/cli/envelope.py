"""The JSON that every reading command prints with ``--json``."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from tenterhook import __version__
from tenterhook._printable import escaped

__all__ = ["SCHEMA", "print_json"]

SCHEMA = "1"
"""Version of the envelope and of what is in ``data``; goes up when a field changes its meaning or goes."""


def print_json(data: Any, *, status: str = "ok") -> None:
    """Print ``{"tool", "version", "schema", "status", "data"}``; numbers that are not finite become null."""
    envelope = {"tool": "tenterhook", "version": __version__, "schema": SCHEMA, "status": status, "data": data}
    click.echo(escaped(msgspec.json.format(msgspec.json.encode(envelope), indent=2).decode()))
