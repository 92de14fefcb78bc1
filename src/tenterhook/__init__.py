"""Hooks on neural networks, in PyTorch and MindSpore: see, change, compare and diagnose what happens inside.

Importing this package imports no framework and changes nothing.
"""

from __future__ import annotations

from tenterhook import edits
from tenterhook.editor import Editor, edit
from tenterhook.errors import TenterhookError, TenterhookWarning
from tenterhook.hook_point import HookPoint
from tenterhook.hookset import hooks
from tenterhook.listing import installed_hooks, select
from tenterhook.recorder import Recorder, record
from tenterhook.recording.reader import open_recording as open  # th.open reads as files do
from tenterhook.single_hooks import (
    register_backward_hook,
    register_backward_pre_hook,
    register_forward_hook,
    register_forward_pre_hook,
    register_load_hook,
    register_tensor_hook,
)
from tenterhook.sweep import PatchSweep, patch_sweep

__all__ = [
    "Editor",
    "HookPoint",
    "PatchSweep",
    "Recorder",
    "TenterhookError",
    "TenterhookWarning",
    "__version__",
    "edit",
    "edits",
    "hooks",
    "installed_hooks",
    "open",
    "patch_sweep",
    "record",
    "register_backward_hook",
    "register_backward_pre_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_load_hook",
    "register_tensor_hook",
    "select",
]

__version__ = "0.1.0.dev0"


def __dir__() -> list[str]:
    return __all__
