"""The native path on torch: what it needs of torch, and how it is put around a module's calls.

Where a module has no hooks, torch's ``__call__`` runs the module's ``_compiled_call_impl`` if there is one, and does without the
costly way through its hook tables. There we stand, for as long as the module has no hooks but ours: as soon as it gets others,
or is compiled, ours are hooks in its tables, in front of those that came later. Copies and pickles of a module lack the attribute.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module_registries

from tenterhook.backends._torch_attachments import Attachment, late_removals
from tenterhook.backends._torch_checkpoint import top_saved_tensor_hooks
from tenterhook.backends._torch_compiled import runs, standing
from tenterhook.backends._torch_device import unseen
from tenterhook.backends._types import Yielding
from tenterhook.native import NATIVE, FrameworkParts

__all__ = [
    "NativeAttachment",
    "attach_around",
    "give_way",
    "hooks_around",
    "native_parts",
    "set_around_aside",
    "storage_access",
]

_ATTRIBUTE = "_compiled_call_impl"
_call: Any = nn.Module.__call__
_call_impl: Any = nn.Module._call_impl
_tracing: Any = getattr(torch._C, "_get_tracing_state", None)
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_TABLES: tuple[Any, ...] = tuple(getattr(_module_registries, f"_global{name}", None) for name in _TABLES)


def native_parts(tensor_types: tuple[type, ...]) -> FrameworkParts | None:
    """Return what the native path calls of torch; None for releases that lack something."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None or top_saved_tensor_hooks is None:
        return None
    base: Any = torch._C.TensorBase
    return FrameworkParts(
        exchange=exchange,
        tensor_types=tensor_types,
        graph_task=torch._C._current_graph_task_id,
        grads_on=torch.is_grad_enabled,
        forward_ad_on=torch._C._is_fwd_grad_enabled,
        saved_hooks=top_saved_tensor_hooks,
        inference_on=torch.is_inference_mode_enabled,
        modes_on=torch._C._is_torch_function_mode_enabled,
        is_neg=base.is_neg,
        is_view=base._is_view,
        threads=torch.get_num_threads,
        new_hooks=OrderedDict,
        unusual=(late_removals,),
        notices=(runs,),
        tracing=_tracing,
        call=_call,
        call_impl=_call_impl if _only_forwards() else None,
        storage=storage_access(),
        global_tables=_GLOBAL_TABLES if _can_stand_around() else None,
    )


@functools.cache
def storage_access() -> tuple[int, int, int] | None:
    """Find how to ask for the size of a tensor's storage in a hundredth of the time that its methods take.

    libtorch's C functions for compiled models are stable; the handle that they take is a pointer inside a tensor's object. Where that
    lies is looked for, with the address that torch gives of what it points to, and tried.

    Returns:
        ``FrameworkParts.storage``; None where anything is otherwise than expected.
    """
    try:
        library = ctypes.CDLL(torch._C.__file__)
        size, offset = library.aoti_torch_get_storage_size, library.aoti_torch_get_storage_offset
    except (OSError, AttributeError):
        return None
    with unseen():
        five = torch.ones(5, dtype=torch.float32, device="cpu")
        tried = (five, five[2:], nn.Parameter(five[1:]))
    end = torch._C.TensorBase.__basicsize__ - ctypes.sizeof(ctypes.c_void_p) + 1
    places = [
        at
        for at in range(object.__basicsize__, end, ctypes.sizeof(ctypes.c_void_p))
        if all(ctypes.c_void_p.from_address(id(tensor) + at).value == tensor._cdata for tensor in tried)
    ]
    if len(places) != 1:
        return None
    answer = ctypes.c_int64()
    for ask, expected in ((size, (20, 20, 20)), (offset, (0, 2, 1))):
        for tensor, value in zip(tried, expected, strict=True):
            if ask(ctypes.c_void_p(id(tensor) + places[0]), ctypes.byref(answer)) or answer.value != value:
                return None
    addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in (size, offset))
    found = tuple(address for address in addresses if address)
    return (places[0], *found) if len(found) == 2 else None


@functools.cache
def _can_stand_around() -> bool:
    """Whether this release of torch runs what we put around a module's calls; counts the references that there are to it then."""
    if NATIVE is None or None in _GLOBAL_TABLES or getattr(_call, "__name__", "") != "_wrapped_call_impl":
        return False
    module = nn.Module()
    holders = [NATIVE.Around()] * 3  # an attachment, its engine and the module's place
    module.__dict__[_ATTRIBUTE] = holders[0]
    try:
        return module() is None
    except NotImplementedError:  # it has been passed by
        return False


def _only_forwards() -> bool:
    """Whether what runs a module without hooks is torch's own function, and one of the make that we know."""
    names = set(getattr(getattr(_call_impl, "__code__", None), "co_names", ()))
    known = {"forward", "_slow_forward", "_get_tracing_state", *_TABLES, *(f"_global{name}" for name in _TABLES)}
    return (
        _tracing is not None and getattr(_call_impl, "__globals__", None) is vars(_module_registries) and known <= names
    )


