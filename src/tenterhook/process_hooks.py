"""Hooks of a set that belong to no call of a module: on functions, on loading, on optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, Literal

from tenterhook.backends import Backend
from tenterhook.errors import HookError
from tenterhook.event_hooks import LoadHook, OptimizerHook
from tenterhook.function_hooks import FunctionHook, describe_owner
from tenterhook.handles import Handle, HookSite, check_signature
from tenterhook.replacing import allowed
from tenterhook.selection import Entry, Selection, resolve

__all__ = ["ProcessHooks"]


class ProcessHooks:
    """The part of a :class:`tenterhook.hookset.HookSet` that hooks functions, loading and optimizers."""

    _backend: Backend
    _waiting: Any  # the model, until a first hook is on it
    _closed: bool
    _handles: list[Handle]

    @property
    def _entries(self) -> list[Entry]:
        raise NotImplementedError

    def before(
        self,
        owner: Any,
        name: str,
        fn: Callable[..., Any],
        *,
        prepend: bool = False,
        allow: str | Collection[str] = (),
    ) -> Handle:
        """Call ``fn(instance, args, kwargs)`` before each call of the Python function ``owner.name``.

        The function is found as the attribute ``name`` of a module (``torch.nn.functional``), of a class (all its
        objects) or of one object (``optimizer``): functions, methods, class and static methods, built-in functions.
        A name imported earlier (``from module import name``) is the function itself and is not seen; ``print(hooks)``
        says so where nothing fired. What ``fn`` itself calls does not call it again.

        Args:
            owner: the module, class or object.
            name: the attribute.
            fn: gets the object whose method is called (the class of a class method, None for a plain function); returns
                None, or new ``(args, kwargs)``.
            prepend: run before the hooks that are on already.
            allow: what a replacement may change: ``"structure"``, ``"shape"``, ``"dtype"``, ``"device"``.

        Raises:
            HookError: there is no function of that name, or ``fn`` does not take these arguments.
        """
        return self._function("before", owner, name, fn, ("instance", "args", "kwargs"), prepend, allow)

    def after(
        self,
        owner: Any,
        name: str,
        fn: Callable[..., Any],
        *,
        prepend: bool = False,
        allow: str | Collection[str] = (),
    ) -> Handle:
        """Call ``fn(instance, args, kwargs, result)`` after each call of ``owner.name`` that did not raise.

        ``fn`` returns None, or a new result. An async function gives its awaitable and a generator function its
        generator, not yet run. For the rest see :meth:`before`.

        Raises:
            HookError: there is no function of that name, or ``fn`` does not take these arguments.
        """
        return self._function("after", owner, name, fn, ("instance", "args", "kwargs", "result"), prepend, allow)

    def _function(
        self,
        kind: str,
        owner: Any,
        name: str,
        fn: Callable[..., Any],
        arguments: tuple[str, ...],
        prepend: bool,
        allow: str | Collection[str],
    ) -> Handle:
        self._check_open()
        if name in ("forward", "construct", "__call__") and self._backend.is_model(owner):
            raise HookError(
                f"{describe_owner(owner)}.{name} is a module's call\n  hook it with hooks.forward_pre and hooks.forward"
            )
        check_signature(fn, arguments, kind)
        dynamic = isinstance(name, str) and inspect.getattr_static(owner, name, None) is None
        if dynamic and self._backend.is_model(getattr(owner, name, None)):
            raise HookError(
                f"{describe_owner(owner)}.{name} is a module, a {type(getattr(owner, name)).__name__}\n"
                "  hook it with hooks.forward_pre and hooks.forward"
            )
        site = HookSite(kind, f"{describe_owner(owner)}.{name}", fn)
        hook = FunctionHook(self._backend, site, allowed(allow))
        hook.attach(owner, name, first=prepend)
        site.attached(hook)
        site.unfired = "never called"
        if isinstance(owner, ModuleType):
            site.unfired += f" as {site.path} (a name imported earlier is the function itself)"
        return self._keep(Handle([site]))

    def load(self, fn: Callable[[Any, Any], None], *misplaced: Any, select: Selection = "") -> Handle:
        """Call ``fn(module, incompatible_keys)`` after parameters have been loaded into the model.

        ``incompatible_keys.missing_keys`` and ``.unexpected_keys`` are lists that ``fn`` may change in place: a strict load
        raises for what is left in them. Callbacks run in order of registration.

        Args:
            fn: returns None.
            misplaced: nothing; more than the function alone is refused.
            select: which modules' loading, by its name; by default that of the model. A module inside it is loaded with it, and on
                its own by its own ``load_state_dict``.

        Raises:
            SelectionError: nothing matches.
            HookError: ``fn`` does not take these arguments; later, when it returns something.
        """
        self._check_open()
        if misplaced:
            raise HookError(
                f"load takes the function only, got {len(misplaced) + 1} arguments\n"
                "  write hooks.load(fn), for some of the modules hooks.load(fn, select=...)"
            )
        chosen = self._entries[:1] if isinstance(select, str) and select == "" else resolve(select, self._entries)
        check_signature(fn, ("model", "incompatible_keys"), "load")
        handle = Handle(())
        try:
            for entry in chosen:
                site = HookSite("load", entry.path, fn)
                site.attached(self._backend.on_load(entry.module, LoadHook(site)))
                site.unfired = "nothing was loaded"
                handle.sites.append(site)
        except BaseException:
            handle.remove()
            raise
        return self._keep(handle)

    def optimizer_step(self, fn: Callable[[Any], Any], *, when: Literal["before", "after"] = "after") -> Handle:
        """Call ``fn(optimizer)`` before or after each step of any optimizer in the process.

        What ``fn`` returns is discarded.

        Raises:
            HookError: ``fn`` does not take an optimizer, or ``when`` is neither.
        """
        self._check_open()
        if when not in ("before", "after"):
            raise HookError(f"when={when!r} is not known\n  use 'before' or 'after'")
        check_signature(fn, ("optimizer",), "optimizer_step")
        site = HookSite("optimizer_step", f"({when} any optimizer's step)", fn)
        site.attached(self._backend.on_optimizer_step(OptimizerHook(site), before=when == "before"))
        site.unfired = "no optimizer has stepped"
        return self._keep(Handle([site]))

    def _check_open(self) -> None:
        if self._closed:
            raise HookError(
                "these hooks are closed\n  register inside the with statement, or make new ones with th.hooks(model)"
            )

    def _keep(self, handle: Handle) -> Handle:
        self._waiting = None
        self._handles.append(handle)
        return handle
