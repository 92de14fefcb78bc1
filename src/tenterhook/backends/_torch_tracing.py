"""Staying out of the graphs that ``torch.jit.trace`` and ``torch.export`` make of what runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

__all__ = ["untraced"]

_C: Any = torch._C  # no public function says, or sets, whether a trace is being made
_get_state = _C._get_tracing_state
_set_state = _C._set_tracing_state


_is_included = _C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = _C.DispatchKey.PreDispatch


def untraced() -> AbstractContextManager[None] | None:
    """While a trace is being made: a context in which what is done stays out of it, and sizes are plain numbers. Else None."""
    state = _get_state()
    if state is not None:
        return _without(state)
    if not _is_included(_PRE_DISPATCH) or get_proxy_mode() is None:
        return None
    return cast("AbstractContextManager[None]", disable_proxy_modes_tracing())


@contextlib.contextmanager
def _without(state: Any) -> Iterator[None]:
    _set_state(None)
    try:
        yield
    finally:
        _set_state(state)
