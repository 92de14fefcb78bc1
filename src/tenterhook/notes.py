"""Notes on errors that pass through a session: which module, which call, which callback."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from tenterhook.backends import Backend
from tenterhook.values import ParameterNames, argument_leaves, bind_arguments

__all__ = ["add_note", "call_note", "note_error"]

_log = logging.getLogger("tenterhook")
_MARK = "tenterhook: "
_MOST_INPUTS = 8  # told of one call


def add_note(error: BaseException, text: str) -> None:
    """Add a line to an exception's message; where Python cannot (before 3.11), to the log."""
    if sys.version_info >= (3, 11):
        error.add_note(_MARK + text)
    else:
        _log.warning("%s: %s", type(error).__name__, text)


def note_error(error: BaseException, text: str) -> None:
    """Say on an exception where it was raised, where Python can (3.11 on); the first to do so, the innermost, wins."""
    if sys.version_info >= (3, 11) and not any(
        isinstance(note, str) and note.startswith(_MARK) for note in getattr(error, "__notes__", ())
    ):
        error.add_note(_MARK + text)


def call_note(
    backend: Backend,
    name: str,
    module: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    names: ParameterNames | None = None,
    call: str = "",
) -> str:
    """Say where an error was raised: ``in the forward of fc2 (Linear), called with input float32 (4, 3)``.

    Args:
        backend: the module's framework.
        name: path of the module.
        module: the module.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        names: names of the module's inputs, where they are known already.
        call: which call of it, where that is known: ``call 0 of step 3``.
    """
    names = names or ParameterNames.of(backend.forward_function(module))
    inputs = argument_leaves(bind_arguments(names, tuple(args), kwargs), backend.tensor_types)
    shown = []
    for slot, tensor in inputs[:_MOST_INPUTS]:
        shape, dtype, _ = backend.summary(tensor)
        shown.append(f"{slot} {dtype} {shape}")
    if len(inputs) > _MOST_INPUTS:
        shown.append(f"and {len(inputs) - _MOST_INPUTS} more")
    phase = "recomputed forward" if backend.in_backward() else "forward"
    where = f"in the {phase} of {name or '(root)'} ({type(module).__name__})"
    return f"{where}{', ' + call if call else ''}, called with {', '.join(shown) or 'no tensors'}"
