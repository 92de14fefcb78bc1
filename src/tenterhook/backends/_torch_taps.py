"""Gradient taps on torch tensors: one hook of ours per tensor, with the order of its taps under our control."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["PostAccumulateTap", "Tap", "tap_tensor"]


class _Port:
    """The one hook that we keep on a tensor; runs its taps, the last module to have finished first."""

    __slots__ = ("__weakref__", "handle", "ref", "taps")

    __torch_unserializable__ = True  # tensors are pickled without it, and without torch's warning

    def __init__(self) -> None:
        self.taps: list[Tap] = []
        self.handle: Any = None
        self.ref = weakref.ref(self)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        replaced = None
        for tap in reversed(self.taps[:]):
            if tap.live:
                new = tap.fn(gradient)
                if new is not None:
                    gradient = replaced = new
        return replaced

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (contextlib.nullcontext(), "__exit__"))


class Tap:
    """One callback on the gradient of one tensor."""

    __slots__ = ("__weakref__", "fn", "live", "module", "owner", "port")

    def __init__(self, port: _Port, fn: Callable[[Any], Any], module: Any, owner: object) -> None:
        self.port = port.ref  # the port holds its taps; a cycle would keep what they refer to until the next collection
        self.fn = fn
        self.module = None if module is None else id(module)
        self.owner = owner
        self.live = True

    def remove(self) -> None:
        if not self.live:
            return
        self.live = False
        port = self.port()
        if port is None:
            return
        with contextlib.suppress(ValueError):
            port.taps.remove(self)
        if not port.taps:
            port.handle.remove()


def tap_tensor(tensor: torch.Tensor, fn: Callable[[Any], Any], module: Any, owner: object) -> Tap | str:
    """Put ``fn`` on the gradient of ``tensor`` as it is now (later in-place changes make a new version of it)."""
    if not tensor.requires_grad:
        if torch.is_inference_mode_enabled():
            return "inference mode"
        return "requires_grad=False" if torch.is_grad_enabled() else "grad mode off"
    hooks = tensor._backward_hooks  # None again after an in-place change: the new version has hooks of its own
    port: _Port | None = None
    if hooks:
        for hook in hooks.values():
            if isinstance(hook, _Port):
                port = hook
                break
    if port is None:
        port = _Port()
        port.handle = tensor.register_hook(port)
    taps = port.taps
    tap = Tap(port, fn, module, owner)
    place = len(taps)
    if tap.module is not None:
        # Taps run from the end of the list; those of one module's one call stand together, first come first run.
        while place and taps[place - 1].module == tap.module and taps[place - 1].owner is not owner:
            place -= 1
    elif owner is None:
        # Hooks that people put on a tensor itself run in the order in which they were put on.
        while place and taps[place - 1].module is None and taps[place - 1].owner is None:
            place -= 1
    taps.insert(place, tap)
    return tap


class PostAccumulateTap:
    """A callback on ``parameter.grad`` after a backward pass has added to it."""

    __slots__ = ("_handle", "live")

    def __init__(self, parameter: torch.Tensor, fn: Callable[[Any], Any]) -> None:
        self.live = True

        def after_accumulation(leaf: torch.Tensor) -> None:
            if self.live and leaf.grad is not None:
                fn(leaf.grad)

        after_accumulation.__torch_unserializable__ = True  # type: ignore[attr-defined]
        self._handle = parameter.register_post_accumulate_grad_hook(after_accumulation)

    def remove(self) -> None:
        self.live = False
        self._handle.remove()
