"""Finding and opening recordings on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tenterhook.recording.manifest import MANIFEST_NAME
from tenterhook.recording.recording import Recording

__all__ = ["find_recordings", "open_recording"]


def open_recording(path: str | os.PathLike[str], *, ranks: Sequence[int] | None = None) -> Recording:
    """Open a recording from its directory. Imports no framework.

    Whatever is there is read: after a kill, all complete batches, and `recording.manifest.complete` is false; while it
    is being written, what was there when a table is asked for.

    Args:
        path: the directory, `NAME.thk`.
        ranks: read these processes only.

    Raises:
        RecordingError: there is no such directory, it is not a recording, it is damaged, or written by a newer major
            version.
    """
    return Recording.open(path, ranks=ranks)


def find_recordings(folder: str | os.PathLike[str] = ".") -> list[Path]:
    """List the recordings directly in a folder, newest first (by the time at which they were last written to)."""
    found = [entry / MANIFEST_NAME for entry in Path(folder).iterdir() if (entry / MANIFEST_NAME).is_file()]
    return [
        manifest.parent for manifest in sorted(found, key=lambda manifest: (-manifest.stat().st_mtime_ns, manifest))
    ]
