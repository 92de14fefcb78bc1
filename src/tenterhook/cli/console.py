"""The two terminals that commands write to. Colour, width and NO_COLOR are rich's business."""

from __future__ import annotations

import sys

from rich.console import Console

__all__ = ["stderr_console", "stdout_console"]


def stdout_console() -> Console:
    """The console for what was asked for."""
    return Console(highlight=False, soft_wrap=False)


def stderr_console() -> Console:
    """The console for what goes on besides; bound to the stream of now, whatever a script makes of ``sys.stderr`` later."""
    return Console(file=sys.stderr, highlight=False)
