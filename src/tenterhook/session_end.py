"""The end of a recording session, the same for one model and for a whole script."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from tenterhook.capture import Capture
from tenterhook.parameters import ParameterWatch
from tenterhook.recording.environment import now
from tenterhook.recording.manifest import Cost, Manifest, Model

__all__ = ["end_capture", "finish_manifest", "words_of"]


def words_of(error: BaseException | None) -> str | None:
    """Say what ended a session, as type and message; None where it ended well, by ``sys.exit(0)`` too."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return None
    return f"{type(error).__name__}: {error}".rstrip(": ")


def end_capture(
    capture: Capture, parameters: Iterable[ParameterWatch], error: BaseException | None
) -> Exception | None:
    """Close what is still open, take everything off, and hand over the last rows.

    Returns:
        a fault of ours that came up, which ends no run: the recording is marked partial; to be raised where that is wanted
        and nothing of the user's stands in its way.
    """
    fault: Exception | None = None
    capture.closed = True  # another thread may be calling modules: their hooks do nothing from now on
    for close in (lambda: capture.abandon_open_calls(error), *(one.close for one in parameters), capture.close):
        try:
            close()
        except Exception as one:  # a fault of ours: it must not stand in the way of the user's own exception
            fault = fault or one
            capture.stop(f"{type(one).__name__}: {one}")
    return fault


def finish_manifest(
    manifest: Manifest, capture: Capture, models: Iterable[Model], told: Sequence[str], *, began_ns: int, recorded: int
) -> None:
    """Fill in what is known at the end.

    Args:
        manifest: of this recording.
        capture: which has ended.
        models: that ran.
        told: what was changed so that hooks see everything.
        began_ns: when the time began of which the cost is a share.
        recorded: number of steps that were recorded.
    """
    manifest.ended = now()
    manifest.models = list(models)
    manifest.told = [*told, *dict.fromkeys(capture.told)]
    manifest.steps = capture.tracker.steps_seen
    manifest.steps_recorded = recorded
    manifest.optimizer_steps = capture.tracker.turns.counts
    manifest.partial = manifest.partial or capture.failure
    manifest.cost = Cost(hook_seconds=capture.hook_ns / 1e9, wall_seconds=(time.perf_counter_ns() - began_ns) / 1e9)
