"""Which call of which module is running, in which step, phase and thread.

A tracker keeps one stack of running calls per thread, numbers the calls of each module within a step, tells the
recomputation of activation checkpointing from the forward it repeats, and decides where a step ends. It knows no
framework beyond the backend's answers, and stores nothing once a call and its gradients are done with.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

from tenterhook.backends import Backend
from tenterhook.calls import LiveCall, Rerun, Watched
from tenterhook.native import NATIVE
from tenterhook.optimizer_turns import OptimizerTurns

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


class Tracker:
    """Follows the calls of one session.

    Args:
        backend: the framework.
        on_step_begin: called before the first call of a step.
        on_step_end: called with the number of the step that has ended.
    """

    def __init__(self, backend: Backend, on_step_begin: Callable[[], None], on_step_end: Callable[[int], None]) -> None:
        self._backend = backend
        self._in_backward = backend.in_backward
        self._backward_token = backend.backward_token
        self._regions = backend.regions
        self._tracks_gradients = backend.tracks_gradients
        self._on_step_begin = on_step_begin
        self._on_step_end = on_step_end
        self._stacks: dict[int, list[LiveCall]] = {}
        self._reruns: dict[int, list[Rerun]] = {}  # thread -> checkpointed regions that are run again, innermost last
        self._sequence: Iterator[int] = itertools.count()
        self._engine: Any = None
        self._put_back: Callable[[], None] = _nothing
        self._lock = threading.Lock()
        self._steps_lock = threading.RLock()
        self._local = threading.local()
        self._thread_numbers = itertools.count()
        self._home_thread = self.thread()
        self._home_ident = threading.get_ident()
        self._leader: weakref.ref[threading.Thread] | None = None  # whose forwards of the root end steps
        self._begun_ns = 0  # when a call began last
        self.stale: list[LiveCall] = []  # calls found to have ended past all hooks, for the capture to record
        self._origin_ns = time.perf_counter_ns()
        self._roots_run: set[Watched] = set()
        self._steps_by: str | None = None  # "optimizer", "forward", "user"; None while unknown
        self._calls_in_step = False
        self.turns = OptimizerTurns()
        self.follows_calls = True  # False while the hooks are off, on steps that are not recorded
        self.sees_all = True  # every wanted module has its hooks, so that a step without a call is none
        self.root_has_run = False
        self.step = 0

    @property
    def steps_seen(self) -> int:
        """Number of steps in which something was called."""
        return self.step + self._calls_in_step

    @property
    def has_begun(self) -> bool:
        """Whether something has been called in the present step."""
        return self._calls_in_step

    @property
    def evaluation_goes_back(self) -> bool:
        """Whether what is evaluated now, before the step's first call, goes with the step that has just ended."""
        return self._steps_by == "optimizer"

    @property
    def needs_root(self) -> bool:
        """Whether steps are ended by forwards of the root, so that it has to be followed on steps that are not recorded, too."""
        return self._steps_by in (None, "forward")

    def next_seq(self) -> int:
        """Return the next number in the order of events."""
        return next(self._sequence)

    def now_ns(self) -> int:
        """Return monotonic nanoseconds since the session began."""
        return time.perf_counter_ns() - self._origin_ns

    def thread(self) -> int:
        """Return this thread's number: 0 where the session began; not its identifier, which the next thread may get again."""
        try:
            return self._local.number
        except AttributeError:
            self._local.number = number = next(self._thread_numbers)
            return number

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
        return call

    def _unwind(self, stack: list[LiveCall], beginning: int = 1) -> None:
        """Forget calls that an interrupt, or another exception that goes past all hooks, has ended."""
        running = {id(module) for module in self._backend.running_modules()[beginning:]}
        while stack and id(stack[-1].watched.ref()) not in running:
            self.stale.append(stack.pop())

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
        if self._engine is not None:
            self._engine.close()

    # --- steps -----------------------------------------------------------------------------------------------------
    def _begin_outermost(self, watched: Watched, thread: int) -> int:
        """Decide which step an outermost call belongs to."""
        if self._engine is not None and not NATIVE.all_in_place(self._engine.arounds):
            self._put_back()
        with self._steps_lock:
            return self._step_of(watched, thread)

    def _step_of(self, watched: Watched, thread: int) -> int:
        if self._steps_by == "optimizer" and self.step and not self._calls_in_step and not self._tracks_gradients():
            return self.step - 1  # evaluation between training steps goes with the step that has just ended
        if not watched.is_root or self._in_backward() or not self._leads(thread):
            self._begin_step()
            return self.step
        if watched in self._roots_run:
            if self._steps_by is None and not self._tracks_gradients():
                self.end_step()  # inference: no need yet to know whether an optimizer will come
            elif self._steps_by is None:
                model = watched.ref()
                has_optimizer = model is not None and self._backend.has_optimizer(model)
                self._steps_by = "optimizer" if has_optimizer else "forward"
            if self._steps_by == "forward":
                self.end_step()
        self._begin_step()
        self._roots_run.add(watched)
        self.root_has_run = True
        return self.step

    def _leads(self, thread: int) -> bool:
        """Whether forwards of the root in this thread end steps: of several threads that run it, only one's do.

        That is the one that the session began in where it runs the root; else the first to do so, and when that has ended
        the next.
        """
        me = threading.current_thread()
        leader = self._leader() if self._leader is not None else None
        if leader is not me and (leader is None or thread == self._home_thread or not leader.is_alive()):
            self._leader = weakref.ref(me)
            leader = me
        return leader is me

    def _begin_step(self) -> None:
        if not self._calls_in_step:
            self._calls_in_step = True
            self._on_step_begin()

    def optimizer_stepped(self, optimizer: object) -> None:
        """An optimizer has stepped: that ends the step, unless the user ends steps himself."""
        with self._steps_lock:
            self._optimizer_stepped(optimizer)

    def _optimizer_stepped(self, optimizer: object) -> None:
        if self._steps_by == "user":
            return
        work = threading.get_ident(), self._backend.work_done()
        if self._calls_in_step or (not self.sees_all and self.turns.is_next(optimizer, work)):
            self._steps_by = "optimizer"
            self.turns.ended(optimizer, work)
            self.end_step()
        else:
            self.turns.stepped_beside(optimizer)

    def user_stepped(self) -> None:
        """The user says that the step has ended; from now on nobody else does."""
        with self._steps_lock:
            self._steps_by = "user"
            self.end_step()

    def end_step(self) -> None:
        """Close the step: calls are numbered from 0 again."""
        ended = self.step
        self._calls_in_step = False  # before the number, for who looks from another thread
        self.step += 1
        self._roots_run.clear()
        self._on_step_end(ended)
