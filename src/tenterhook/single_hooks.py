"""Hooks on one module or tensor, without a set: ``th.register_forward_hook`` and its kin, for both frameworks.

They take the callbacks of :func:`tenterhook.hooks` and treat them alike. Nothing keeps a handle or a model: a model dies
with its last reference, and a handle that is dropped leaves its hook on. As long as a hook is on, fused fast paths are off
and compiled code runs eager, as in a session: ``handle.told`` says so.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Collection
from typing import Any

from tenterhook.backends import Backend, find_backend, loaded_backends
from tenterhook.call_hooks import BackwardHook, ForwardHook, ForwardPreHook
from tenterhook.errors import HookError, TenterhookWarning
from tenterhook.event_hooks import GradientHook, LoadHook
from tenterhook.gathering import Gathering
from tenterhook.handles import Handle, HookSite, check_signature
from tenterhook.open_paths import see_everything
from tenterhook.replacing import allowed

__all__ = [
    "register_backward_hook",
    "register_backward_pre_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_load_hook",
    "register_tensor_hook",
]

# One for all backward hooks of a framework, so that their order nests; it goes with the last of them.
_gatherings: weakref.WeakValueDictionary[str, Gathering] = weakref.WeakValueDictionary()


def register_forward_pre_hook(
    module: Any,
    fn: Callable[..., Any],
    *,
    with_kwargs: bool = False,
    prepend: bool = False,
    allow: str | Collection[str] = (),
) -> Handle:
    """Call ``fn(module, args)`` before each call of ``module``.

    Args:
        module: the module.
        fn: returns None, or the new positional arguments as a tuple (a bare tensor stands for a single one).
        with_kwargs: call ``fn(module, args, kwargs)``, which returns None or ``(args, kwargs)``.
        prepend: run before the hooks that are on already.
        allow: what a replacement may change: ``"structure"``, ``"shape"``, ``"dtype"``, ``"device"``.

    Raises:
        HookError: ``module`` is none, is never called, or ``fn`` does not take these arguments.
    """
    backend = _backend_of(module)
    check_signature(fn, ("module", "args", "kwargs") if with_kwargs else ("module", "args"), "forward_pre")
    site = HookSite("forward_pre", _name(module), fn)
    hook = ForwardPreHook(backend, site, with_kwargs=with_kwargs, with_name=False, allow=allowed(allow))
    site.attached(hook.attach(module, first=prepend))
    return _seeing_everything(backend, module, site)


def register_forward_hook(
    module: Any,
    fn: Callable[..., Any],
    *,
    with_kwargs: bool = False,
    prepend: bool = False,
    always_call: bool = False,
    allow: str | Collection[str] = (),
) -> Handle:
    """Call ``fn(module, args, output)`` after each call of ``module``.

    Args:
        module: the module.
        fn: returns None, or a new output of the same structure, shapes, dtypes and devices.
        with_kwargs: call ``fn(module, args, kwargs, output)``.
        prepend: run before the hooks that are on already.
        always_call: run also where the call raised, with output None; the error of the call always wins.
        allow: what a replacement may change.

    Raises:
        HookError: ``module`` is none, is never called, or ``fn`` does not take these arguments.
    """
    backend = _backend_of(module)
    arguments = ("module", "args", "kwargs", "output") if with_kwargs else ("module", "args", "output")
    check_signature(fn, arguments, "forward")
    site = HookSite("forward", _name(module), fn)
    hook = ForwardHook(
        backend, site, with_kwargs=with_kwargs, with_name=False, always_call=always_call, allow=allowed(allow)
    )
    site.attached(hook.attach(module, first=prepend))
    return _seeing_everything(backend, module, site)


def register_backward_pre_hook(module: Any, fn: Callable[..., Any], *, prepend: bool = False) -> Handle:
    """Call ``fn(module, grad_output)`` when the gradients of a call's outputs are known.

    ``fn`` returns None, or new gradients; see :meth:`tenterhook.hookset.HookSet.backward_pre`.

    Raises:
        HookError: ``module`` is none, is never called, or ``fn`` does not take these arguments.
    """
    return _backward("backward_pre", module, fn, ("module", "grad_output"), prepend)


def register_backward_hook(module: Any, fn: Callable[..., Any], *, prepend: bool = False) -> Handle:
    """Call ``fn(module, grad_input, grad_output)`` when the backward pass through a call is over.

    Right with in-place layers, keyword inputs and nested outputs; ``grad_input`` holds the gradients through this module.
    ``fn`` returns None, or new gradients for the inputs; see :meth:`tenterhook.hookset.HookSet.backward`.

    Raises:
        HookError: ``module`` is none, is never called, or ``fn`` does not take these arguments.
    """
    return _backward("backward", module, fn, ("module", "grad_input", "grad_output"), prepend)


def register_tensor_hook(tensor: Any, fn: Callable[[Any], Any]) -> Handle:
    """Call ``fn(gradient)`` when the gradient of ``tensor`` is known; returns None, or a new gradient.

    Raises:
        HookError: ``tensor`` is none, no gradient can come to it, or ``fn`` does not take one argument.
    """
    backends = loaded_backends()
    backend = next((one for one in backends if isinstance(tensor, one.tensor_types)), None)
    if backend is None:
        frameworks = " or ".join(one.name for one in backends) or "torch or mindspore (neither is imported)"
        raise HookError(
            f"register_tensor_hook needs a tensor of {frameworks}, got {type(tensor).__name__}\n"
            "  pass the tensor itself; for a module there is register_backward_hook"
        )
    check_signature(fn, ("grad",), "tensor")
    site = HookSite("tensor", "(tensor)", fn)
    tap = backend.tap(tensor, GradientHook(backend, site))
    if isinstance(tap, str):
        raise HookError(
            f"no gradient comes to this tensor: {tap}\n  hook it where gradients are tracked, on a tensor that requires one"
        )
    site.attached(tap)
    return Handle([site])


def register_load_hook(module: Any, fn: Callable[[Any, Any], None]) -> Handle:
    """Call ``fn(module, incompatible_keys)`` after ``module`` has loaded its parameters, alone or as part of a model.

    ``incompatible_keys.missing_keys`` and ``.unexpected_keys`` may be changed in place; ``fn`` returns None. Hooks run in
    order of registration; a strict load raises for what is left.

    Raises:
        HookError: ``module`` is none, or ``fn`` does not take these arguments; later, when it returns something.
    """
    backend = find_backend(module)
    check_signature(fn, ("module", "incompatible_keys"), "load")
    site = HookSite("load", _name(module), fn)
    site.attached(backend.on_load(module, LoadHook(site)))
    return Handle([site])


def _backward(kind: str, module: Any, fn: Callable[..., Any], arguments: tuple[str, ...], prepend: bool) -> Handle:
    backend = _backend_of(module)
    check_signature(fn, arguments, kind)
    gathering = _gatherings.get(backend.name)
    if gathering is None:
        gathering = _gatherings[backend.name] = Gathering(backend)
    site = HookSite(kind, _name(module), fn)
    site.attached(BackwardHook(backend, site, gathering, with_name=False).attach(module, first=prepend))
    return _seeing_everything(backend, module, site)


def _backend_of(module: Any) -> Backend:
    backend = find_backend(module)
    backend.check(module)
    if not backend.entries(module)[0].callable:
        raise HookError(
            f"{_name(module)} is a container that is never called, so a hook on it would never run\n  hook the modules in it"
        )
    return backend


def _seeing_everything(backend: Backend, module: Any, site: HookSite) -> Handle:
    """Keep fast paths off and compiled code eager until the hook comes off, or its module is gone."""
    try:
        site.told, end = see_everything(backend, module)
    except BaseException:
        site.remove()
        raise
    at_removal = site.at_removal

    def removed() -> None:
        if at_removal is not None:
            at_removal()
        end()

    site.at_removal = removed
    try:
        if backend.is_compiled(module):
            warnings.warn(
                f"{_name(module)} is part of a compiled model: compiled code of this process runs eager for as long as the hook "
                "is on\n  take the hook off in the end: handle.remove(), or with",
                TenterhookWarning,
                stacklevel=_stack_level(),
            )
    except BaseException:  # warnings may be errors
        site.remove()
        raise
    return Handle([site])


def _stack_level() -> int:
    """Return how far up the first frame is that is not of this file, as warnings count it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame, level = frame.f_back, level + 1
    return level


def _name(module: Any) -> str:
    return f"({type(module).__name__})"
