"""The engine of :func:`tenterhook.edit`: what changes around the calls of one module, and when."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tenterhook.address import Address, Kind
from tenterhook.aliasing import InputAliases
from tenterhook.backends import Backend, Detachable, Layer
from tenterhook.call_hooks import change
from tenterhook.calls import LiveCall, Watched
from tenterhook.edit_values import EditValue
from tenterhook.errors import EditError, HookError, StopForward
from tenterhook.handles import HookSite, name_of
from tenterhook.replacing import check_replacement
from tenterhook.tracker import Tracker
from tenterhook.values import (
    ParameterNames,
    argument_leaves,
    bind_arguments,
    get_slot,
    leaves,
    rebuild,
    replace_arguments,
)

__all__ = ["EVERY", "EditedModule", "ModuleEdit", "Rule", "Session", "described", "value_function"]

EVERY = "**"
"""As a slot: every tensor of the value by itself."""

ValueFunction = Callable[[Any, Address], Any]


@dataclass(slots=True)
class Session:
    """What the edits of one session share."""

    backend: Backend
    tracker: Tracker
    owner: Any  # the editor
    scaler: Any = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One registration: what is done, to which value, in which calls."""

    kind: str
    value: Any  # as the user gave it: a function, an edit value, None
    slot: str | None
    call: frozenset[int] | None
    step: frozenset[int] | None
    allow: frozenset[str]

    def matches(self, call: int | None, step: int) -> bool:
        """Whether it is meant for this call of this step."""
        return (self.call is None or call is None or call in self.call) and (self.step is None or step in self.step)

    def takes(self, slot: str) -> bool:
        """Whether it is meant for the tensor at this slot of a gradient."""
        if self.slot in (None, EVERY):
            return True
        wanted, slot = (self.slot or "").removeprefix("."), slot.removeprefix(".")
        return slot == wanted or (slot.startswith(wanted) and slot[len(wanted)] in ".[")


def value_function(value: Any, backend: Backend, what: str) -> ValueFunction:
    """Return a function of value and address for what the user gave as an edit.

    Raises:
        HookError: it is no function of one or two arguments, and no edit value.
    """
    if isinstance(value, EditValue):
        return lambda tensor, address: value.apply(tensor, address, backend)
    if not callable(value):
        raise HookError(
            f"{what} needs a function or an edit value, got {type(value).__name__}\n"
            "  give fn(value), fn(value, address), or one of th.edits: th.edits.replace(tensor)"
        )
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # some callables of C show no signature; they get the value alone
        return lambda tensor, address: value(tensor)
    needed = [
        one
        for one in parameters
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    taken = [one for one in parameters if one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD)]
    missing = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    if len(needed) > 2 or not taken or missing:
        raise HookError(
            f"{what} calls fn(value) or fn(value, address), but {name_of(value)}{inspect.signature(value)} does not take that\n"
            "  bind the other arguments with functools.partial or a lambda"
        )
    return value if len(needed) == 2 else lambda tensor, address: value(tensor)


class ModuleEdit:
    """One rule on one module."""

    __slots__ = ("rule", "session", "site")

    def __init__(self, session: Session, rule: Rule, site: HookSite) -> None:
        self.session = session
        self.rule = rule
        self.site = site

    @property
    def where(self) -> str:
        """What it is and where, for messages."""
        return f"edit of {self.rule.kind} of {self.site.path or '(root)'} ({described(self.rule.value)})"

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


def described(value: Any) -> str:
    """Return an edit's name for tables and messages."""
    return "" if value is None else repr(value) if isinstance(value, EditValue) else name_of(value)


