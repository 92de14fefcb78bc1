"""Tracebacks of calls under our hooks, as they would be without them.

Hooks of ours make ``Module._call_impl`` take the way that all hooks take, which shows as one frame more for each module.
Where nobody else's hooks are on the module, the frame is left out, and the one before it points to where torch would
have been without hooks.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType, TracebackType
from typing import Any

from torch import nn
from torch.nn.modules import module as _module

__all__ = ["bare_traceback"]

_CALL = nn.Module._call_impl.__code__
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_TABLES = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def bare_traceback(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that our hooks have brought into it."""
    kept: list[tuple[Any, int, int]] = []
    entries = list(_walk(traceback))
    for index, one in enumerate(entries):
        frame = one.tb_frame
        after = entries[index + 1].tb_frame if index + 1 < len(entries) else None
        before = entries[index - 1].tb_frame if index else None
        if _is_inner(frame, before) and _only_ours(before):
            continue
        if frame.f_code is _CALL and after is not None and _is_inner(after, frame) and _only_ours(frame):
            position = _plain_call(_CALL)
            if position is not None:
                kept.append((frame, *position))
                continue
        kept.append((frame, one.tb_lasti, one.tb_lineno))
    made: TracebackType | None = None
    for frame, instruction, line in reversed(kept):
        made = TracebackType(made, frame, instruction, line)
    return made


def _walk(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_inner(frame: Any, before: Any) -> bool:
    """Whether ``frame`` is the function inside ``_call_impl`` that runs hooks."""
    return before is not None and before.f_code is _CALL and frame.f_code in _CALL.co_consts


def _only_ours(frame: Any) -> bool:
    module = frame.f_locals.get("self")
    hooks = [hook for name in _TABLES for hook in getattr(module, name, {}).values()]
    hooks += [hook for name in _GLOBAL_TABLES for hook in getattr(_module, name).values()]
    return all(type(hook).__module__.startswith("tenterhook.") for hook in hooks)


@functools.cache
def _plain_call(code: CodeType) -> tuple[int, int] | None:
    """Find the instruction by which ``_call_impl`` calls forward where there are no hooks: (offset, line)."""
    line = None
    for instruction in dis.get_instructions(code):
        start = (
            instruction.starts_line
            if isinstance(instruction.starts_line, int) and not isinstance(instruction.starts_line, bool)
            else getattr(instruction, "line_number", None)
        )
        line = start if start is not None else line
        if line is not None and instruction.opname.startswith("CALL_FUNCTION_EX"):
            return instruction.offset, line  # the first call with *args is the plain one
    return None
