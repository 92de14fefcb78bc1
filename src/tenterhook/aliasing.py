"""Aliases that a module is given for its inputs, so that the gradients seen there are those through this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenterhook.backends import Backend, Detachable, settle_alias

__all__ = ["InputAliases"]

Tapping = Callable[[str, Any, bool], "Detachable | str | None"]
"""``(slot, tensor, is the tensor itself and not its alias)``; puts a tap on."""


class InputAliases:
    """The aliases of one call, and the taps on them.

    A module that works in place on an alias cuts that one off: its tap never fires. So the tensor itself is tapped as well, as
    it is before the module runs, and once the module has run one of the two taps is taken off.
    """

    __slots__ = ("_backend", "_taps", "by_slot")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._taps: list[tuple[Any, int | None, Detachable | None, Detachable | None]] = []
        self.by_slot: dict[str, Any] = {}

    def add(self, slot: str, tensor: Any, tap: Tapping | None) -> None:
        """Make an alias of one input; ``tap=None`` leaves it without taps."""
        backend = self._backend
        alias = self.by_slot[slot] = backend.alias(tensor)
        if tap is not None:
            inner = tap(slot, alias, False)
            outer = None if backend.is_leaf(tensor) else tap(slot, tensor, True)
            self._taps.append((alias, backend.version(alias), _put_on(inner), _put_on(outer)))

    def settle(self, where: str) -> None:
        """The module has run: keep, of each pair of taps, the one that will see the gradient.

        Raises:
            UnsupportedError: the module has changed an alias in place, and the framework gives wrong gradients then.
        """
        taps, self._taps = self._taps, []
        for alias, version, inner, outer in taps:
            settle_alias(self._backend, alias, version, inner, outer, where)


def _put_on(tap: Detachable | str | None) -> Detachable | None:
    return None if isinstance(tap, str) else tap