def attach_around(
    module: nn.Module,
    native: tuple[Any, Any],
    handlers: tuple[Any, Any, Any],
    put_hooks: Callable[[nn.Module], Attachment],
) -> Attachment | NativeAttachment:
    """Stand around the calls of a module where that is right, else put hooks on.

    Args:
        module: the module.
        native: the engine, and the module's place in it.
        handlers: hook before a call, callbacks after it and where it has raised: for what is not plain.
        put_hooks: puts hooks in the module's tables that do the same.
    """
    engine = native[0]
    if not engine.plain or engine.global_tables is None or not _has_room(module):
        return put_hooks(module)
    return NativeAttachment(module, native, handlers, put_hooks)


def _has_room(module: nn.Module) -> bool:
    attributes = module.__dict__
    return (
        type(module).__call__ is _call
        and type(module).__getattribute__ is object.__getattribute__  # or _call_impl may be another than its class's
        and nn.Module.__call__ is _call
        and getattr(module, _ATTRIBUTE, None) is None
        and not any(_GLOBAL_TABLES)
        and all(name in attributes and not attributes[name] for name in _TABLES)
    )


def _called(module: nn.Module) -> nn.Module:
    """Return the module that is being called: another one than ours where somebody has copied its attributes."""
    frame = sys._getframe(1)
    return frame.f_locals["self"] if frame.f_code is _call.__code__ else module


def give_way(module: nn.Module) -> None:
    """Have hooks in the module's tables take the place of what stands around its calls: another hook is about to come."""
    around: Any = module.__dict__.get(_ATTRIBUTE)
    if NATIVE is not None and type(around) is NATIVE.Around and around.give_way is not None:
        around.give_way()


def set_around_aside(module: nn.Module) -> Callable[[], None] | None:
    """Take what stands around the module's calls away; returns what puts it back, if it has not been removed meanwhile."""
    around: Any = module.__dict__.get(_ATTRIBUTE)
    if NATIVE is None or type(around) is not NATIVE.Around:
        return None
    del module.__dict__[_ATTRIBUTE]

    def back() -> None:
        if around.on:
            module.__dict__.setdefault(_ATTRIBUTE, around)

    return back


def hooks_around(value: Any) -> dict[str, Any]:
    """Return the hooks that something found among a module's attributes stands for, by their kind."""
    return (
        {"forward_pre": value.hook_before, "forward": value.hook_after}
        if NATIVE is not None and type(value) is NATIVE.Around
        else {}
    )


class NativeAttachment(Yielding):
    """Ours around the calls of one module, or hooks in its tables since it has got others."""

    __slots__ = ("_around", "_engine", "_hooks", "_place", "_put_hooks", "_ref", "removed")

    def __init__(
        self,
        module: nn.Module,
        native: tuple[Any, Any],
        handlers: tuple[Any, Any, Any],
        put_hooks: Callable[[nn.Module], Attachment],
    ) -> None:
        self.removed = 0
        self._engine, self._place = native
        self._put_hooks = put_hooks
        self._hooks: Attachment | None = None
        self._ref = weakref.ref(module)
        self._around = NATIVE.Around(*native, module, *handlers, _called)
        self._around.give_way = self.give_way
        self._place.around = self._around
        standing[module] = (*standing.get(module, ()), self)
        self._put(module)

    def _put(self, module: nn.Module) -> None:
        module.__dict__[_ATTRIBUTE] = self._around
        self._around.type = type(module)
        self._around.on = True
        self._engine.arounds[self._around] = None

    def _take(self) -> nn.Module | None:
        self._around.on = False
        self._engine.arounds.pop(self._around, None)
        module = self._ref()
        if module is not None and module.__dict__.get(_ATTRIBUTE) is self._around:
            del module.__dict__[_ATTRIBUTE]
        return module

    @property
    def live(self) -> bool:
        """Whether it is in place."""
        if self._hooks is not None:
            return self._hooks.live
        module = self._ref()
        return module is not None and module.__dict__.get(_ATTRIBUTE) is self._around

    def give_way(self) -> None:
        """Put hooks into the module's tables instead, in front of all: the module had none when we came."""
        module = self._take()
        if module is not None and self._hooks is None:
            self._use_hooks(module).put_first()

    def give_way_if_displaced(self) -> None:
        """Put hooks into the tables where the module has been compiled in place, while we were on."""
        if self._around.on and not self.live:
            self.give_way()

    def _use_hooks(self, module: nn.Module) -> Attachment:
        self._hooks = hooks = self._put_hooks(module)
        self._around.replaced = True
        self._around.yielded = True  # to hooks that a call which is running now does not get
        return hooks

    def remove(self) -> None:
        """Take it off."""
        module = self._take()
        if module is not None:
            rest = tuple(one for one in standing.get(module, ()) if one is not self)
            if rest:
                standing[module] = rest
            else:
                standing.pop(module, None)
        self._around.yielded = False
        self._around.give_way = None  # a cycle
        if self._place.around is self._around:
            self._place.around = None
        if self._hooks is not None:
            self._hooks.remove()

    def suspend(self) -> bool:
        """Take it off until ``resume``."""
        if self._hooks is not None:
            self._around.yielded = not self._hooks.suspend()
            return not self._around.yielded
        if not self.live:
            return False
        self._take()
        return True

    def resume(self) -> None:
        """Put it on again, after the hooks that are on by now."""
        module = self._ref()
        if self._hooks is not None:
            self._hooks.resume()
            self._around.yielded = True
        elif module is not None:
            if _has_room(module):
                self._put(module)
            else:
                self._use_hooks(module)
