"""Hooks on neural networks, in PyTorch and MindSpore: see, change, compare and diagnose what happens inside.

Importing this package imports no framework and changes nothing.
"""

from __future__ import annotations

from tenterhook.errors import TenterhookError
from tenterhook.hookset import hooks
from tenterhook.recorder import Recorder, record
from tenterhook.recording.reader import open_recording as open  # th.open reads as files do

__all__ = ["Recorder", "TenterhookError", "__version__", "hooks", "open", "record"]

__version__ = "0.1.0.dev0"
