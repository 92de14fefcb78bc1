"""What is to be recorded of a script that knows nothing of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tenterhook.event_log import EventLog
from tenterhook.recording.environment import start_manifest
from tenterhook.recording.manifest import Manifest
from tenterhook.request import capture_options
from tenterhook.row_capture import CaptureOptions
from tenterhook.sampling import Sampling

__all__ = ["ScriptRequest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptRequest:
    """What is to be recorded of a script.

    Attributes:
        select: patterns; each needs to match in some model of the script only.
        kinds: as :func:`tenterhook.record` takes them, and so are the options that are not said here.
        ops: whether functional calls are recorded, too.
        every: every n-th step; or patterns and the n of what each matches, in whichever model.
        log: text file that gets a line per event.
        resume: go on with a recording that is there, at the step of that number, which the script does first.
        argv: the script's command line, for the manifest.
    """

    select: Sequence[str] | None = None
    kinds: Collection[str] | None = None
    stats: str | None = "basic"
    sketch: bool = True
    tensors: bool = False
    ops: bool = False
    every: int | Mapping[str, int] = 1
    steps: str | None = None
    log: str | os.PathLike[str] | None = None
    overwrite: bool = False
    resume: int | None = None
    on_error: str = "warn"
    note: str | None = None
    argv: Sequence[str] = ()

    def options(self, kinds: frozenset[str]) -> CaptureOptions:
        """What the capture is to do; a script's traceback is its own, so that errors get no note."""
        options = capture_options(
            kinds,
            stats=self.stats,
            sketch=self.sketch,
            recompute=False,
            on_error=self.on_error,
            to_disk=True,
            ops=self.ops,
        )
        return replace(options, note_errors=False)

    def manifest(self, kinds: frozenset[str], sampling: Sampling) -> Manifest:
        """Begin the manifest."""
        return start_manifest(
            argv=list(self.argv),
            kinds=sorted(kinds),
            select=", ".join(self.select or ["**"]),
            tensors=str(self.tensors).lower(),
            note=self.note,
            options={"stats": self.stats, "sketch": self.sketch, **sampling.asked, "ops": self.ops},
        )

    def open_log(self, manifest: Manifest) -> EventLog | None:
        """Open the log; of several processes each has one."""
        rank = manifest.rank if manifest.world > 1 else None
        return None if self.log is None else EventLog(self.log, rank=rank, goes_on=self.resume is not None)
