"""Gradients of one call, gathered from its tensors and given to a callback once, in an order that nests.

Frameworks hand gradients over tensor by tensor. A backward callback wants those of a whole call, and wants them after
those of the modules inside. Where a call's inputs need no gradient nothing tells that its backward pass is over; such a
call is held until a gradient of an earlier call arrives, or the pass ends. So the order is the same whether or not the
model's input needs a gradient.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tenterhook.backends import Backend
from tenterhook.backward_passes import RunningPass
from tenterhook.errors import HookError

__all__ = ["CallGradients", "Gathering", "Gradients"]


class Gradients(tuple[Any, ...]):
    """Gradients of a call's inputs or outputs, by position or by slot: ``gradients[0]``, ``gradients["x"]``.

    One entry for each tensor, and None for what is no tensor, needs no gradient or got none.
    """

    slots: tuple[str, ...]

    def __new__(cls, gradients: Sequence[Any], slots: Sequence[str]) -> Gradients:
        """Pair gradients with their slots."""
        made = super().__new__(cls, gradients)
        made.slots = tuple(slots)
        return made

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            try:
                return super().__getitem__(self.slots.index(key))
            except ValueError:
                raise KeyError(f"no slot {key!r}; the slots are {', '.join(self.slots) or '(none)'}") from None
        return super().__getitem__(key)


Fire = Callable[[Gradients, Gradients], "Sequence[Any] | None"]
"""``(grad_input, grad_output) -> None | replacements``, one for each entry of what the callback may replace."""


class CallGradients:
    """The gradients of one call, as they come.

    Args:
        gathering: orders this call among the others.
        fire: the callback.
        replaces: ``"output"`` where the callback runs as soon as the output's gradients are there and may replace them,
            ``"input"`` where it waits for those of the inputs.
        where: address of the call, for messages.
    """

    __slots__ = (
        "_fire",
        "_fired",
        "_gathering",
        "_inputs",
        "_outputs",
        "_replaces",
        "_token",
        "_where",
        "begun",
        "ended",
    )

    def __init__(self, gathering: Gathering, fire: Fire, replaces: str, where: str) -> None:
        self._gathering = gathering
        self._fire = fire
        self._replaces = replaces
        self._where = where
        self._inputs = _Side()
        self._outputs = _Side()
        self._token: int | None = None
        self._fired = False
        self.begun = gathering.tick()
        self.ended = self.begun

    def expect(self, side: str, slots: Sequence[str], expected: Sequence[bool]) -> None:
        """Say which entries there are, and of which of them a gradient can come."""
        target = self._inputs if side == "input" else self._outputs
        target.slots = tuple(slots)
        target.expected = {slot for slot, comes in zip(slots, expected, strict=True) if comes}

    def arrived(self, side: str, slot: str, gradient: Any) -> Any:
        """Take one gradient in; returns its replacement, or None."""
        token = self._gathering.begin(self)
        if token != self._token:
            self._token, self._fired = token, False
            self._inputs.came, self._outputs.came = {}, {}
        here = self._inputs if side == "input" else self._outputs
        if slot in here.came:  # an alias and the tensor behind it: the first to come counts
            return None
        if self._fired:
            here.came[slot] = None
            return None
        here.came[slot] = gradient
        if self._replaces == "output":
            return self._finish(slot) if side == "input" or self._outputs.is_complete() else None
        return self._finish(slot) if side == "input" and self._inputs.is_complete() else None

    def finish(self) -> None:
        """Run the callback with what has come, if it has not run yet in this pass.

        A pass that was to stop before the inputs, ``grad(y, weight)``, does not go through the call, which then is not told.
        """
        backend = self._gathering.backend
        stopped = self._replaces == "input" and self._inputs.expected and not self._inputs.came
        stopped = stopped and backend.knows_what_gets_gradients
        if not self._fired and not stopped and (self._outputs.came or self._inputs.came):
            self._finish(None)

    def _finish(self, arriving: str | None) -> Any:
        self._fired = True
        self._gathering.done(self)
        grad_input, grad_output = self._inputs.gradients(), self._outputs.gradients()
        for side in (self._inputs, self._outputs):  # a graph that is kept must not keep the gradients, too
            side.came = dict.fromkeys(side.came)
        replaced = self._fire(grad_input, grad_output)
        if replaced is None:
            return None
        side = self._outputs if self._replaces == "output" else self._inputs
        late = [
            slot
            for slot, new in zip(side.slots, replaced, strict=True)
            if new is not None and slot != arriving and slot in side.came
        ]
        if late:
            raise HookError(
                f"{self._where}: the gradient at {late[0]!r} has gone on before those of the other slots came, too late to replace it\n"
                "  change one slot at a time: th.edit(model).grad_input(..., slot=...) or .grad_output(..., slot=...)"
            )
        if arriving is None or arriving not in side.slots:
            if any(new is not None for new in replaced):
                raise HookError(f"{self._where}: no gradient came that the returned one could replace")
            return None
        return replaced[side.slots.index(arriving)]


class _Side:
    """The entries of one side of a call."""

    __slots__ = ("came", "expected", "slots")

    def __init__(self) -> None:
        self.slots: tuple[str, ...] = ()
        self.expected: set[str] = set()
        self.came: dict[str, Any] = {}

    def is_complete(self) -> bool:
        return len(self.came) >= len(self.expected)

    def gradients(self) -> Gradients:
        return Gradients([self.came.get(slot) for slot in self.slots], self.slots)


class Gathering:
    """The calls of one session whose gradients are on their way."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._clock = itertools.count()
        self.passes = 0  # backward passes that have reached some call
        self._open: weakref.WeakValueDictionary[tuple[int, int], RunningPass[CallGradients]] = (
            weakref.WeakValueDictionary()
        )
        self._untold: dict[
            tuple[int, int], RunningPass[CallGradients]
        ] = {}  # where the framework does not tell when a pass ends

    def tick(self) -> int:
        """Return the next point in the order of calls."""
        return next(self._clock)

    def begin(self, call: CallGradients) -> int:
        """A gradient of ``call`` has come: calls after it are done with, since gradients come last call first."""
        token = self.backend.backward_token()
        key = (threading.get_ident(), token)
        running = self._open.get(key)
        if running is None:
            running = self._open[key] = RunningPass()
            self.passes += 1
            if not self.backend.at_backward_end(partial(self._finish, key, running)):
                self._untold[key] = running
        calls = running.calls
        for later in sorted((one for one in calls if one.begun > call.ended), key=lambda one: -one.begun):
            later.finish()
        if call not in calls:
            calls.append(call)
        return token

    def done(self, call: CallGradients) -> None:
        """The callback of ``call`` has run in this pass."""
        for running in list(self._open.values()):
            if call in running.calls:
                running.calls.remove(call)

    def _finish(self, key: tuple[int, int], running: RunningPass[CallGradients]) -> None:
        self._open.pop(key, None)
        for call in sorted(running.calls, key=lambda one: -one.begun):
            call.finish()

    def forward_begins(self) -> None:
        """A forward call outside any backward pass: passes of this thread that are still open have ended, or have failed."""
        if self._open and not self.backend.in_backward():
            thread = threading.get_ident()
            for key in [key for key in list(self._open) if key[0] == thread]:
                self._open.pop(key, None)
                running = self._untold.pop(key, None)
                if running is not None:
                    for call in sorted(running.calls, key=lambda one: -one.begun):
                        call.finish()

    def close(self) -> None:
        """Give what has come so far to its callbacks, where the framework does not tell when a pass ends."""
        self.forward_begins()
        self._open.clear()
        self._untold.clear()
