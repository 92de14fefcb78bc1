"""Hooks that are not around a module's call: on the gradient of one tensor, on loading, on an optimizer's step."""

from __future__ import annotations

from typing import Any

from tenterhook.backends import Backend
from tenterhook.changing import check_not_earlier
from tenterhook.errors import HookError
from tenterhook.handles import HookSite, name_of
from tenterhook.replacing import check_replacement

__all__ = ["GradientHook", "LoadHook", "OptimizerHook"]


class _EventHook:
    """What these hooks have in common."""

    def __init__(self, site: HookSite) -> None:
        self.site = site

    @property
    def where(self) -> str:
        return f"{self.site.kind} of {self.site.path or '(root)'} ({name_of(self.site.fn)})"


class GradientHook(_EventHook):
    """``fn(*first, gradient)`` when the gradient of one tensor or parameter is known."""

    def __init__(self, backend: Backend, site: HookSite, *first: Any) -> None:
        super().__init__(site)
        self._backend = backend
        self._first = first

    def __call__(self, gradient: Any) -> Any:
        """Give the gradient to the callback; returns None, or its replacement."""
        if not self.site.live or self.site.busy:
            return None
        self.site.fired += 1
        new = self.site.call(*self._first, gradient)
        if new is not None:
            check_not_earlier(self._backend, self.site, gradient, new, self.where)
            check_replacement(self._backend, gradient, new, self.where)
        return new


class LoadHook(_EventHook):
    """``fn(module, incompatible_keys)`` after a module has loaded its parameters."""

    def __call__(self, module: Any, incompatible_keys: Any) -> None:
        """Give the keys to the callback, which may change both lists in place.

        Raises:
            HookError: the callback returned something.
        """
        if not self.site.live or self.site.busy:
            return
        self.site.fired += 1
        returned = self.site.call(module, incompatible_keys)
        if returned is not None:
            raise HookError(
                f"{self.where}: the callback returned {type(returned).__name__}, which nothing can use\n"
                "  change incompatible_keys.missing_keys and .unexpected_keys in place, and return None"
            )


class OptimizerHook(_EventHook):
    """``fn(optimizer)`` before or after an optimizer's step."""

    def __call__(self, optimizer: Any) -> None:
        """Give the optimizer to the callback; what it returns is discarded."""
        if self.site.live and not self.site.busy:
            self.site.fired += 1
            self.site.call(optimizer)
