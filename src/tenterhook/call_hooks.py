"""The four hooks around a module's calls, between the user's callback and the backend."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tenterhook.aliasing import InputAliases, explanation
from tenterhook.backends import Backend, Detachable, Layer
from tenterhook.changing import change, check_not_earlier
from tenterhook.errors import EditError, TenterhookError
from tenterhook.gathering import CallGradients, Gathering, Gradients
from tenterhook.handles import HookSite, name_of
from tenterhook.notes import add_note, call_note, note_error
from tenterhook.reasons import raised
from tenterhook.replacing import check_replacement, replacement_arguments
from tenterhook.values import ParameterNames, bind_arguments, leaves, no_tensor_in

__all__ = ["BackwardHook", "ForwardHook", "ForwardPreHook"]


def _layer(first: bool) -> Layer:
    return Layer.FIRST if first else Layer.OBSERVE


class _CallHook:
    """What the hooks around a call have in common."""

    def __init__(
        self, backend: Backend, site: HookSite, *, with_name: bool, allow: frozenset[str] = frozenset()
    ) -> None:
        self.backend = backend
        self.site = site
        self.allow = allow
        self.first: tuple[Any, ...] = (site.path,) if with_name else ()

    @property
    def where(self) -> str:
        return f"{self.site.kind} of {self.site.path or '(root)'} ({name_of(self.site.fn)})"

    def note_call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException) -> None:
        """The call has raised: say on the error which one it was."""
        if not isinstance(error, TenterhookError) and not self.backend.is_early_stop(error):  # those say it themselves
            note_error(error, call_note(self.backend, self.site.path, module, args, kwargs))

    def count(self) -> None:
        if self.backend.in_backward():
            self.site.recomputed += 1
        else:
            self.site.fired += 1

    def run(self, value: Any, call: Callable[[], Any]) -> Any:
        """Run the callback on ``value``; returns the new value that it wants in its place, or None."""
        self.count()
        return change(self.backend, self.site, value, call, self.where, self.allow)


class ForwardPreHook(_CallHook):
    """``fn(module, args)`` before a call."""

    def __init__(
        self, backend: Backend, site: HookSite, *, with_kwargs: bool, with_name: bool, allow: frozenset[str]
    ) -> None:
        super().__init__(backend, site, with_name=with_name, allow=allow)
        self.with_kwargs = with_kwargs

    def attach(self, module: Any, *, first: bool) -> Detachable:
        """Put the hook around the calls of ``module``; ``first`` puts it ahead of those already there."""
        return self.backend.attach(module, self._before, None, self._failed, layer=_layer(first))

    def _failed(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException) -> None:
        if self.site.live:
            self.note_call(module, args, kwargs, error)

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.site.applies:
            return None
        return self.run((args, kwargs), lambda: self._new_arguments(module, args, kwargs))

    def _new_arguments(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        more = (kwargs,) if self.with_kwargs else ()
        returned = self.site.call(*self.first, module, args, *more)
        if returned is None:
            return None
        new = replacement_arguments(
            args, kwargs, returned, self.where, with_kwargs=self.with_kwargs, is_tensor=self.backend.tensor_types
        )
        check_not_earlier(self.backend, self.site, (args, kwargs), new, self.where)
        check_replacement(self.backend, (args, kwargs), new, self.where, self.allow)
        return new


class ForwardHook(_CallHook):
    """``fn(module, args, output)`` after a call."""

    def __init__(
        self,
        backend: Backend,
        site: HookSite,
        *,
        with_kwargs: bool,
        with_name: bool,
        always_call: bool,
        allow: frozenset[str],
    ) -> None:
        super().__init__(backend, site, with_name=with_name, allow=allow)
        self.with_kwargs = with_kwargs
        self.always_call = always_call

    def attach(self, module: Any, *, first: bool) -> Detachable:
        """Put the hook around the calls of ``module``; ``first`` puts it ahead of those already there."""
        return self.backend.attach(module, None, self._after, self._failed, layer=_layer(first))

    def _call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.with_kwargs:
            return self.site.call(*self.first, module, args, kwargs, output)
        return self.site.call(*self.first, module, args, output)

    def _after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.site.applies:
            return None
        return self.run(output, lambda: self._new_output(module, args, kwargs, output))

    def _new_output(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        new = self._call(module, args, kwargs, output)
        if new is not None:
            check_not_earlier(self.backend, self.site, output, new, self.where, (args, kwargs))
            check_replacement(self.backend, output, new, self.where, self.allow)
        return new

    def _failed(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException) -> None:
        if not self.site.live or self.backend.is_early_stop(error):
            return
        self.note_call(module, args, kwargs, error)
        if not self.always_call or self.site.busy:
            self.site.reason = raised(error)
            return
        self.count()
        try:
            self._call(module, args, kwargs, None)
        except Exception as own:  # the error of the call wins; this one is told with it, and never instead of it
            self.site.reason = f"raised {type(own).__name__}: {own}"
            add_note(error, f"the {self.where} also raised {type(own).__name__}: {own}")


class BackwardHook(_CallHook):
    """``fn(module, grad_output)`` or ``fn(module, grad_input, grad_output)`` in the backward pass of a call."""

    def __init__(self, backend: Backend, site: HookSite, gathering: Gathering, *, with_name: bool) -> None:
        super().__init__(backend, site, with_name=with_name)
        self.gathering = gathering
        self.wants_input = site.kind == "backward"
        self._names: ParameterNames | None = None
        self._module: Any = None  # weak: the hook must not keep its owner
        self._held: Any = None  # weak: what the calls of that module have in common
        self._running: dict[int, list[_Running]] = {}  # thread -> calls that have begun and not ended

    def attach(self, module: Any, *, first: bool) -> Detachable:
        """Put the hook around the calls of ``module``; ``first`` puts it ahead of those already there."""
        self._names = ParameterNames.of(self.backend.forward_function(module))
        self._module = weakref.ref(module)
        self.site.at_removal = self.release
        return self.backend.attach(module, self._before, self._after, self._failed, layer=_layer(first))

    def release(self) -> None:
        """Let go of the module and of calls that never ended; the hook is off."""
        held = None if self._held is None else self._held()
        if held is not None:
            held.module = None
        for stack in list(self._running.values()):
            _let_go(stack)
        self._running.clear()

    def _hold(self, module: Any) -> _Held:
        """Return what a call's graph holds of its module: the module, until the hook comes off."""
        if module is not self._module():
            return _Held(module)  # a replica, which nobody else may hold until its backward pass
        held = None if self._held is None else self._held()
        if held is None:
            held = _Held(module)
            self._held = weakref.ref(held)
        return held

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.gathering.forward_begins()
        if not self.site.live:
            return None
        fire = partial(self._fire, self._hold(module))
        gradients = CallGradients(self.gathering, fire, "input" if self.wants_input else "output", self.where)
        running = _Running(gradients, InputAliases(self.backend, module))
        stack = self._running.setdefault(threading.get_ident(), [])
        if stack and not any(one is module for one in self.backend.running_modules()[1:]):
            _let_go(stack)  # of calls that an interrupt has ended
        stack.append(running)
        if not self.wants_input:
            return None
        bound = bind_arguments(self._names, args, kwargs)
        entries = _entries(bound.items(), self.backend.tensor_types)
        aliases = running.aliases
        arrived = partial(self._arrived, running.gradients, "input")

        def tap(slot: str, tensor: Any, itself: bool) -> Any:
            return self.backend.tap(tensor, partial(arrived, slot), module if itself else None, self.site)

        expected: list[bool] = []
        for slot, tensor in entries:
            wanted = tensor is not None and self.backend.wants_gradient(tensor)
            expected.append(wanted and aliases.add(slot, tensor, tap))
        running.gradients.expect("input", [slot for slot, _ in entries], expected)
        return aliases.given(self._names, args, kwargs)

    def _after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        running = self._take()
        if running is None or not self.site.live:
            return
        running.aliases.settle(f"{type(module).__name__} at '{self.site.path or '(root)'}'")
        gradients = running.gradients
        gradients.ended = self.gathering.tick()
        entries = _entries(_top_level(output), self.backend.tensor_types)
        expected = [
            tensor is not None and self._tap_output(gradients, slot, tensor, module) for slot, tensor in entries
        ]
        gradients.expect("output", [slot for slot, _ in entries], expected)
        if any(expected):
            self.site.calls += 1
            self.site.reason = None  # that of another output, or of an earlier call
        elif not (self.site.calls or any(tensor is not None for _, tensor in entries)):
            self.site.reason = f"no gradient: {no_tensor_in(output)}"

    def _tap_output(self, gradients: CallGradients, slot: str, tensor: Any, module: Any) -> bool:
        """Wait for the gradient of one output; False where none comes, or comes to another run of this call."""
        backend, site = self.backend, self.site
        is_leaf = backend.is_leaf(tensor)
        if is_leaf and backend.in_backward() and site.leaf_taps.has(tensor, slot):
            return False  # checkpointing without reentry: it comes to the first run
        if not backend.tracks_gradients() and backend.regions():
            return False  # with reentry: it comes to the second
        tap = backend.tap(tensor, partial(self._arrived, gradients, "output", slot), module, site)
        if isinstance(tap, str):
            if not site.calls:
                site.reason = f"no gradient: {tap}"
            return False
        if is_leaf:
            site.leaf_taps.keep(tensor, slot, tap, self.gathering.passes)
        return True

    def _failed(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException) -> None:
        running = self._take()
        if running is not None:
            running.aliases.drop()
            if (why := explanation(error)) is not None:
                note_error(error, why)
        if self.site.live:
            self.note_call(module, args, kwargs, error)
            if not self.site.calls and not self.backend.is_early_stop(error):
                self.site.reason = raised(error)

    def _take(self) -> _Running | None:
        running = self._running.get(threading.get_ident())
        return running.pop() if running else None

    def _arrived(self, gradients: CallGradients, side: str, slot: str, gradient: Any) -> Any:
        return gradients.arrived(side, slot, gradient) if self.site.live else None

    def _fire(self, held: _Held, grad_input: Gradients, grad_output: Gradients) -> Sequence[Any] | None:
        if not self.site.live:
            return None
        self.site.fired += 1
        if self.wants_input:
            return self._replacements(grad_input, self.site.call(*self.first, held.module, grad_input, grad_output))
        return self._replacements(grad_output, self.site.call(*self.first, held.module, grad_output))

    def _replacements(self, old: Gradients, returned: Any) -> Sequence[Any] | None:
        if returned is None:
            return None
        new = (returned,) if isinstance(returned, self.backend.tensor_types) else returned
        if not isinstance(new, (tuple, list)) or len(new) != len(old):
            got = f"{len(new)} entries" if isinstance(new, (tuple, list)) else type(returned).__name__
            raise EditError(
                f"{self.where}: returned {got}, expected {len(old)} gradient(s)\n  return a tuple with an entry for each, or None"
            )
        check_not_earlier(self.backend, self.site, list(old), list(new), self.where)
        for slot, before, after in zip(old.slots, old, new, strict=True):
            if after is None:
                continue
            if before is None:
                raise EditError(
                    f"{self.where}: returned a gradient for {slot or 'an output'} to which none came\n  return None there"
                )
            check_replacement(self.backend, before, after, f"{self.where} {slot}".rstrip())
        return [None if after is before else after for before, after in zip(old, new, strict=True)]


def _let_go(stack: list[_Running]) -> None:
    """Forget calls that will not end."""
    while stack:
        stack.pop().aliases.drop()


class _Held:
    """What the graph of a call holds of the module; emptied when the hook comes off, so that a kept output keeps no model."""

    __slots__ = ("__weakref__", "module")

    def __init__(self, module: Any) -> None:
        self.module = module


class _Running:
    """A call under a backward hook, while its module runs."""

    __slots__ = ("aliases", "gradients")

    def __init__(self, gradients: CallGradients, aliases: InputAliases) -> None:
        self.gradients = gradients
        self.aliases = aliases


def _top_level(output: Any) -> list[tuple[str, Any]]:
    """Split a plain tuple or list, so that its parts that are no tensors keep their places."""
    if type(output) in (tuple, list):
        return [(f"[{index}]", part) for index, part in enumerate(output)]
    return [("", output)]


def _entries(parts: Any, types: tuple[type, ...]) -> list[tuple[str, Any]]:
    """List (slot, tensor), with (slot, None) for a part without a tensor in it."""
    entries: list[tuple[str, Any]] = []
    for name, part in parts:
        found = leaves(part, types)
        entries.extend([(name + slot, tensor) for slot, tensor in found] or [(name, None)])
    return entries
