"""Whether the processor takes subnormal numbers for zero, which a thread may have set for itself: off while NumPy measures."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["exact_subnormals"]

_ENVIRONMENT_BYTES = 64  # of fenv_t: 32 with glibc on x86-64, 8 on aarch64


@contextlib.contextmanager
def exact_subnormals() -> Iterator[None]:
    """Count subnormal numbers as what they are on this thread, whatever mode it is in; the mode is put back.

    By the C library's floating-point environment; where that cannot be reached (not on Linux) the mode stays as it is.
    """
    if _get is None or _set is None:
        yield
        return
    before = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    _get(before)
    _set(ctypes.c_void_p(-1))  # FE_DFL_ENV
    try:
        yield
    finally:
        _set(before)


def _functions() -> tuple[Callable[[Any], int] | None, Callable[[Any], int] | None]:
    if not sys.platform.startswith("linux"):
        return None, None
    try:
        library = ctypes.CDLL("libm.so.6")
        return library.fegetenv, library.fesetenv
    except (OSError, AttributeError):  # another C library than glibc
        return None, None


_get, _set = _functions()
