"""Finding and opening recordings on disk."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tenterhook.errors import RecordingError
from tenterhook.recording.manifest import MANIFEST_NAME
from tenterhook.recording.recording import Recording

__all__ = ["PLACES", "find_recordings", "is_empty", "newest_recordings", "nth_newest", "open_recording"]

PLACES = (Path("runs"), Path())
"""Where recordings are looked for."""


def open_recording(path: str | os.PathLike[str], *, ranks: Sequence[int] | int | None = None) -> Recording:
    """Open a recording from its directory. Imports no framework.

    Whatever is there is read: after a kill, all complete batches, and `recording.manifest.complete` is false; while it
    is being written, what was there when a table is asked for.

    Args:
        path: the directory, `NAME.thk`; or `@0` for the newest recording here or in `./runs`, `@1` for the one before.
        ranks: read these processes only, or this one.

    Raises:
        RecordingError: there is no such directory, it is not a recording, it is damaged, or written by a newer major
            version; or `ranks` are none.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise RecordingError(
            f"a recording is opened by its path, open('runs/a.thk'), or open('@0') for the newest; "
            f"got {type(path).__name__} {path!r:.40}"
        )
    numbered = re.fullmatch(r"@(\d+)", str(path))
    return Recording.open(nth_newest(int(numbered[1])) if numbered else path, ranks=ranks)


def newest_recordings() -> Iterator[Path]:
    """Go through the recordings here and in `./runs`, newest first; finished ones in which nothing was recorded are passed by."""
    return (path for path in _by_age() if not is_empty(path))


def _by_age() -> list[Path]:
    found = {
        path: (path / MANIFEST_NAME).stat().st_mtime_ns
        for folder in PLACES
        if folder.is_dir()
        for path in find_recordings(folder)
    }
    return sorted(found, key=lambda path: -found[path])


def is_empty(path: Path) -> bool:
    """Whether a recording was finished without a row in it: its selection matched nothing, or no module was called."""
    for name in ("calls", "values"):
        for part in path.glob(f"rank-*/{name}-*"):
            try:
                if part.suffix != ".parquet" or pq.read_metadata(part).num_rows:
                    return False
            except (OSError, pa.ArrowException):
                return False  # damaged, which is told when it is opened
    return (path / "rank-00000" / "modules.parquet").exists()


def nth_newest(number: int) -> Path:
    """Find a recording by its age: 0 is the newest here or in `./runs` that has something in it.

    Raises:
        RecordingError: there are not so many.
    """
    known = list(itertools.islice(newest_recordings(), number + 1))
    if number < len(known):
        return known[number]
    if known:
        raise RecordingError(
            f"there is no recording @{number}: only {len(known)} here and in ./runs, @0 to @{len(known) - 1}"
        )
    empty = _by_age()
    if empty:
        raise RecordingError(
            f"there is no recording with anything in it here or in ./runs\nthe newest one is empty: tenterhook show {empty[0]}"
        )
    raise RecordingError("there is no recording here or in ./runs\nmake one: tenterhook record SCRIPT")


def find_recordings(folder: str | os.PathLike[str] = ".") -> list[Path]:
    """List the recordings directly in a folder, newest first (by the time at which they were last written to)."""
    found = [entry / MANIFEST_NAME for entry in Path(folder).iterdir() if (entry / MANIFEST_NAME).is_file()]
    return [
        manifest.parent for manifest in sorted(found, key=lambda manifest: (-manifest.stat().st_mtime_ns, manifest))
    ]
