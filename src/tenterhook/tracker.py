"""Which call of which module is running, in which step, phase and thread.

A tracker keeps one stack of running calls per thread, numbers the calls of each module within a step, tells the
recomputation of activation checkpointing from the forward it repeats, and counts steps. It knows no framework beyond
the backend's answers, and stores nothing once a call and its gradients are done with.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

from tenterhook.backends import Backend
from tenterhook.calls import LiveCall, Rerun, Watched
from tenterhook.native import NATIVE
from tenterhook.steps import StepCount, never_due

__all__ = ["Tracker"]


class _RegionCalls:
    """The calls of a checkpointed region, in the order of its first run; called for a context in which it runs again."""

    __slots__ = ("_tracker", "calls")

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.calls: dict[Watched, list[LiveCall]] = {}

    def __call__(self) -> AbstractContextManager[None]:
        return self._tracker.rerunning(self)


_PAUSE_NS = 100_000  # a look at what runs costs some microseconds


def _nothing(*arguments: object) -> None:
    pass


def _is_inside(one: Watched, other: Watched) -> bool:
    """Whether a module stands inside another in their model, so that nothing is amiss if it is called there."""
    return one.model == other.model and not one.is_root and (other.is_root or one.path.startswith(f"{other.path}."))


class Tracker(StepCount):
    """Follows the calls of one session.

    Args:
        backend: the framework.
        on_step_begin: called before the first call of a step.
        on_step_end: called with the number of the step that has ended.
    """

    def __init__(self, backend: Backend, on_step_begin: Callable[[], None], on_step_end: Callable[[int], None]) -> None:
        super().__init__(backend, on_step_begin, on_step_end)
        self._backward_token = backend.backward_token
        self._regions = backend.regions
        self._stacks: dict[int, list[LiveCall]] = {}
        self._reruns: dict[int, list[Rerun]] = {}  # thread -> checkpointed regions that are run again, innermost last
        self._sequence: Iterator[int] = itertools.count()
        self._put_back: Callable[[], None] = _nothing
        self._lock = threading.Lock()
        self._home_ident = threading.get_ident()
        self._begun_ns = 0  # when a call began last
        self.stale: list[LiveCall] = []  # calls found to have ended past all hooks, for the capture to record
        self.unseen_ends: set[LiveCall] = set()  # running calls whose hooks have come off
        self._origin_ns = time.perf_counter_ns()
        self.follows_calls = True  # False while the hooks are off, on steps that are not recorded

    def next_seq(self) -> int:
        """Return the next number in the order of events."""
        return next(self._sequence)

    def now_ns(self) -> int:
        """Return monotonic nanoseconds since the session began."""
        return time.perf_counter_ns() - self._origin_ns

    def go_on(self, step: int, seq: int, start_ns: int) -> None:
        """Go on where an earlier session ended: with this step and event, so many nanoseconds from the start."""
        self.step = step
        self._origin_ns -= start_ns
        if self._engine is None:
            self._sequence = itertools.count(seq)
        else:
            self._engine.seq, self._engine.origin_ns = seq, self._origin_ns

    def use(self, engine: Any, put_back: Callable[[], None]) -> None:
        """Have the native path follow the plain calls of this session; before any other is followed.

        Args:
            engine: the native path.
            put_back: called at an outermost call where something has lost its place around the calls of a module.
        """
        self._put_back = put_back
        engine.step, engine.due_step, engine.stacks = self._step, self.due_step, self._stacks
        self._sequence = self._engine = engine
        engine.origin_ns = self._origin_ns
        engine.follows, engine.pause_ns = self.follows_calls, _PAUSE_NS
        engine.busy += (self._reruns, self.stale)

    # --- calls -----------------------------------------------------------------------------------------------------
    def begin(self, watched: Watched) -> LiveCall:
        """Open a call of ``watched`` in this thread."""
        thread = self.thread()
        stack = self._stacks.get(thread)
        if stack is None:
            stack = self._stacks[thread] = []
        elif stack:
            if self._may_have_unwound() or not _is_inside(watched, stack[-1].watched):
                self._unwind(stack)
            if self._engine is not None and stack and _is_inside(watched, stack[-1].watched):
                NATIVE.set_outer(watched, stack[-1].watched)
        outer = stack[-1] if stack else None
        repeats = False
        if self._backward_token() != -1 or (self._reruns and thread in self._reruns):
            repeats = self._repeats(watched, thread)
        if repeats:
            step = repeats.step
        elif outer is not None:
            step = outer.step
        else:
            step = self._begin_outermost(watched, thread) if repeats is False else self.step
        parent = outer.parent if outer is not None and not outer.recorded else outer
        self._begun_ns = time.perf_counter_ns()
        if self._engine is not None:
            self._engine.begun_ns = self._begun_ns
        call = LiveCall(watched, parent, next(self._sequence), step, thread, self._begun_ns - self._origin_ns)
        self._find_regions(call, outer)
        if repeats is False:
            with self._lock:
                watched.begin_call(call)
            if watched.wanted and self.due_step not in (-1, step):
                more = self.records(watched, step) - watched.due
                watched.recorded_count += more
        else:
            call.phase, call.token = "recompute", self._backend.backward_token()
            if repeats is not None:
                call.forward, call.number = repeats, repeats.number
        for region in call.regions:  # those in a region that is run again are new ones
            region.on_rerun(self, _RegionCalls(self)).calls.setdefault(watched, []).append(call.forward or call)
        stack.append(call)
        if self._engine is not None and len(stack) == 1:
            self._engine.enter(stack, thread)
        return call

    def _begin_outermost(self, watched: Watched, thread: int) -> int:
        """Decide which step an outermost call belongs to."""
        if self._engine is not None and not NATIVE.all_in_place(self._engine.arounds):
            self._put_back()
        with self._steps_lock:
            return self._step_of(watched, thread)

    def _may_have_unwound(self) -> bool:
        """Whether an exception may have gone past all hooks since the last call began; to look each time would cost too much.

        In other threads what runs may be replicas, which stand for a module and are none.
        """
        begun = self._begun_ns if self._engine is None else max(self._begun_ns, self._engine.begun_ns)
        now = time.perf_counter_ns()
        if now - begun <= _PAUSE_NS or threading.get_ident() != self._home_ident or self._in_backward():
            return False
        self._begun_ns = now
        return True

    def _repeats(self, watched: Watched, thread: int) -> LiveCall | Literal[False] | None:
        """Find the call that one in a backward pass repeats.

        None where that was not seen, False for a call that repeats nothing: somebody makes it in a hook.
        """
        reruns = self._reruns.get(thread)
        if reruns:
            return reruns[-1].next_of(watched)
        if self._backend.is_recomputing():
            return None
        if not self._in_backward() or watched.step != self.step or watched.recomputed >= len(watched.step_calls):
            return False
        # A checkpointing that is not the framework's. Regions come back last first; so then do the calls of a module.
        watched.recomputed += 1
        return watched.step_calls[-watched.recomputed]

    def _find_regions(self, call: LiveCall, outer: LiveCall | None) -> None:
        call.tracks = self._tracks_gradients()
        if not (self.follows_calls or call.tracks):
            return  # a look for regions with reentry would cost more than all else does on a step that is not recorded
        # Regions with reentry run without gradients and are found by a search that costs: one for the outermost call is enough.
        known = outer is not None and not call.tracks and not outer.tracks
        call.regions = outer.regions if outer is not None and known else self._regions()

    def number_op(self, call: LiveCall) -> None:
        """Number a functional call that has ended."""
        with self._lock:
            call.number = call.watched.next_number(call.thread, call.step)
            call.watched.call_count += 1
            call.watched.recorded_count += call.recorded

    @contextlib.contextmanager
    def rerunning(self, first: _RegionCalls) -> Iterator[None]:
        """Follow a region that is run again; the framework breaks it off as soon as it has what it needs."""
        thread = self.thread()
        stack, reruns = self._stacks.setdefault(thread, []), self._reruns.setdefault(thread, [])
        height = len(stack)
        reruns.append(Rerun(first.calls))
        try:
            yield
        finally:
            reruns.pop()
            if not reruns:
                self._reruns.pop(thread, None)
            del stack[height:]
            if not stack:
                self._stacks.pop(thread, None)

    def end(self, watched: Watched) -> LiveCall | None:
        """Close the running call of ``watched``; calls inside it that never ended (a caught exception) go with it."""
        thread = self.thread()
        stack = self._stacks.get(thread)
        if not stack:
            return None
        if stack[-1].watched is watched:
            call = stack.pop()
        elif any(call.watched is watched for call in stack):
            while (call := stack.pop()).watched is not watched:
                self.stale.append(call)
        else:
            return None  # it never began: a hook before ours has raised
        if not stack and thread not in self._reruns:
            del self._stacks[thread]
        call.regions = ()  # they hold on to the call; with it holding on to them both would outlive the graph
        self.unseen_ends.discard(call)
        return call

    def _unwind(self, stack: list[LiveCall], beginning: int = 1) -> None:
        """Forget calls that an interrupt, or another exception that goes past all hooks, has ended."""
        running = {id(module) for module in self._backend.running_modules()[beginning:]}
        while stack and id(stack[-1].watched.ref()) not in running:
            self.stale.append(stack.pop())

    def records(self, watched: Watched, step: int) -> bool:
        """Whether a call of a module is recorded: as its step is, which another thread may have ended meanwhile."""
        due = watched.due  # before the step that it speaks of, which is changed first
        if self.due_step not in (-1, step):
            due = self.is_due(watched, step)
        return watched.wanted and due and self.follows_calls

    def hooks_came_off(self) -> None:
        """Keep in mind which running calls have lost their hooks: nobody will see how they end."""
        mine = self._stacks.get(self.thread())
        if mine and threading.get_ident() == self._home_ident and not self._in_backward():
            self._unwind(mine, 0)
        running = [call for stack in list(self._stacks.values()) for call in list(stack)]
        self.unseen_ends &= {*running, *self.stale}
        self.unseen_ends.update(call for call in running if call.watched.attachment is None)

    def ends_unseen(self, call: LiveCall) -> bool:
        """Whether the hooks of a call came off amid it; asked once, when it is known to have ended."""
        unseen = call in self.unseen_ends
        self.unseen_ends.discard(call)
        return unseen

    def running(self) -> LiveCall | None:
        """Return the innermost running call of this thread."""
        stack = self._stacks.get(self.thread())
        return stack[-1] if stack else None

    def around_op(self) -> LiveCall | None:
        """Return the innermost running call of this thread, for a functional call in it."""
        stack = self._stacks.get(self.thread())
        if stack and self._may_have_unwound():
            self._unwind(stack, 0)
        return stack[-1] if stack else None

    def settled(self) -> LiveCall | None:
        """Return the innermost running call of this thread, for a call that begins and has no hooks yet."""
        stack = self._stacks.get(self.thread())
        if stack:
            self._unwind(stack)
        return stack[-1] if stack else None

    def take_stale(self) -> list[LiveCall]:
        """Return the calls that were found to have ended past all hooks since this was asked last."""
        stale = self.stale[:]
        self.stale.clear()
        return stale

    def abandon(self) -> Iterator[LiveCall]:
        """Yield the calls that are still open, innermost first, and forget them (an interrupt, the session's end)."""
        yield from self.take_stale()
        for stack in list(self._stacks.values()):
            while stack:
                yield stack.pop()
        self._stacks.clear()

    def forked(self) -> None:
        """Go on in a child of the process, where the parent's other threads may have held the locks."""
        self._lock, self._steps_lock = threading.Lock(), threading.RLock()

    def release(self) -> None:
        """Let go of the session, which is over."""
        self._on_step_begin = self._on_step_end = self._put_back = _nothing
        self.is_due = never_due
        self.unseen_ends.clear()
        if self._engine is not None:
            self._engine.close()
