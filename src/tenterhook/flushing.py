"""Handing over what a capture holds while the run goes on, so that a kill, or a run that hangs, loses a second at most."""

from __future__ import annotations

import logging
import os
import threading
import weakref

from tenterhook.capture import Capture
from tenterhook.recording.pace import Pace

__all__ = ["PACE", "Flusher", "lasts_in_children"]

_INTERVAL = 0.5
"""Seconds that rows may wait in a capture, and again in the sink."""

PACE = Pace(flush_interval=_INTERVAL)
"""How often the sink of a session writes."""

_log = logging.getLogger("tenterhook")
_watched: weakref.WeakSet[Capture] = weakref.WeakSet()
_at_fork = threading.Event()  # set once the process has been told what to do in its children


def lasts_in_children(capture: Capture) -> None:
    """Have a capture renew its locks in a child of this process, where those that other threads held are held for ever."""
    _watched.add(capture)
    if not _at_fork.is_set() and hasattr(os, "register_at_fork"):
        _at_fork.set()
        os.register_at_fork(after_in_child=_forked)


class Flusher:
    """Flushes a capture twice a second, from a thread of its own: also where nothing is called any more.

    The thread does not keep the capture alive.
    """

    def __init__(self, capture: Capture, interval: float = _INTERVAL) -> None:
        self._stop = threading.Event()
        lasts_in_children(capture)
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(capture), self._stop, interval), name="tenterhook-flush", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what comes after is not flushed."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()


def _run(ref: weakref.ref[Capture], stop: threading.Event, interval: float) -> None:
    told = 0
    while not stop.wait(interval):
        capture = ref()
        if capture is None or capture.closed:
            return
        try:
            # Looked at before the rows, the step first. Of a step that has ended what is evaluated before the next begins is part.
            step = capture.tracker.step
            ended = step if capture.tracker.has_begun or not capture.active else step - 1
            # Without waiting: a signal may close the recording while the lock is held, and wait for this thread.
            if capture.rows.flush(wait=False) and ended > told:
                capture.sink.steps_ended(ended)
                told = ended
        except Exception as error:  # a fault of ours ends the recording, never the run
            # Hooks stay on and do nothing: to take them off from here would change tables that a call may be going through.
            capture.see_no_more(f"{type(error).__name__}: {error}")
            _log.warning("recording stopped by a fault in tenterhook; the run goes on", exc_info=error)
        del capture


def _forked() -> None:
    for capture in list(_watched):
        capture.forked()
