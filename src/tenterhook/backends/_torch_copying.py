"""Copies and pickles of modules that hooks of ours are on: they are those of the bare module.

What stands in a hook table is copied and pickled with the module. Ours do nothing there, but they would be read by TorchScript, and
keep places in the tables of another process, whose own hooks may come to bear the same numbers.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn

from tenterhook.backends._torch_hooks import is_hook

__all__ = ["copying_without_hooks"]

_NAME = "__reduce_ex__"  # copy and pickle both ask it for what a module is made of
_TABLES = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_load_state_dict_post_hooks": (),
}


def copying_without_hooks() -> Callable[[], None]:
    """Have modules copied and pickled as if no hooks of ours were on them; returns what ends that."""
    before: Any = vars(nn.Module).get(_NAME)
    reduce: Any = getattr(nn.Module, _NAME)
    on = True

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced = reduce(self, protocol)
        if not on or sys._getframe(1).f_code is copy.copy.__code__:  # which shares the tables with the original
            return reduced
        return _without_hooks(reduced)

    def end() -> None:
        nonlocal on
        on = False  # somebody may have put himself around ours, and go on calling it
        if vars(nn.Module).get(_NAME) is __reduce_ex__:
            if before is None:
                delattr(nn.Module, _NAME)
            else:
                setattr(nn.Module, _NAME, before)

    setattr(nn.Module, _NAME, __reduce_ex__)
    return end


def _without_hooks(reduced: Any) -> Any:
    """Return what a module is made of, with tables that lack our hooks; the tables themselves stay as they are."""
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        return reduced
    state = reduced[2]
    slots = isinstance(state, tuple) and len(state) == 2  # of a class with ``__slots__``: (attributes, slots)
    attributes = state[0] if slots else state
    if not isinstance(attributes, dict):
        return reduced
    changed: dict[str, Any] = {}
    for name, flags in _TABLES.items():
        table = attributes.get(name)
        if not isinstance(table, dict):
            continue
        ours = {key for key, hook in list(table.items()) if is_hook(hook)}
        if ours:
            changed |= {one: _without(attributes[one], ours) for one in (name, *flags) if one in attributes}
    if not changed:
        return reduced
    attributes = {**attributes, **changed}
    return (*reduced[:2], (attributes, state[1]) if slots else attributes, *reduced[3:])


def _without(table: dict[int, Any], keys: set[int]) -> OrderedDict[int, Any]:
    return OrderedDict((key, value) for key, value in list(table.items()) if key not in keys)