class EditedModule:
    """All edits of one session on one module, around its calls."""

    def __init__(self, session: Session, watched: Watched, module: Any) -> None:
        self._session = session
        self._watched = watched
        self._module = module
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
        backend, module = self._session.backend, self._module
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
        call = self._begun.pop(threading.get_ident(), None) or self._session.tracker.begin(self._watched)
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
        for slot, part in self._input_parts(edit, bound):
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
            self._tap_output(edit, call, new)
        for edit in self._of("stop", call):
            self._stops[threading.get_ident()] = edit, call
        return None if new is output else new

    def _edit_output(self, edit: ModuleEdit, call: LiveCall, output: Any) -> Any:
        edit.count()
        new: dict[str, Any] = {}
        for slot, part in self._output_parts(edit, output):
            changed = edit.changed(slot, part, call)
            if changed is not None and changed is not part:
                new[slot] = changed
        return rebuild(output, new)

    def _failed(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException) -> None:
        call = self._session.tracker.end(self._watched)
        if call is not None and call.aliases is not None:
            call.aliases.drop()
            call.aliases = None

    # --- gradients -------------------------------------------------------------------------------------------------
    def _tap_output(self, edit: ModuleEdit, call: LiveCall, output: Any) -> None:
        backend = self._session.backend
        found = [(slot, one) for slot, one in leaves(output, backend.tensor_types) if edit.rule.takes(slot)]
        if not found:
            raise self._no_tensor(edit, [slot for slot, _ in leaves(output, backend.tensor_types)])
        for slot, tensor in found:
            arrived = partial(edit.gradient, slot, edit.address(slot, call))
            tap = backend.tap(tensor, arrived, self._module, edit.site)
            self._note(edit, tap)
            if not isinstance(tap, str) and backend.is_leaf(tensor):  # its hooks outlive the graph
                edit.site.keep((id(tensor), slot), tap)

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
            if not any(edit.rule.takes(slot) for slot, _ in every):
                raise self._no_tensor(edit, [slot for slot, _ in every])
        for slot, tensor in every:
            taking = [edit for edit in edits if edit.rule.takes(slot)]
            if not backend.wants_gradient(tensor):
                for edit in taking:
                    self._note(edit, "requires_grad=False" if backend.tracks_gradients() else "grad mode off")
            elif taking:
                aliases.add(slot, tensor, partial(self._tap_input, taking, call))
        return replace_arguments(self._names, args, kwargs, aliases.by_slot) if aliases.by_slot else None

    def _tap_input(self, edits: list[ModuleEdit], call: LiveCall, slot: str, tensor: Any, itself: bool) -> Any:
        def arrived(gradient: Any) -> Any:
            changed = None
            for edit in edits:
                new = edit.gradient(slot, edit.address(slot, call), gradient)
                if new is not None:
                    gradient = changed = new
            return changed

        return self._session.backend.tap(tensor, arrived, self._module if itself else None, self)

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
        call = tracker.begin(self._watched)
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
            slot, part = self._passed_on(edit, bind_arguments(self._names, args, kwargs))
            address = Address(edit.site.path, Kind.INPUT, slot, call=call.number, step=call.step)

            def passed_on() -> Any:
                new = edit.site.call(part, address) if edit.rule.value is not None else part
                return part if new is None else new

            new = change(self._session.backend, edit.site, (), passed_on, edit.where, edit.rule.allow)
            return run(*args, **kwargs) if new is None else new
        finally:
            tracker.end(self._watched)

    def _passed_on(self, edit: ModuleEdit, bound: dict[str, Any]) -> tuple[str, Any]:
        if edit.rule.slot is not None:
            return edit.rule.slot, _argument(bound, edit.rule.slot, edit.where)
        if not bound:
            raise EditError(
                f"{edit.where}: it was called without arguments, so nothing can be passed on\n  give a function"
            )
        return next(iter(bound.items()))

    # --- parts -----------------------------------------------------------------------------------------------------
    def _output_parts(self, edit: ModuleEdit, output: Any) -> list[tuple[str, Any]]:
        slot = edit.rule.slot
        if slot is None and not isinstance(edit.rule.value, EditValue):
            return [("", output)]
        every = leaves(output, self._session.backend.tensor_types)
        if slot == EVERY:
            return every
        if slot is not None:
            return [(slot, get_slot(output, slot))]
        return [self._only(edit, every)]

    def _input_parts(self, edit: ModuleEdit, bound: dict[str, Any]) -> list[tuple[str, Any]]:
        slot, types = edit.rule.slot, self._session.backend.tensor_types
        if slot == EVERY:
            return argument_leaves(bound, types)
        if slot is not None:
            return [(slot, _argument(bound, slot, edit.where))]
        if isinstance(edit.rule.value, EditValue):
            return [self._only(edit, argument_leaves(bound, types))]
        holding = [(name, value) for name, value in bound.items() if leaves(value, types)]
        return [self._only(edit, holding or list(bound.items()))]

    def _only(self, edit: ModuleEdit, parts: list[tuple[str, Any]]) -> tuple[str, Any]:
        backend = self._session.backend
        if len(parts) > 1 and all(isinstance(part, backend.tensor_types) for _, part in parts):
            real = [(slot, part) for slot, part in parts if "float" in backend.summary(part)[1]]
            parts = real or parts
        if len(parts) == 1:
            return parts[0]
        if not parts:
            raise self._no_tensor(edit, [])
        slots = ", ".join(repr(slot) for slot, _ in parts)
        raise EditError(
            f"{edit.where}: there are {len(parts)} tensors here: {slots}\n"
            f"  choose one: slot={parts[0][0]!r}; or all of them, each by itself: slot='{EVERY}'"
        )

    def _no_tensor(self, edit: ModuleEdit, slots: list[str]) -> EditError:
        wanted = f" at slot {edit.rule.slot!r}" if edit.rule.slot else ""
        return EditError(
            f"{edit.where}: there is no tensor{wanted}\n  the tensors here are {', '.join(map(repr, slots)) or 'none'}"
        )


def _argument(bound: dict[str, Any], slot: str, where: str) -> Any:
    slot = slot.removeprefix(".")
    for name in sorted(bound, key=len, reverse=True):
        if slot == name or (slot.startswith(name) and slot[len(name)] in ".["):
            return get_slot(bound[name], slot[len(name) :])
    raise EditError(f"{where}: no argument {slot!r} in this call\n  it has {', '.join(bound) or 'none'}")


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
