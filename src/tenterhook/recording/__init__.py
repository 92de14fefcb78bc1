"""What `record` makes and everything else reads, in memory or in a directory `NAME.thk`. Knows no framework."""

from __future__ import annotations

from tenterhook.recording.call import Call
from tenterhook.recording.coverage import Coverage
from tenterhook.recording.manifest import Cost, Git, Manifest, Model
from tenterhook.recording.memory import MemorySink
from tenterhook.recording.pace import Pace
from tenterhook.recording.reader import find_recordings, newest_recordings, nth_newest, open_recording
from tenterhook.recording.recording import Recording
from tenterhook.recording.sequences import Samples, TensorSequence
from tenterhook.recording.sink import Sink
from tenterhook.recording.value import Nested, Value
from tenterhook.recording.view import ModuleView
from tenterhook.recording.writer import DiskSink

__all__ = [
    "Call",
    "Cost",
    "Coverage",
    "DiskSink",
    "Git",
    "Manifest",
    "MemorySink",
    "Model",
    "ModuleView",
    "Nested",
    "Pace",
    "Recording",
    "Samples",
    "Sink",
    "TensorSequence",
    "Value",
    "find_recordings",
    "newest_recordings",
    "nth_newest",
    "open_recording",
]
