"""Tracebacks of a program, without the frames that recording has brought into them."""

from __future__ import annotations

from types import TracebackType

__all__ = ["without_own_frames"]


def without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Give a traceback without the frames of this package."""
    kept = []
    while traceback is not None:
        if not str(traceback.tb_frame.f_globals.get("__name__", "")).startswith("tenterhook."):
            kept.append(traceback)
        traceback = traceback.tb_next
    made: TracebackType | None = None
    for one in reversed(kept):
        made = TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made
