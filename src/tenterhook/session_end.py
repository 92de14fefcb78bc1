"""The end of a recording session, the same for one model and for a whole script."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from tenterhook.capture import Capture
from tenterhook.parameters import ParameterWatch
from tenterhook.recording.environment import now
from tenterhook.recording.manifest import Cost, Manifest, Model
from tenterhook.recording.sink import Sink

__all__ = ["Ending", "end_capture", "finish_manifest", "words_of"]

T = TypeVar("T")


class Ending:
    """The end of a session, part by part: each is done though one before has failed, so that nothing recorded is lost.

    Attributes:
        fault: the first fault of ours; to be raised where that is wanted and nothing of the user's stands in its way.
        interrupt: the first exception that is no fault, such as Ctrl-C; to be raised when all is done.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.fault: Exception | None = None
        self.interrupt: BaseException | None = None
        self._manifest = manifest

    def do(self, part: Callable[[], T], what: str, otherwise: T) -> T:
        """Do a part; where it fails, the recording is marked partial.

        Args:
            part: to be done.
            what: what has failed, to be told.
            otherwise: what is given where it fails.
        """
        try:
            return part()
        except (
            Exception
        ) as fault:  # a fault of ours: it must neither hide the user's error nor keep the rest from being done
            self.fault = self.fault or fault
            words = f"{what}: {type(fault).__name__}: {fault}"
            self._manifest.partial = f"{self._manifest.partial}; {words}" if self._manifest.partial else words
        except BaseException as interrupt:
            self.interrupt = self.interrupt or interrupt
        return otherwise

    def count(self, steps: int) -> None:
        """So many steps have ended; of those on which nothing was recorded not each was told."""
        self._manifest.steps = max(self._manifest.steps, steps)

    @contextlib.contextmanager
    def at_any_rate(self, sink: Sink, take_off: Callable[[], None]) -> Iterator[None]:
        """End a session whatever happens: an interrupt may come between the parts, or while the sink finishes its files.

        What was recorded is written then, and the recording is left unfinished, as after a kill.

        Args:
            sink: where it goes.
            take_off: takes everything off and hands the last rows over, or what is left of that.
        """
        try:
            yield
        except BaseException:
            try:
                take_off()
            finally:
                sink.break_off(self._manifest)
            raise


def words_of(error: BaseException | None) -> str | None:
    """Say what ended a session, as type and message; None where it ended well, by ``sys.exit(0)`` too."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return None
    return f"{type(error).__name__}: {error}".rstrip(": ")


def end_capture(
    ending: Ending, capture: Capture, parameters: Iterable[ParameterWatch], error: BaseException | None
) -> None:
    """Close what is still open, take everything off, and hand over the last rows."""
    if error is not None and words_of(error) is not None:
        capture.raised = type(error).__name__
    capture.closed = True  # another thread may be calling modules: their hooks do nothing from now on
    ending.count(capture.tracker.step)
    ending.do(lambda: capture.abandon_open_calls(error), "open calls could not be recorded", None)
    for one in parameters:
        ending.do(one.close, "the last values of parameters could not be recorded", None)
    ending.do(capture.close, "the last rows could not be recorded, or hooks not be taken off", None)


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
    unsure = capture.rows.unsure_rows
    missing = f"interrupted while {unsure:,} rows were handed over, which may be missing" if unsure else None
    manifest.partial = "; ".join(filter(None, (capture.failure, missing, manifest.partial))) or None
    manifest.cost = Cost(hook_seconds=capture.hook_ns / 1e9, wall_seconds=(time.perf_counter_ns() - began_ns) / 1e9)
