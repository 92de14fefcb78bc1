"""Where in the user's code a call was made."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["folder_of", "line_of_user"]

_OURS = str(Path(__file__).parent.parent) + os.sep
_MOST_FRAMES = 100


def folder_of(package: object) -> str:
    """Return the folder of a package, as the names of its files begin."""
    return str(Path(getattr(package, "__file__", "")).parent) + os.sep


def line_of_user(framework: str) -> str | None:
    """Return ``file.py:12`` of the innermost frame that is neither ours nor the framework's; None where there is none.

    Args:
        framework: the framework's folder, as given by :func:`folder_of`.
    """
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        name = frame.f_code.co_filename
        if not name.startswith((framework, _OURS)):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None
