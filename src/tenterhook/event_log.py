"""A text log of a run: one line per event, written as it happens, readable up to the line at which a process died."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tenterhook.address import format_place
from tenterhook.backends import Summary
from tenterhook.calls import LiveCall
from tenterhook.errors import TargetError

__all__ = ["EventLog"]

_logger = logging.getLogger("tenterhook")


class EventLog:
    """Writes events to a file, line by line.

    A line holds the step, the phase, what happened (``start``, ``value``, ``end``, ``raised``), the address and, of
    values, shape and dtype: ``step 0  forward   value  Net/conv1:output#0  (64, 32, 26, 26) float32``.

    A disk that is full ends the log, and neither the recording nor the run.

    Args:
        path: the file; replaced if it is there.
        rank: which of several processes writes; each has a file of its own, `events-rank-00001.txt`. None where there is one.
        goes_on: add to a file that is there.

    Attributes:
        path: the file.
        failure: why nothing more is written; None while all is well.

    Raises:
        TargetError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int | None = None, goes_on: bool = False) -> None:
        self.path = Path(path)
        if rank is not None:
            self.path = self.path.with_name(f"{self.path.stem}-rank-{rank:05d}{self.path.suffix}")
        self._pid = os.getpid()
        self.summary: Callable[[Any], Summary] | None = None
        self.failure: str | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open(
                "a" if goes_on else "w", encoding="utf-8", buffering=1
            )  # line by line, also past a crash
        except OSError as error:
            raise TargetError(
                f"the log {self.path} cannot be written: {error.strerror}\n  name another file with --log"
            ) from error

    def __call__(self, event: str, call: LiveCall, kind: str, slot: str, what: Any) -> None:
        """Write one event; a forked child writes nothing."""
        if self.failure is not None or os.getpid() != self._pid:
            return
        phase = "backward" if event == "backward" else call.phase
        place = format_place(call.watched.path, model=call.watched.model)
        name = f"{kind}.{slot}" if slot[:1].isidentifier() else kind + slot
        address = f"{place}:{name}#{call.number}" if kind else f"{place}#{call.number}"
        line = f"step {call.step}  {phase:<9} {'value' if event == 'backward' else event:<6} {address}"
        if event == "start":
            line += f"  {call.watched.type}"
        elif event == "raised":
            line += f"  {what}"
        elif kind and self.summary is not None:
            shape, dtype, _ = self.summary(what)
            line += f"  {shape} {dtype}"
        try:
            self._file.write(line + "\n")
        except OSError as error:
            self.failure = f"the log {self.path} ends at step {call.step}: {error.strerror}"
            _logger.warning("%s; the recording goes on", self.failure)
            with contextlib.suppress(OSError):  # the same again, of what is left to be written
                self._file.close()

    def close(self) -> None:
        """Close the file."""
        if self.failure is None and os.getpid() == self._pid:
            self._file.close()
