"""Finding recordings by what is typed for them."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from tenterhook.errors import RecordingError
from tenterhook.recording import find_recordings

__all__ = ["FOLDERS", "find", "newest"]

FOLDERS = (Path("runs"), Path())
"""Where recordings are looked for."""


def newest() -> list[Path]:
    """List the recordings here and in ``./runs``, newest first."""
    found = {
        path: (path / "recording.json").stat().st_mtime_ns
        for folder in FOLDERS
        if folder.is_dir()
        for path in find_recordings(folder)
    }
    return sorted(found, key=lambda path: -found[path])


def find(text: str) -> Path:
    """Find a recording.

    Args:
        text: a path, or ``@0`` for the newest recording here or in ``./runs``, ``@1`` for the one before.

    Raises:
        RecordingError: there is none; the nearest names are listed.
    """
    numbered = re.fullmatch(r"@(\d+)", text)
    known = newest() if numbered or not Path(text).exists() else []
    if numbered:
        place = int(numbered[1])
        if place < len(known):
            return known[place]
        if not known:
            raise RecordingError("there is no recording here or in ./runs\nmake one: tenterhook record SCRIPT")
        raise RecordingError(
            f"there is no recording {text}: only {len(known)} here and in ./runs, @0 to @{len(known) - 1}"
        )
    path = Path(text)
    if path.exists():
        return path
    for beside in (path.with_name(path.name + ".thk"), Path("runs") / path, Path("runs") / (path.name + ".thk")):
        if beside.exists():
            return beside
    names = {str(entry): entry for entry in known}
    near = difflib.get_close_matches(text, [*names, *(entry.name for entry in known)], n=3, cutoff=0.5)
    hint = (
        f"nearest: {', '.join(near)}"
        if near
        else f"newest: {known[0]} (@0)"
        if known
        else "make one: tenterhook record SCRIPT"
    )
    raise RecordingError(f"there is no recording {text}\n{hint}")
