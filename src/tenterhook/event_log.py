"""A text log of a run: one line per event, written as it happens, readable up to the line at which a process died."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tenterhook.address import format_place
from tenterhook.backends import Summary
from tenterhook.calls import LiveCall
from tenterhook.errors import TargetError

__all__ = ["EventLog"]


class EventLog:
    """Writes events to a file, line by line.

    A line holds the step, the phase, what happened (``start``, ``value``, ``end``, ``raised``), the address and, of
    values, shape and dtype: ``step 0  forward   value  Net/conv1:output#0  (64, 32, 26, 26) float32``.

    Args:
        path: the file; replaced if it is there.

    Raises:
        TargetError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._pid = os.getpid()
        self.summary: Callable[[Any], Summary] | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8", buffering=1)  # line by line, also past a crash
        except OSError as error:
            raise TargetError(
                f"the log {self.path} cannot be written: {error.strerror}\n  name another file with --log"
            ) from error

    def __call__(self, event: str, call: LiveCall, kind: str, slot: str, what: Any) -> None:
        """Write one event; a forked child writes nothing."""
        if os.getpid() != self._pid:
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
        self._file.write(line + "\n")

    def close(self) -> None:
        """Close the file."""
        if os.getpid() == self._pid:
            self._file.close()
