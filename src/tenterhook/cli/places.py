"""Finding recordings by what is typed for them."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from tenterhook.errors import RecordingError
from tenterhook.recording import newest_recordings, nth_newest

__all__ = ["find"]


def find(text: str) -> Path:
    """Find a recording.

    Args:
        text: a path, or ``@0`` for the newest recording here or in ``./runs``, ``@1`` for the one before.

    Raises:
        RecordingError: there is none; the nearest names are listed.
    """
    numbered = re.fullmatch(r"@(\d+)", text)
    if numbered:
        return nth_newest(int(numbered[1]))
    path = Path(text)
    if path.exists():
        return path
    for beside in (path.with_name(path.name + ".thk"), Path("runs") / path, Path("runs") / (path.name + ".thk")):
        if beside.exists():
            return beside
    known = list(newest_recordings())
    names = {str(entry): entry for entry in known}
    near = difflib.get_close_matches(text, {**names, **{entry.name: entry for entry in known}}, n=3, cutoff=0.5)
    hint = (
        f"nearest: {', '.join(near)}"
        if near
        else f"newest: {known[0]} (@0)"
        if known
        else "make one: tenterhook record SCRIPT"
    )
    raise RecordingError(f"there is no recording {text}\n{hint}")
