"""What a session knows of a module that it watches, and of each call of it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from tenterhook.aliasing import InputAliases
from tenterhook.backends import Detachable, Region, Suspendable
from tenterhook.native import NATIVE
from tenterhook.recording.blocks import Site
from tenterhook.selection import Entry
from tenterhook.values import ParameterNames

__all__ = ["MOST_REPEATED", "LiveCall", "Place", "Watched"]

MOST_REPEATED = 64
"""Calls of a module within which a checkpointing that is not the framework's is recognised."""


class LiveCall:
    """One call of a watched module, from its start until its last gradient."""

    __slots__ = (
        "aliases",
        "around",
        "backward_depth",
        "backward_seq",
        "depth",
        "followed",
        "forward",
        "number",
        "ops",
        "parent",
        "pass_number",
        "pending",
        "phase",
        "recorded",
        "regions",
        "seq",
        "source",
        "start_ns",
        "step",
        "thread",
        "token",
        "tracks",
        "watched",
    )

    def __init__(
        self, watched: Watched, parent: LiveCall | None, seq: int, step: int, thread: int, start_ns: int
    ) -> None:
        self.watched = watched
        self.parent = parent  # nearest enclosing call that is recorded
        self.depth = 0 if parent is None else parent.depth + 1
        self.seq = seq
        self.step = step
        self.thread = thread
        self.start_ns = start_ns
        self.number = 0
        self.source: str | None = None  # of a functional call: the line of the user's code
        self.around: LiveCall | None = None  # of a functional call, while it runs: the module's call that it is in
        self.ops: list[LiveCall] | None = None  # functional calls in it, in order
        self.followed = False  # its values and gradients are looked at
        self.recorded = False  # it has a row of its own
        self.phase = "forward"
        self.forward: LiveCall | None = None  # of a recomputation: the call that it repeats
        self.tracks = False  # gradients were tracked as it began
        self.regions: Sequence[Region] = ()  # checkpointed regions that it runs in
        self.token = -1  # of the backward pass that reached this call last; of a recomputation: that it runs in
        self.pass_number = -1
        self.backward_seq = -1
        self.backward_depth = 0
        self.pending: dict[tuple[str, str], int] = {}  # gradients expected -> backward pass that brought them last
        self.aliases: InputAliases | None = None  # until the module has run

    @property
    def expects_gradient(self) -> bool:
        """Whether gradients may come by way of this run of the call.

        Checkpointing without reentry never differentiates what it recomputed, with reentry it differentiates only that.
        """
        return self.phase != "recompute" or (self.forward is not None and not self.forward.pending)

    def expect(self, kind: str, slot: str, token: int = -1) -> int:
        """A gradient is waited for, or has come in a backward pass; returns how many are known."""
        self.pending[kind, slot] = token
        return len(self.pending)


class Place:
    """What is counted of a watched module. What the native path has a type of its own for."""

    __slots__ = (
        "attachment",
        "call_count",
        "due",
        "gradient_count",
        "keep",
        "model",
        "no_gradient",
        "numbers",
        "recomputed",
        "recorded_count",
        "resting",
        "step",
        "step_calls",
        "wanted",
    )

    model: str
    keep: bool
    wanted: bool
    no_gradient: Counter[str]
    numbers: dict[int, tuple[int, int]]
    step_calls: list[LiveCall]
    attachment: Detachable | None
    resting: Suspendable | None

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Begin to count."""
        made = super().__new__(cls)
        made.call_count = made.recorded_count = made.gradient_count = made.recomputed = 0
        made.step = -1
        made.numbers = {}  # thread -> step, calls so far in it
        made.step_calls = []
        made.due = True  # recorded on this step
        return made

    def next_number(self, thread: int, step: int) -> int:
        """Return the number of a thread's next call in a step."""
        numbers = self.numbers
        last = numbers.get(thread)
        if last is None or last[0] != step:
            if len(numbers) > 1:
                for one in [one for one, (other, _) in numbers.items() if other < step]:
                    del numbers[one]  # threads come and go
            last = step, 0
        numbers[thread] = step, last[1] + 1
        return last[1]

    def begin_call(self, call: LiveCall) -> None:
        """Number a call, and count it."""
        if self.step != call.step:
            self.step = call.step
            self.step_calls = []
            self.recomputed = 0
        call.number = self.next_number(call.thread, call.step)
        self.call_count += 1
        self.recorded_count += self.wanted and self.due
        if not call.regions:
            self.step_calls.append(call)
            if len(self.step_calls) > MOST_REPEATED:
                del self.step_calls[0]


if NATIVE is not None and not TYPE_CHECKING:
    LiveCall, Place = NATIVE.LiveCall, NATIVE.Place


class Watched(Place):
    """One module of one model under observation, with what the session knows of it."""

    __slots__ = (
        "aliases",
        "callable",
        "closed",
        "entry_parameters",
        "every",
        "input_names",
        "is_root",
        "lost",
        "path",
        "raw_path",
        "ref",
        "sites",
        "type",
        "ungraded",
    )

    def __init__(self, model: str, entry: Entry, *, wanted: bool, keep: bool = False) -> None:
        self.model = model
        self.path = entry.path
        self.raw_path = entry.raw_path
        self.type = entry.type_names[0] if entry.type_names else type(entry.module).__name__
        self.aliases = entry.aliases
        self.is_root = entry.path == ""
        self.callable = entry.callable
        self.ref: Callable[[], Any] = weakref.ref(entry.module)
        self.wanted = wanted  # selected for recording; a root is followed also where it is not
        self.keep = keep  # its tensors are kept, too
        self.every = 1  # of the steps that are recorded, those whose number it divides
        self.input_names: ParameterNames | None = None
        self.attachment = None
        self.resting = None  # the attachment, while it is off and will come back
        self.closed = False  # gets no hooks: they would change what runs
        self.lost = False  # somebody else took our hooks off
        self.ungraded: dict[str, str] = {}  # parameters whose gradient has not come -> why, where it was asked for
        self.entry_parameters = 0
        self.no_gradient = Counter()
        self.sites: dict[tuple[str, str], Site] = {}

    def site(self, kind: str = "", slot: str = "") -> Site:
        """Return what all rows of a kind and slot of this module have in common; of its calls without arguments."""
        site = self.sites.get((kind, slot))
        if site is None or site.model != self.model:  # a model gets its name after it was met
            site = self.sites[kind, slot] = Site(self.model, self.path, self.type, kind, slot)
        return site

    def succeed(self, old: Watched) -> None:
        """Go on where a module of the same place and make has left off."""
        self.call_count, self.recorded_count = old.call_count, old.recorded_count
        self.gradient_count = old.gradient_count
        self.no_gradient, self.recomputed = old.no_gradient, old.recomputed
        self.sites = old.sites
        self.step, self.numbers, self.step_calls = old.step, old.numbers, old.step_calls
        old.step_calls = []  # its calls refer to it: what is gone must not be kept by a cycle

    @property
    def name(self) -> str:
        """The path, with a word for the root."""
        return self.path or "(root)"


class Rerun:
    """A region that is being run again: how many calls of each module have come back so far."""

    __slots__ = ("_counts", "_first")

    def __init__(self, first: dict[Watched, list[LiveCall]]) -> None:
        self._first = first
        self._counts: Counter[Watched] = Counter()

    def next_of(self, watched: Watched) -> LiveCall | None:
        """Return the call of the first run that the next call of ``watched`` repeats; None where that was not seen."""
        calls = self._first.get(watched, ())
        index = self._counts[watched]
        self._counts[watched] += 1
        return calls[index] if index < len(calls) else None
