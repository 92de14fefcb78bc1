"""What hooks need of a framework, held for as long as they are on: fast paths off, compiled code eager."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tenterhook.backends import Backend

__all__ = ["see_everything"]


def see_everything(backend: Backend, module: Any) -> tuple[Sequence[str], Callable[[], object]]:
    """Keep fast paths off and compiled code eager until the end, which also comes by itself where nobody calls it.

    That is when the module is gone, or the interpreter ends: what waits for the collector there finds Python half taken down.

    Returns:
        sentences that say what was changed, and the function that sets it back; a second call of it does nothing.
    """
    stack = contextlib.ExitStack()
    told = stack.enter_context(backend.seeing_everything(module))
    return told, weakref.finalize(module, stack.close)
