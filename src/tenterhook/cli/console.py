"""The two terminals that commands write to. Colour, width and NO_COLOR are rich's business."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tenterhook._printable import printable

__all__ = ["stderr_console", "stdout_console"]


class _Console(Console):
    """Writes what is in a recording as text, also where it would command the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def stdout_console() -> Console:
    """The console for what was asked for."""
    return _Console(highlight=False, soft_wrap=False)


def stderr_console() -> Console:
    """The console for what goes on besides; bound to the stream of now, whatever a script makes of ``sys.stderr`` later."""
    return _Console(file=sys.stderr, highlight=False)
