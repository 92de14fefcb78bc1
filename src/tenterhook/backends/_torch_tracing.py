"""Staying out of the graphs that ``torch.jit.trace`` makes of what runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["untraced"]

_C: Any = torch._C  # no public function says, or sets, whether a trace is being made
_get_state = _C._get_tracing_state
_set_state = _C._set_tracing_state


def untraced() -> AbstractContextManager[None] | None:
    """While a trace is being made: a context in which what is done stays out of it, and sizes are plain numbers. Else None."""
    state = _get_state()
    return None if state is None else _without(state)


@contextlib.contextmanager
def _without(state: Any) -> Iterator[None]:
    _set_state(None)
    try:
        yield
    finally:
        _set_state(state)
