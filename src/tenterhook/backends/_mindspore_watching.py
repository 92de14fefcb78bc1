"""Who watches in MindSpore now: hooks on cells, listeners to all calls, and what must stay changed for them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from mindspore import nn

from tenterhook.backends import After, Before, Failed, Instead, Layer
from tenterhook.backends._mindspore_passes import in_pass, run_after_pass

__all__ = ["KEY", "STATE", "SWAPS", "CallHook", "Hold", "Listener", "Swap", "hooks_of", "put_on", "tell_once"]

_log = logging.getLogger("tenterhook")

KEY = "_tenterhook_call_hooks"
"""Where the hooks of a cell are, in its ``__dict__``."""


class CallHook:
    """Callbacks around the calls of one cell."""

    __slots__ = ("_cell", "_followers", "_hold", "after", "before", "failed", "instead", "layer", "live", "removed")

    _removals = itertools.count(1)

    def __init__(
        self,
        cell: nn.Cell,
        before: Before | None = None,
        after: After | None = None,
        failed: Failed | None = None,
        *,
        layer: Layer = Layer.OBSERVE,
        instead: Instead | None = None,
    ) -> None:
        self.layer = layer
        self.instead = instead
        self._cell = weakref.ref(cell)
        self.before = before
        self.after = after
        self.failed = failed
        self.live = False
        self.removed = 0  # when it was taken off, among all that were
        self._followers: list[CallHook] = []

    def put_on(self) -> None:
        """Put it on the cell, behind the hooks of its layer."""
        hooks = self._table()
        if hooks is not None:
            later = (place for place, other in enumerate(hooks) if other.layer > self.layer)
            hooks.insert(0 if self.layer == Layer.FIRST else next(later, len(hooks)), self)
            self.live = True
            self._hold = Hold()

    def remove(self) -> None:
        """Take it off the cell. A second call does nothing."""
        if not self.live:
            return
        self.live = False
        self.removed = next(self._removals)
        hooks = self._table()
        if hooks is not None:
            place = hooks.index(self)
            self._followers = hooks[place + 1 :]
            del hooks[place]
            if not hooks:
                del self._cell().__dict__[KEY]  # type: ignore[union-attr]
        self._hold.release()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put it back, if it is off by now, to where it was among its neighbours, for the length of a context."""
        hooks = None if self.live else self._table()
        if hooks is None:
            yield
            return
        places = [hooks.index(follower) for follower in self._followers if follower in hooks]
        hooks.insert(min(places, default=len(hooks)), self)
        self.live = True
        self._hold = Hold()
        try:
            yield
        finally:
            self.remove()

    def _table(self) -> list[CallHook] | None:
        cell = self._cell()
        if cell is None:
            return None
        table = cell.__dict__.get(KEY)
        if not isinstance(table, _Table):
            table = cell.__dict__[KEY] = _Table()  # past Cell.__setattr__, which has its own ideas about attributes
        return table.hooks


class _Table:
    """The hooks of one cell, in its ``__dict__``, so that they go when it goes; copies of the cell carry none."""

    __slots__ = ("hooks",)

    def __init__(self) -> None:
        self.hooks: list[CallHook] = []

    def __deepcopy__(self, memo: object) -> dict[str, Any]:
        return {}

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (dict, ())


def put_on(hook: CallHook) -> CallHook:
    """Put a hook on its cell, and return it."""
    hook.put_on()
    return hook


class Listener:
    """A function that hears of all ``calls`` of the process, or of its optimizers' ``steps``, or ``steps to come``."""

    __slots__ = ("_hold", "_list", "fn", "live")

    def __init__(self, what: str, fn: Callable[..., None]) -> None:
        self.fn = fn
        self.live = True
        self._list = STATE.listeners[what]
        self._hold = Hold(eager=what == "calls")
        self._list.append(self)
        STATE.listens += 1

    def remove(self) -> None:
        """Stop listening. A second call does nothing."""
        if self.live:
            self.live = False
            self._list.remove(self)
            STATE.listens -= 1
            self._hold.release()


class State:
    """Who watches now."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.holds = 0
        self.eager = 0  # of these, the ones for whom compiled code is to run eager
        self.calls: list[Listener] = []
        self.steps: list[Listener] = []
        self.steps_to_come: list[Listener] = []
        self.listeners = {"calls": self.calls, "steps": self.steps, "steps to come": self.steps_to_come}
        self.listens = 0  # how many these are together
        self.told_of: set[str] = set()
        self.told: list[list[str]] = []  # of the sessions, what they say was changed for them
        self.forwards: dict[int, int] = {}  # thread -> depth of functions that are being differentiated
        self.quiet: dict[int, list[Any]] = {}  # thread -> training cells that are running


class Hold:
    """Keeps the seams open; lets go when released, or when it dies with the cell that it belongs to."""

    __slots__ = ("_eager", "_open")

    def __init__(self, *, eager: bool = False) -> None:
        self._eager = eager
        self._open = True
        with STATE.lock:
            STATE.holds += 1
            STATE.eager += eager
            for swap in SWAPS:
                swap.on()

    def release(self) -> None:
        """Let go. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        with STATE.lock:
            STATE.holds -= 1
            STATE.eager -= self._eager
            if not STATE.holds:
                STATE.told_of.clear()
                for swap in SWAPS:
                    swap.off()
        if not in_pass():
            run_after_pass()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()


class Swap:
    """One attribute that is swapped while somebody watches."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner = owner
        self._name = name
        self._make = make
        self._original: Any = None
        self._ours: Any = None

    def on(self) -> None:
        """Swap, unless that is done already."""
        if self._ours is None:
            self._original = vars(self._owner)[self._name]
            self._ours = functools.wraps(self._original)(self._make(self._original))
            setattr(self._owner, self._name, self._ours)

    def off(self) -> None:
        """Put the original back; where somebody else has swapped after us, ours stays beneath theirs and does nothing."""
        if self._ours is not None and vars(self._owner)[self._name] is self._ours:
            setattr(self._owner, self._name, self._original)
            self._original = self._ours = None


def hooks_of(cell: nn.Cell) -> tuple[CallHook, ...]:
    """Return the hooks on a cell."""
    table = cell.__dict__.get(KEY)
    return tuple(table.hooks) if table else ()


def tell_once(sentence: str) -> None:
    """Say, in the log and in every open session, what happens in other ways than one might think."""
    for told in STATE.told:
        if sentence not in told:
            told.append(sentence)
    if sentence not in STATE.told_of:
        STATE.told_of.add(sentence)
        _log.warning(sentence)


STATE = State()
SWAPS: list[Swap] = []
"""What is swapped while somebody watches; filled by the module that knows how."""
