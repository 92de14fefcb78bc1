"""Hooks on Python functions that are reached as an attribute: of a module, a class or an object.

All hooks on one attribute share one wrapper, which stands in the owner's own dictionary while there are any; with the
last of them the owner is as it was, so hooks come off in any order. Code that got hold of the function earlier
(``from module import function``) has the function itself and is not seen.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Collection
from types import ModuleType
from typing import Any, SupportsIndex

import wrapt

from tenterhook._fork_locks import ForkLock
from tenterhook.backends import Backend
from tenterhook.changing import check_not_earlier
from tenterhook.errors import HookError
from tenterhook.handles import HookSite, name_of
from tenterhook.replacing import check_replacement, replacement_arguments

__all__ = ["FunctionHook", "describe_owner"]

_ABSENT = object()
_MOST_WRAPPERS = 32  # that others may have put around ours
_lock = ForkLock()


class _Hooked(wrapt.FunctionWrapper):
    """What stands in the place of a hooked function; copies and pickles of its owner get the function itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        wrapped = self.__wrapped__
        return wrapped.__qualname__ if inspect.isfunction(wrapped) else wrapped.__reduce_ex__(protocol)


class _Patch:
    """The hooks on one attribute of one owner."""

    __slots__ = ("after", "before", "name", "original", "owner", "wrapper")

    def __init__(self, owner: Any, name: str, function: Any) -> None:
        self.owner = owner
        self.name = name
        self.original = vars(owner).get(name, _ABSENT)
        self.before: tuple[FunctionHook, ...] = ()
        self.after: tuple[FunctionHook, ...] = ()
        self.wrapper = _Hooked(function, self)

    def __call__(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(instance, ModuleType):  # built-in functions of a module are bound to it
            instance = None
        for hook in self.before:
            args, kwargs = hook.run_before(instance, args, kwargs)
        result = wrapped(*args, **kwargs)
        for hook in self.after:
            result = hook.run_after(instance, args, kwargs, result)
        return result

    def stands(self) -> bool:
        """Whether a call of the attribute still comes here, perhaps by way of somebody else's wrapper around ours."""
        present = vars(self.owner).get(self.name)
        for _ in range(_MOST_WRAPPERS):
            if present is self.wrapper:
                return True
            present = getattr(present, "__wrapped__", None)
        return False

    def put(self) -> None:
        _set(self.owner, self.name, self.wrapper)

    def take_off(self) -> None:
        """Leave the owner as it was; where somebody has wrapped ours, ours stays inside and does nothing."""
        if vars(self.owner).get(self.name) is self.wrapper:
            _set(self.owner, self.name, self.original)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        if value is _ABSENT:
            type.__delattr__(owner, name)
        else:
            type.__setattr__(owner, name, value)
    elif value is _ABSENT:
        del vars(owner)[name]
    else:
        vars(owner)[name] = value  # past any __setattr__ that would put it elsewhere


class FunctionHook:
    """One callback before or after one function.

    Args:
        backend: says what a tensor is.
        site: the callback and its counts; ``site.kind`` is ``"before"`` or ``"after"``.
        allow: what a replacement may change.
    """

    def __init__(self, backend: Backend, site: HookSite, allow: Collection[str]) -> None:
        self.site = site
        self._backend = backend
        self._allow = allow
        self._patch: _Patch | None = None

    @property
    def where(self) -> str:
        """The hook, for messages."""
        return f"{self.site.kind} of {self.site.path} ({name_of(self.site.fn)})"

    def attach(self, owner: Any, name: str, *, first: bool) -> None:
        """Put the hook on ``owner.name``, ahead of those of its kind if ``first``.

        Raises:
            HookError: there is no function of that name, or it cannot be replaced.
        """
        function = _function(owner, name)
        with _lock:
            present = vars(owner).get(name)
            patch: Any = present._self_wrapper if type(present) is _Hooked else _Patch(owner, name, function)
            hooks: tuple[FunctionHook, ...] = getattr(patch, self.site.kind)
            setattr(patch, self.site.kind, (self, *hooks) if first else (*hooks, self))
            if patch.wrapper is not present:
                try:
                    patch.put()
                except TypeError as error:
                    raise HookError(
                        f"{self.site.path} cannot be hooked: {error}\n  hook a Python function that calls it"
                    ) from None
            self._patch = patch

    @property
    def live(self) -> bool:
        """Whether calls still come by here."""
        patch = self._patch
        return patch is not None and patch.stands()

    def remove(self) -> None:
        """Take the hook off; the last one puts the function itself back."""
        with _lock:
            patch, self._patch = self._patch, None
            if patch is not None:
                kind = self.site.kind
                setattr(patch, kind, tuple(hook for hook in getattr(patch, kind) if hook is not self))
                if not (patch.before or patch.after):
                    patch.take_off()

    def run_before(
        self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the arguments to the callback; returns them, or what it gave for them."""
        if not self._begins():
            return args, kwargs
        returned = self.site.call(instance, args, kwargs)
        if returned is None:
            return args, kwargs
        types = self._backend.tensor_types
        new = replacement_arguments(args, kwargs, returned, self.where, with_kwargs=True, is_tensor=types)
        check_not_earlier(self._backend, self.site, (args, kwargs), new, self.where)
        check_replacement(self._backend, (args, kwargs), new, self.where, self._allow)
        return new

    def run_after(self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Give the result to the callback; returns it, or what it gave for it."""
        if not self._begins():
            return result
        new = self.site.call(instance, args, kwargs, result)
        if new is None:
            return result
        check_not_earlier(self._backend, self.site, result, new, self.where, (args, kwargs))
        check_replacement(self._backend, result, new, self.where, self._allow)
        return new

    def _begins(self) -> bool:
        if not self.site.live or self.site.busy:
            return False
        with _lock:  # functions are called from any thread
            self.site.fired += 1
        return True


def describe_owner(owner: Any) -> str:
    """Name a function's owner for tables and messages: ``torch.nn.functional``, ``Adam``, ``Net object``."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    return owner.__qualname__ if isinstance(owner, type) else f"{type(owner).__qualname__} object"


def _function(owner: Any, name: str) -> Any:
    """Find what ``owner.name`` calls, unbound where the owner is a class.

    Raises:
        HookError: there is none, or it is no function.
    """
    place = f"{describe_owner(owner)}.{name}"
    if isinstance(owner, str) or not isinstance(name, str) or "." in name:
        raise HookError(
            f"a function is named by the object that has it and its name, got {owner!r}, {name!r}\n"
            '  for example hooks.before(torch.nn.functional, "relu", fn)'
        )
    if not hasattr(owner, "__dict__"):
        raise HookError(
            f"{place} cannot be hooked: the object has no __dict__\n  hook {type(owner).__qualname__}.{name}"
        )
    kind = owner if isinstance(owner, type) else type(owner)
    in_class = inspect.getattr_static(kind, name, _ABSENT)
    is_value = isinstance(in_class, functools.cached_property) or inspect.isdatadescriptor(in_class)
    if is_value and (isinstance(owner, type) or name not in vars(owner) or hasattr(in_class, "__set__")):
        raise HookError(
            f"{place} is a {type(in_class).__name__}: it is read, not called\n  hook a function that uses it"
        )
    if isinstance(owner, type):
        found = in_class
        seen = getattr(owner, name, _ABSENT)
    else:
        if name[:2] == name[-2:] == "__" and not isinstance(owner, ModuleType):
            raise HookError(
                f"{place}: Python looks special methods up on the class, never on the object\n  hook {kind.__qualname__}.{name}"
            )
        found = seen = vars(owner).get(name, _ABSENT)
        if found is _ABSENT:
            found = seen = getattr(owner, name, _ABSENT)
    if seen is _ABSENT:
        raise HookError(f"{describe_owner(owner)} has no attribute {name!r}\n  name a function that it has")
    if isinstance(seen, type) or not callable(seen):
        what = f"the class {seen.__qualname__}" if isinstance(seen, type) else f"a {type(seen).__name__}"
        raise HookError(f"{place} is {what}, no function\n  hook one of its methods, or a function that uses it")
    return found
