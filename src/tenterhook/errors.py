"""Every exception that tenterhook raises on purpose.

    TenterhookError
    ├── SelectionError        a selection that is malformed or matches nothing
    ├── HookError             a hook that cannot be put on, or a callback that returned something unusable
    │   └── UnsupportedError  the framework gives no way to hook this (script module, graph mode, ...)
    ├── EditError             an edit that would change structure, shape, dtype or device
    ├── AmbiguousError        one value was asked for and several were recorded
    ├── NotRecordedError      a value was asked for that the recording does not hold
    ├── RecordingError        a recording that cannot be read or written
    │   ├── TargetError       the place to write to exists already or cannot be written
    │   └── NotComparableError  two recordings that cannot be set side by side
    └── MissingExtraError     a feature whose optional package is not installed

    TenterhookWarning         the run goes on, but probably not as it was meant (a category, to be filtered by)
    StopForward               ends a forward where th.edit was told to: a BaseException, so that a model's own
                              ``except Exception`` lets it pass; the editor catches it

Each message says what was asked, what was found and what to do.
"""

from __future__ import annotations

__all__ = [
    "AmbiguousError",
    "EditError",
    "HookError",
    "MissingExtraError",
    "NotComparableError",
    "NotRecordedError",
    "RecordingError",
    "SelectionError",
    "StopForward",
    "TargetError",
    "TenterhookError",
    "TenterhookWarning",
    "UnsupportedError",
]


class TenterhookError(Exception):
    """Root of all errors that tenterhook raises."""


class SelectionError(TenterhookError, ValueError):
    """A selection is malformed, or matches nothing; the message lists the nearest names."""


class HookError(TenterhookError):
    """A hook cannot be put on, or its callback returned something that cannot be used."""


class UnsupportedError(HookError):
    """The framework offers no way to hook this; the message says what to do instead."""


class EditError(HookError):
    """An edit changed the structure, shape, dtype or device of a value without leave."""


class AmbiguousError(TenterhookError, LookupError):
    """One value was asked for and several were recorded; the message says how to choose."""


class NotRecordedError(TenterhookError, LookupError):
    """A value was asked for that the recording does not hold; the message says why."""


class RecordingError(TenterhookError):
    """A recording cannot be read or written."""


class TargetError(RecordingError):
    """The place to write a recording to exists already, or cannot be written."""


class NotComparableError(RecordingError):
    """Two recordings cannot be set side by side; the message says which gate failed."""


class MissingExtraError(TenterhookError, ImportError):
    """An optional package is not installed; the message holds the command that installs it."""


class TenterhookWarning(UserWarning):
    """Something that is allowed, but hardly ever meant; said once for each place."""


class StopForward(BaseException):
    """The forward has ended where an edit said so (:meth:`tenterhook.editor.Editor.stop`); no error.

    Attributes:
        address: where.
        value: what the module there gave, in full.
        owner: the editor that catches it.
    """

    def __init__(self, address: object, value: object, owner: object) -> None:
        super().__init__(f"the forward was ended at {address}")
        self.address = address
        self.value = value
        self.owner = owner
