"""Changing values in torch: constants beside a tensor, modules that are left out, gradients that are clipped together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn

from tenterhook.backends._editing import Instead
from tenterhook.backends._torch_shards import is_dtensor, replicated

__all__ = ["Bypass", "clip_together", "constant", "gradients", "set_bypasses_aside", "where"]

_KEY = "_compiled_call_impl"


def constant(value: Any, like: torch.Tensor, boolean: bool) -> torch.Tensor:
    """Return an array, number or tensor as a tensor of the dtype (or of booleans) and on the device of ``like``."""
    dtype = torch.bool if boolean else like.dtype
    if isinstance(value, np.ndarray):
        # ml_dtypes' types are no part of torch.from_numpy; what they hold is held by float32
        odd = value.dtype.kind == "V" or value.dtype == ml_dtypes.bfloat16
        value = torch.from_numpy(np.array(value, np.float32) if odd else np.array(value))
    if isinstance(value, torch.Tensor):
        made = value.to(device=like.device, dtype=dtype)
    else:
        made = torch.tensor(value, dtype=dtype, device=like.device)
    return replicated(made, like) if is_dtensor(like) and not is_dtensor(made) else made


def where(mask: torch.Tensor, new: Any, old: torch.Tensor) -> torch.Tensor:
    """Return ``new`` where ``mask`` is true, else ``old``."""
    return torch.where(mask, new, old)


def gradients(fn: Callable[[Sequence[Any]], Any], at: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of a scalar function of tensors."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in at]
    with torch.enable_grad():
        found = torch.autograd.grad(fn(leaves), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]


def clip_together(parameters: Sequence[nn.Parameter], max_norm: float) -> None:
    """Scale the gradients of parameters so that their common norm is at most ``max_norm``, as torch itself does it."""
    torch.nn.utils.clip_grad_norm_([one for one in parameters if one.grad is not None], max_norm)


class _Calls:
    """Stands where ``module.compile()`` puts its compiled call: torch looks there first when a module is called.

    So neither ``forward`` nor the class is touched, and torch itself leaves the attribute out of copies and pickles.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before = module.__dict__.get(_KEY)  # of a module that was compiled in place
        self.had = _KEY in module.__dict__
        self.bypasses: list[Bypass] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = self.before if self.before is not None else self.module._call_impl
        for bypass in self.bypasses:
            call = bypass.around(call)
        return call(*args, **kwargs)

    def leave(self, module: nn.Module) -> None:
        """Have the module as it was found."""
        del module.__dict__[_KEY]
        if self.had:
            module.__dict__[_KEY] = self.before


def set_bypasses_aside(module: nn.Module) -> Callable[[], None] | None:
    """Have a module called as if nothing stood in place of its calls; returns what puts that back, less what is removed by then."""
    calls: Any = module.__dict__.get(_KEY)
    if not isinstance(calls, _Calls):
        return None
    calls.leave(module)

    def back() -> None:
        calls.bypasses = [one for one in calls.bypasses if one.is_on]
        if calls.bypasses:
            module.__dict__[_KEY] = calls

    return back


class Bypass:
    """One function in place of the calls of one module."""

    def __init__(self, module: nn.Module, instead: Instead) -> None:
        self._module = weakref.ref(module)
        self._instead = instead
        self._borrowers = 0
        self.is_on = False
        self.removed = 0

    @classmethod
    def on(cls, module: nn.Module, instead: Instead) -> Bypass:
        """Put one on."""
        made = cls(module, instead)
        made._put_on()
        return made

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that goes by our function."""
        return lambda *args, **kwargs: self._instead(call, args, kwargs)

    @property
    def live(self) -> bool:
        module = self._module() if self.is_on else None
        return module is not None and self in getattr(module.__dict__.get(_KEY), "bypasses", ())

    def _put_on(self) -> None:
        module = self._module()
        if module is None:
            return
        calls = module.__dict__.get(_KEY)
        if not isinstance(calls, _Calls):
            calls = module.__dict__[_KEY] = _Calls(module)
        calls.bypasses.append(self)
        self.is_on = True

    def remove(self) -> None:
        module = self._module() if self.is_on else None
        self.is_on = False
        if module is None:
            return
        calls = module.__dict__.get(_KEY)
        if isinstance(calls, _Calls) and self in calls.bypasses:
            calls.bypasses.remove(self)
            if not calls.bypasses:
                calls.leave(module)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have it on for the length of a ``with``, also if it has been removed."""
        borrowed = self._borrowers > 0 or not self.is_on
        if borrowed:
            if not self._borrowers:
                self._put_on()
            self._borrowers += 1
        try:
            yield
        finally:
            if borrowed:
                self._borrowers -= 1
                if not self._borrowers:
                    self.remove()
