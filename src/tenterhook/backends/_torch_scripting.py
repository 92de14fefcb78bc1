"""``torch.jit.script`` while hooks of ours are on: they are set aside for as long as a module is made into a script.

TorchScript reads the hooks of a module as code that belongs to it, and what stands in its ``__dict__`` as its state. Whichever way it
is asked (``torch.jit.script``, ``trace`` of a module with exported methods, a class derived from ``ScriptModule``), it goes by one
function, around which we stand while there is a session.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from tenterhook.backends._torch_editing import set_bypasses_aside
from tenterhook.backends._torch_hooks import is_hook
from tenterhook.backends._torch_native import set_around_aside

__all__ = ["scripting_without_hooks"]

_recursive: Any = importlib.import_module("torch.jit._recursive")
_NAME = "create_script_module"
_TABLES = {"_forward_pre_hooks": "_forward_pre_hooks_with_kwargs", "_forward_hooks": "_forward_hooks_with_kwargs"}


def scripting_without_hooks() -> Callable[[], None]:
    """Have modules made into scripts as if no hooks of ours were on them; returns what ends that."""
    create: Any = getattr(_recursive, _NAME)
    on = True

    @functools.wraps(create)
    def create_script_module(nn_module: Any, *args: Any, **kwargs: Any) -> Any:
        if not on or not isinstance(nn_module, nn.Module):
            return create(nn_module, *args, **kwargs)
        with _without_hooks(nn_module):
            return create(nn_module, *args, **kwargs)

    def end() -> None:
        nonlocal on
        on = False  # somebody may have put himself around ours, and go on calling it
        if getattr(_recursive, _NAME) is create_script_module:
            setattr(_recursive, _NAME, create)

    setattr(_recursive, _NAME, create_script_module)
    return end


@contextlib.contextmanager
def _without_hooks(root: nn.Module) -> Iterator[None]:
    """Have a module and all in it bare, but for the hooks of others, for the length of a ``with``."""
    aside: list[Callable[[], None]] = []
    try:
        for module in root.modules():
            attributes = vars(module)
            aside += [
                back
                for back in (
                    set_around_aside(module),
                    set_bypasses_aside(module),
                    *(
                        _set_hooks_aside(attributes.get(table), attributes.get(flags))
                        for table, flags in _TABLES.items()
                    ),
                )
                if back is not None
            ]
        yield
    finally:
        for back in reversed(aside):
            back()


def _set_hooks_aside(table: Any, flags: Any) -> Callable[[], None] | None:
    """Take our hooks out of a table; returns what puts those back that have not been removed meanwhile."""
    ours = [(key, hook) for key, hook in (table or {}).items() if is_hook(hook)]
    if not ours:
        return None
    order = list(table)
    for key, _ in ours:
        del table[key]

    def back() -> None:
        added = [key for key in table if key not in order]
        for key, hook in ours:
            if key in flags:  # which removal takes away, too
                table[key] = hook
        for key in (*order, *added):
            if key in table:
                table.move_to_end(key)

    return back
