"""Hooks that somebody puts on in the middle of a call: they see of that call what they would see without hooks of ours.

A module that has no hooks is called by torch without a look at its tables, so that a hook which it puts on itself in its ``forward``
runs from the next call on. Where hooks of ours are in the tables torch looks there after ``forward`` and would run it at once. So
what comes then is kept from the calls that are running, in whichever thread, and stands in the table itself when they have ended.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as _module_registries
from torch.utils.hooks import RemovableHandle

from tenterhook._fork_locks import ForkLock
from tenterhook.backends._installed import is_ours
from tenterhook.backends._torch_hooks import is_hook
from tenterhook.backends._torch_native import give_way

__all__ = ["NotYet", "calls_beginning", "hooked_call", "seeing_registration"]

_TABLES = ("_forward_pre_hooks", "_forward_hooks")
_GLOBAL_TABLES: tuple[Any, ...] = tuple(getattr(_module_registries, f"_global{name}", None) for name in _TABLES)
_BACKWARD_HOOKS = (
    "full_backward_hooks",
    "non_full_backward_hooks",
    "backward_pre_hooks",
)  # as torch read them before the call
_CALL = "called_always_called_hooks"  # a set that torch makes for each call that looks into the tables
_AFTER_PRE_HOOKS = "bw_hook"

_impl_code: Any = getattr(nn.Module._call_impl, "__code__", None)
_CODE = next((one for one in getattr(_impl_code, "co_consts", ()) if getattr(one, "co_name", "") == "inner"), None)

# What is known of a call stands in its set, whose other members are the keys of hooks.
_ALONE = object()  # there were no hooks but ours when it began
_BESIDE = object()


class NotYet:
    """Stands in a hook table for a hook that has come in the middle of calls, until those have ended."""

    __slots__ = ("__weakref__", "_calls", "_key", "_table", "hook")

    def __init__(self, hook: Any, table: Any, key: int, calls: list[set[Any]]) -> None:
        self.hook = hook
        self._table = weakref.ref(table)
        self._key = key
        self._calls: list[Any] = []
        table[key] = self
        _waiting.add(self)
        self._calls += [weakref.ref(call, self._ended) for call in calls]

    def _ended(self, call: Any) -> None:
        self._calls = [one for one in self._calls if one is not call]
        table = self._table()
        if not self._calls and table is not None and table.get(self._key) is self:
            table[self._key] = self.hook

    def look(self) -> None:
        """Make way if the calls have ended: somebody may keep the error that has ended one, and with it what it consists of."""
        running = {id(call[_CALL]) for call in _looking_calls()}
        for one in self._calls[:]:
            if id(one()) not in running:
                self._ended(one)

    def __call__(self, *args: Any) -> Any:
        call = sys._getframe(1).f_locals.get(_CALL)
        if call is not None and any(one() is call for one in self._calls):
            return None
        self.look()
        return self.hook(*args)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.hook, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self.hook,),)  # the hook itself, where tenterhook is not installed, too


_waiting: weakref.WeakSet[NotYet] = weakref.WeakSet()


def _looking_calls(*, but_of: int | None = None) -> Iterator[Mapping[str, Any]]:
    """Yield the local variables of all calls that run, in all threads but one, and look into the tables of hooks."""
    for ident, top in sys._current_frames().items():
        frame: types.FrameType | None = None if ident == but_of else top
        while frame is not None:
            if frame.f_code is _CODE and _CALL in frame.f_locals:
                yield frame.f_locals
            frame = frame.f_back


def calls_beginning(modules: Collection[nn.Module]) -> list[object]:
    """List the calls of modules, in other threads, that have not yet run all the hooks that were there before the call."""
    ids = set(map(id, modules))
    others = _looking_calls(but_of=threading.get_ident())
    return [call[_CALL] for call in others if id(call["self"]) in ids and _AFTER_PRE_HOOKS not in call]


def hooked_call() -> object | None:
    """Return the innermost call of this thread that looks into the tables of hooks."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CODE:
            return frame.f_locals.get(_CALL)
        frame = frame.f_back
    return None


def _was_alone(call: Mapping[str, Any]) -> bool:
    """Whether a call began with no hooks but ours; to be asked before the first change of the tables, and answered alike from then on."""
    known: set[Any] = call[_CALL]
    if _ALONE not in known and _BESIDE not in known:
        module = vars(call["self"])
        tables = [*_GLOBAL_TABLES, *(module.get(name) for name in _TABLES)]
        beside = (
            _AFTER_PRE_HOOKS not in call  # a callback before the call does it, which torch would have as a hook
            or any(call.get(name) for name in _BACKWARD_HOOKS)
            or any(not _is_ours(hook) for table in tables for hook in list((table or {}).values()))
        )
        known.add(_BESIDE if beside else _ALONE)
    return _ALONE in known


def _is_ours(hook: Any) -> bool:
    return is_hook(hook) or (type(hook) is not NotYet and is_ours(hook))


def _calls_alone(table: Any) -> list[set[Any]]:
    """List the running calls to which a table is about to change, and that began with no hooks but ours."""
    for looking in _kept[:]:
        looking.look()
    everywhere = any(table is one for one in _GLOBAL_TABLES)
    return [
        call[_CALL]
        for call in _looking_calls()
        if (everywhere or any(vars(call["self"]).get(name) is table for name in _TABLES)) and _was_alone(call)
    ]


