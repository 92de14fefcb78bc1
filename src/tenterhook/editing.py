"""The engine of :func:`tenterhook.edit`: what changes around the calls of one module, and when."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tenterhook.address import Address, Kind
from tenterhook.aliasing import InputAliases
from tenterhook.backends import Backend, Detachable, Layer
from tenterhook.calls import LiveCall, Watched
from tenterhook.changing import change
from tenterhook.edit_rules import Rule, described
from tenterhook.edited_parts import EditedParts
from tenterhook.errors import StopForward
from tenterhook.handles import HookSite
from tenterhook.replacing import check_replacement
from tenterhook.tracker import Tracker
from tenterhook.values import ParameterNames, argument_leaves, bind_arguments, leaves, rebuild, replace_arguments

__all__ = ["EditedModule", "ModuleEdit", "Session"]


@dataclass(slots=True)
class Session:
    """What the edits of one session share."""

    backend: Backend
    owner: Any  # the editor
    scaler: Any = None
    tracker: Tracker = field(init=False)  # from the start of the session on

    def begin(self, watched: Watched) -> LiveCall:
        """Open a call; calls that turn out to have ended past all hooks let go of their inputs."""
        call = self.tracker.begin(watched)
        if self.tracker.stale:
            stale, self.tracker.stale = self.tracker.stale, []
            _let_go(stale)
        return call

    def abandon(self) -> None:
        """The session ends; so does what is open still."""
        _let_go(self.tracker.abandon())


def _let_go(calls: Iterable[LiveCall]) -> None:
    for call in calls:
        if call.aliases is not None:
            call.aliases.drop()
            call.aliases = None


class ModuleEdit:
    """One rule on one module."""

    __slots__ = ("parts", "rule", "session", "site", "where")

    def __init__(self, session: Session, rule: Rule, site: HookSite) -> None:
        self.session = session
        self.rule = rule
        self.site = site
        self.where = f"edit of {rule.kind} of {site.path or '(root)'} ({described(rule.value)})"  # for messages
        self.parts = EditedParts(session.backend, rule, self.where)

    def applies_to(self, call: LiveCall) -> bool:
        """Whether it is to run in this call; counts the call."""
        if not self.site.applies:
            return False
        if call.phase != "recompute":
            self.site.calls += 1
        return self.rule.matches(call.number, call.step)

    def count(self) -> None:
        """It is about to run."""
        if self.session.backend.is_recomputing():
            self.site.recomputed += 1
        else:
            self.site.fired += 1

    def address(self, slot: str, call: LiveCall) -> Address:
        """The address of a tensor in a call."""
        return Address(self.site.path, Kind(self.rule.kind), slot, call=call.number, step=call.step)

    def changed(self, slot: str, part: Any, call: LiveCall) -> Any:
        """Return what comes in place of one part of an input or output, or None."""
        backend = self.session.backend

        def call_it() -> Any:
            new = self.site.call(part, self.address(slot, call))
            if new is not None:
                check_replacement(backend, part, new, f"{self.where}{' ' + slot if slot else ''}", self.rule.allow)
            return new

        return change(backend, self.site, part, call_it, self.where, self.rule.allow)

    def gradient(self, slot: str, address: Address, gradient: Any) -> Any:
        """Return what comes in place of a gradient, or None."""
        if not self.site.live or self.site.busy:
            return None
        self.site.fired += 1
        session = self.session
        if session.scaler is None:
            new = self.site.call(gradient, address)
        else:
            scale = float(session.scaler.get_scale())
            new = self.site.call(session.backend.unscaled(gradient, scale), address)
            new = None if new is None else session.backend.constant(new * scale, gradient)
        if new is not None:
            check_replacement(session.backend, gradient, new, f"{self.where} {slot}".rstrip(), self.rule.allow)
        return new


class EditedModule:
    """All edits of one session on one module, around its calls."""

    def __init__(self, session: Session, watched: Watched, module: Any) -> None:
        self._session = session
        self._watched = watched  # which does not keep the module alive; nor does anything here
        self._names = ParameterNames.of(session.backend.forward_function(module))
        self._edits: list[ModuleEdit] = []
        self._parts: dict[str, Any] = {}  # "calls", "inner", "skip" -> what was put on for it last
        self._on: set[str] = set()  # those of them that are to be in place now
        self._begun: dict[int, LiveCall] = {}  # thread -> a call that a skip has let pass, before its hooks run
        self._stops: dict[int, tuple[ModuleEdit, LiveCall]] = {}  # thread -> the stop that is to be made

    # --- on and off ------------------------------------------------------------------------------------------------
    def add(self, edit: ModuleEdit) -> None:
        """Put an edit behind the others."""
        self._edits.append(edit)
        edit.site.attached(_Place(self))
        self.settle()

    def follow(self) -> None:
        """Count calls also without an edit."""
        self._attach("calls")

    def close(self) -> None:
        """Take everything off; what checkpointing repeats is put back for that time."""
        for part in ("skip", "inner", "calls"):
            self._take_off(part)

    @property
    def live(self) -> bool:
        """Whether all that was put on is in place."""
        return all(self._parts[part].live for part in self._on)

    @property
    def removed(self) -> int:
        """Place in the order of removals of what was taken off last."""
        return max((part.removed for part in self._parts.values()), default=0)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have all of it on for the length of a ``with``, also if it has been taken off."""
        with contextlib.ExitStack() as stack:
            for part in self._parts.values():
                stack.enter_context(part.in_place())
            yield

    def settle(self) -> None:
        """Have in place what the edits need, and nothing else."""
        kinds = {edit.rule.kind for edit in self._edits if edit.site.live}
        wanted = {"calls": kinds, "inner": kinds & {"grad_input", "stop"}, "skip": kinds & {"skip"}}
        for part, needed in wanted.items():
            if needed:
                self._attach(part)
            elif part != "calls" or not self._watched.is_root:
                self._take_off(part)

    def _take_off(self, part: str) -> None:
        if part in self._on:
            self._on.discard(part)
            self._parts[part].remove()

    def _attach(self, part: str) -> None:
        if part in self._on:
            return
        backend, module = self._session.backend, self._watched.ref()
        if module is None:
            return  # it is gone
        if part == "calls":
            made: Any = backend.attach(module, self._before, self._after, self._failed, layer=Layer.EDIT)
        elif part == "inner":
            made = backend.attach(module, self._alias_inputs, self._stop, layer=Layer.LAST)
        else:
            made = backend.bypass(module, self._instead)
        self._parts[part] = made
        self._on.add(part)

    # --- the call --------------------------------------------------------------------------------------------------
    def _of(self, kind: str, call: LiveCall) -> Iterator[ModuleEdit]:
        for edit in self._edits[:]:
            if edit.rule.kind == kind and edit.applies_to(call):
                yield edit

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._begun.pop(threading.get_ident(), None) or self._session.begin(self._watched)
        new_args, new_kwargs = args, kwargs
        for edit in self._of("input", call):
            new_args, new_kwargs = self._edit_input(edit, call, new_args, new_kwargs)
        return None if new_args is args and new_kwargs is kwargs else (new_args, new_kwargs)

    def _edit_input(
        self, edit: ModuleEdit, call: LiveCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = bind_arguments(self._names, args, kwargs)
        new: dict[str, Any] = {}
        edit.count()
        for slot, part in edit.parts.of_input(bound):
            changed = edit.changed(slot, part, call)
            if changed is not None and changed is not part:
                new[slot] = changed
        return replace_arguments(self._names, args, kwargs, new) if new else (args, kwargs)

    def _after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = self._session.tracker.end(self._watched)
        if call is None:
            return None
        if call.aliases is not None:
            aliases, call.aliases = call.aliases, None
            aliases.settle(f"{self._watched.type} at '{self._watched.name}'")
        new = output
        for edit in self._of("output", call):
            new = self._edit_output(edit, call, new)
        for edit in self._of("grad_output", call):
            self._tap_output(module, edit, call, new)
        for edit in self._of("stop", call):
            self._stops[threading.get_ident()] = edit, call
        return None if new is output else new

    def _edit_output(self, edit: ModuleEdit, call: LiveCall, output: Any) -> Any:
        edit.count()
        new: dict[str, Any] = {}
        for slot, part in edit.parts.of_output(output):
            changed = edit.changed(slot, part, call)
            if changed is not None and changed is not part:
                new[slot] = changed
        return rebuild(output, new)

    def _failed(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException) -> None:
        call = self._session.tracker.end(self._watched)
        if call is not None:
            _let_go([call])

    # --- gradients -------------------------------------------------------------------------------------------------
    def _tap_output(self, module: Any, edit: ModuleEdit, call: LiveCall, output: Any) -> None:
        backend = self._session.backend
        taps = edit.site.leaf_taps
        reason = None
        waits = False
        for slot, tensor in edit.parts.of_gradients(leaves(output, backend.tensor_types)):
            is_leaf = backend.is_leaf(tensor)
            if is_leaf and backend.in_backward() and taps.has(tensor, slot):
                continue  # without reentry it is the call that is repeated here whose gradient comes
            arrived = partial(edit.gradient, slot, edit.address(slot, call))
            tap = backend.tap(tensor, arrived, module, edit.site)
            if isinstance(tap, str):
                reason = tap
                continue
            waits = True
            if is_leaf:
                taps.keep(tensor, slot, tap, edit.site.fired)
        self._note(edit, None if waits else reason)

    def _alias_inputs(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._session.tracker.running()
        if call is None or call.watched is not self._watched:
            return None
        edits = list(self._of("grad_input", call))
        if not edits:
            return None
        backend = self._session.backend
        bound = bind_arguments(self._names, args, kwargs)
        every = argument_leaves(bound, backend.tensor_types)
        aliases = call.aliases = InputAliases(backend)
        for edit in edits:
            edit.parts.of_gradients(every)  # else there is nothing to edit, which it says
        for slot, tensor in every:
            taking = [edit for edit in edits if edit.rule.takes(slot)]
            if not backend.wants_gradient(tensor):
                for edit in taking:
                    self._note(edit, "requires_grad=False" if backend.tracks_gradients() else "grad mode off")
            elif taking:
                aliases.add(slot, tensor, partial(self._tap_input, module, taking, call))
        return aliases.given(self._names, args, kwargs)

    def _tap_input(
        self, module: Any, edits: list[ModuleEdit], call: LiveCall, slot: str, tensor: Any, itself: bool
    ) -> Any:
        def arrived(gradient: Any) -> Any:
            changed = None
            for edit in edits:
                new = edit.gradient(slot, edit.address(slot, call), gradient)
                if new is not None:
                    gradient = changed = new
            return changed

        return self._session.backend.tap(tensor, arrived, module if itself else None, self)

    def _note(self, edit: ModuleEdit, tap: Detachable | str | None) -> None:
        edit.site.reason = f"no gradient: {tap}" if isinstance(tap, str) else None

    # --- leaving out and ending ------------------------------------------------------------------------------------
    def _stop(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        edit, call = self._stops.pop(threading.get_ident(), (None, None))
        if edit is not None and call is not None:
            edit.count()
            raise StopForward(
                Address(edit.site.path, Kind.OUTPUT, call=call.number, step=call.step), output, self._session.owner
            )

    def _instead(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracker, thread = self._session.tracker, threading.get_ident()
        call = self._session.begin(self._watched)
        edit = next(self._of("skip", call), None)
        if edit is None:
            self._begun[thread] = call
            try:
                return run(*args, **kwargs)
            finally:
                if self._begun.pop(thread, None) is not None:
                    tracker.end(self._watched)
        try:
            edit.count()
            slot, part = edit.parts.passed_on(bind_arguments(self._names, args, kwargs))
            address = Address(edit.site.path, Kind.INPUT, slot, call=call.number, step=call.step)

            def passed_on() -> Any:
                new = edit.site.call(part, address) if edit.rule.value is not None else part
                return part if new is None else new

            new = change(self._session.backend, edit.site, (), passed_on, edit.where, edit.rule.allow)
            return run(*args, **kwargs) if new is None else new
        finally:
            tracker.end(self._watched)


class _Place:
    """The place of one edit among the others on its module."""

    __slots__ = ("_module",)

    def __init__(self, module: EditedModule) -> None:
        self._module = module

    @property
    def live(self) -> bool:
        return self._module.live

    @property
    def removed(self) -> int:
        return self._module.removed

    def remove(self) -> None:
        """Take what nobody needs any more off the module."""
        self._module.settle()

    def in_place(self) -> contextlib.AbstractContextManager[None]:
        """Have the module's hooks on for the length of a ``with``."""
        return self._module.in_place()
