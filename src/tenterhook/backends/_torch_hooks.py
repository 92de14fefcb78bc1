"""What stands in a torch module's hook tables for us."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from tenterhook.backends import After, Before, Failed, Layer
from tenterhook.backends._torch_attachments import iterated, remove_late
from tenterhook.backends._torch_compiled import look_for_compiled, runs
from tenterhook.backends._torch_unseen import unseen
from tenterhook.native import NATIVE

__all__ = ["AfterHook", "BeforeHook", "LoadHook", "is_hook"]


class Hook:
    """A callback in a module's hook table; copies and pickles of the module carry one that does nothing."""

    __slots__ = ("after", "before", "failed", "layer")

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        # loads where tenterhook is not installed, takes any arguments, returns None
        return (getattr, (contextlib.nullcontext(), "__exit__"))


class BeforeHook(Hook):
    __slots__ = ()

    def __init__(self, before: Before, layer: Layer) -> None:
        self.before = before
        self.layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs is None:  # removed by a hook before it in this very call: torch still calls it, and has forgotten how
            return None
        remove_late()
        if runs:
            look_for_compiled(module)
        if (without := unseen()) is None:
            return self.before(module, args, kwargs)
        with without:
            return self.before(module, args, kwargs)


_REMOVED = object()
_nothing = contextlib.nullcontext()


class AfterHook(Hook):
    __slots__ = ()

    def __init__(self, after: After | None, failed: Failed | None, layer: Layer) -> None:
        self.after = after
        self.failed = failed
        self.layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = _REMOVED) -> Any:
        if output is _REMOVED:  # by a hook before it in this very call
            return None
        if runs:
            look_for_compiled(module)
        error = sys.exc_info()[1]
        # torch runs these hooks also when the call raised, from the handler in the frame that calls us
        if error is not None and error.__traceback__ is not None and error.__traceback__.tb_frame is sys._getframe(1):
            if self.failed is not None:
                with iterated(module._forward_hooks), unseen() or _nothing:
                    self.failed(module, args, kwargs, error)
            return None
        if self.after is None:
            return None
        if (without := unseen()) is None:
            return self.after(module, args, kwargs, output)
        with without:
            return self.after(module, args, kwargs, output)


class LoadHook(Hook):
    __slots__ = ("fn",)

    def __init__(self, fn: Callable[[Any, Any], None]) -> None:
        self.fn = fn

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.fn(module, incompatible_keys)


_HOOKS: tuple[type, ...] = (Hook,) if NATIVE is None else (Hook, NATIVE.Before, NATIVE.After)


def is_hook(value: object) -> bool:
    """Whether something in a hook table is ours."""
    return isinstance(value, _HOOKS)