def seeing_registration() -> Callable[[], None]:
    """Look on while hooks are put on modules and taken off; returns what ends that.

    What stands around a module's calls gives way as soon as somebody puts a hook on it. Ours stand in the table then when the hook
    of somebody else comes, so that ``prepend`` means for it what it always means. To find out at the next call would be too late: a
    single hook in a table does not tell whether it was prepended.
    """
    with _lock:
        looking = _kept.pop() if _kept else _Looking()
    return looking.end


class _Looking:
    """What looks on, until the last session has ended, and what runs then with no hooks but those of sessions."""

    __slots__ = ("__weakref__", "_calls", "_ends")

    def __init__(self) -> None:
        for call in _looking_calls():  # nobody but others has had them look
            call[_CALL].add(_BESIDE)
        self._calls: list[Any] = []
        self._ends = [
            _seeing_hooks_of_one("register_forward_pre_hook", None),
            _seeing_hooks_of_one("register_forward_hook", "_forward_hooks"),
            _seeing_hooks_of_all("register_module_forward_pre_hook", _GLOBAL_TABLES[0], waits=False),
            _seeing_hooks_of_all("register_module_forward_hook", _GLOBAL_TABLES[1], waits=True),
            _seeing_removals(),
        ]

    def end(self) -> None:
        """The last session has ended."""
        for waiting in list(_waiting):
            waiting.look()
        with _lock:
            _kept.append(self)
            self._calls = [weakref.ref(call[_CALL], self._ended) for call in _looking_calls() if _was_alone(call)]
        self._ended(None)

    def _ended(self, call: Any) -> None:
        with _lock:
            self._calls = [one for one in self._calls if one is not call]
            if self._calls or self not in _kept:
                return
            _kept.remove(self)
            for end in self._ends:
                end()

    def look(self) -> None:
        """End if the calls have ended, as :meth:`NotYet.look` does."""
        running = {id(call[_CALL]) for call in _looking_calls()}
        for one in self._calls[:]:
            if id(one()) not in running:
                self._ended(one)


_kept: list[_Looking] = []  # one at most, which waits for calls to end
_lock = ForkLock()


def _hook_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hook")


def _seeing_hooks_of_one(name: str, waits_in: str | None) -> Callable[[], None]:
    register: Any = getattr(nn.Module, name)

    @functools.wraps(register)
    def registering(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hook = _hook_of(args, kwargs)
        if is_hook(hook):
            return register(self, *args, **kwargs)
        give_way(self)
        table = vars(self).get(waits_in or _TABLES[0])
        calls = _calls_alone(table)
        handle = register(self, *args, **kwargs)
        if waits_in is not None and calls:
            NotYet(hook, table, handle.id, calls)
        return handle

    return _replaced(nn.Module, name, registering)


def _seeing_hooks_of_all(name: str, table: Any, *, waits: bool) -> Callable[[], None]:
    """Look on at a function that is imported by its name, and so keeps its identity."""
    function: Any = getattr(_module_registries, name, None)
    code, keywords = getattr(function, "__code__", None), getattr(function, "__kwdefaults__", None)
    if not isinstance(function, types.FunctionType) or function.__closure__ is not None or code is None:
        return lambda: None
    register: Any = types.FunctionType(code, function.__globals__, name, function.__defaults__)
    register.__kwdefaults__ = keywords

    def registering(*args: Any, **kwargs: Any) -> Any:
        hook = _hook_of(args, kwargs)
        calls = [] if _is_ours(hook) else _calls_alone(table)
        handle = register(*args, **kwargs)
        if waits and calls:
            NotYet(hook, table, handle.id, calls)
        return handle

    def end() -> None:
        if function.__code__ is _by_way_of_us.__code__ and (function.__kwdefaults__ or {}).get("_seen") is registering:
            function.__code__ = code
            function.__kwdefaults__ = keywords

    function.__kwdefaults__ = {**(keywords or {}), "_seen": registering}
    function.__code__ = _by_way_of_us.__code__
    return end


def _by_way_of_us(*args: Any, _seen: Any, **kwargs: Any) -> Any:
    return _seen(*args, **kwargs)


def _seeing_removals() -> Callable[[], None]:
    """Have it noted of running calls that a hook was there when they began."""
    remove: Any = RemovableHandle.remove

    @functools.wraps(remove)
    def removing(self: RemovableHandle) -> None:
        table: Any = self.hooks_dict_ref()
        # the handles of hooks on tensors, which come and go with each call, have no tables of flags
        if table and (self.extra_dict_ref or any(table is one for one in _GLOBAL_TABLES)):
            hook = table.get(self.id)
            if hook is not None and not _is_ours(hook):
                _calls_alone(table)
        remove(self)

    return _replaced(RemovableHandle, "remove", removing)


def _replaced(owner: type, name: str, function: Any) -> Callable[[], None]:
    before = getattr(owner, name)
    setattr(owner, name, function)

    def end() -> None:
        if getattr(owner, name) is function:
            setattr(owner, name, before)

    return end
