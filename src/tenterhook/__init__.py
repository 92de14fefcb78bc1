"""Hooks on neural networks, in PyTorch and MindSpore: see, change, compare and diagnose what happens inside.

Importing this package imports no framework and changes nothing. A public name is loaded when it is first asked for, so that
`tenterhook --help` need not wait for Arrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenterhook.errors import TenterhookError
    from tenterhook.hookset import hooks
    from tenterhook.recorder import Recorder, record
    from tenterhook.recording.reader import open_recording as open  # th.open reads as files do

__all__ = ["Recorder", "TenterhookError", "__version__", "hooks", "open", "record"]

__version__ = "0.1.0.dev0"

_PLACES = {
    "Recorder": ("tenterhook.recorder", "Recorder"),
    "TenterhookError": ("tenterhook.errors", "TenterhookError"),
    "hooks": ("tenterhook.hookset", "hooks"),
    "open": ("tenterhook.recording.reader", "open_recording"),
    "record": ("tenterhook.recorder", "record"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'tenterhook' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
