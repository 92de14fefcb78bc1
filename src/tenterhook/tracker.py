"""Which call of which module is running, in which step, phase and thread.

A tracker keeps one stack of running calls per thread, numbers the calls of each module within a step, tells the
recomputation of activation checkpointing from the forward it repeats, and decides where a step ends. It knows no
framework beyond the backend's answers, and stores nothing once a call and its gradients are done with.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tenterhook.backends import Backend, Detachable
from tenterhook.select import Entry
from tenterhook.values import ParameterNames

__all__ = ["LiveCall", "Tracker", "Watched"]


class Watched:
    """One module of one model under observation, with what the session knows of it."""

    __slots__ = (
        "aliases",
        "attachment",
        "call_count",
        "entry_parameters",
        "gradient_count",
        "input_names",
        "is_root",
        "keep",
        "lost",
        "model",
        "no_gradient",
        "numbers",
        "path",
        "raw_path",
        "recomputed",
        "ref",
        "step",
        "step_calls",
        "type",
        "wanted",
    )

    def __init__(self, model: str, entry: Entry, *, wanted: bool, keep: bool = False) -> None:
        self.model = model
        self.path = entry.path
        self.raw_path = entry.raw_path
        self.type = type(entry.module).__name__
        self.aliases = entry.aliases
        self.is_root = entry.path == ""
        self.ref: Callable[[], Any] = weakref.ref(entry.module)
        self.wanted = wanted  # selected for recording; a root is followed also where it is not
        self.keep = keep  # its tensors are kept, too
        self.input_names: ParameterNames | None = None
        self.attachment: Detachable | None = None
        self.lost = False  # somebody else took our hooks off
        self.entry_parameters = 0
        self.call_count = 0
        self.gradient_count = 0
        self.no_gradient: Counter[str] = Counter()
        self.step = -1
        self.numbers: dict[int, tuple[int, int]] = {}  # thread -> step, calls so far in it
        self.step_calls: list[LiveCall] = []
        self.recomputed = 0

    def succeed(self, old: Watched) -> None:
        """Go on where a module of the same place and make has left off."""
        self.call_count, self.gradient_count = old.call_count, old.gradient_count
        self.no_gradient, self.recomputed = old.no_gradient, old.recomputed
        self.step, self.numbers, self.step_calls = old.step, old.numbers, old.step_calls

    @property
    def name(self) -> str:
        """The path, with a word for the root."""
        return self.path or "(root)"


class LiveCall:
    """One call of a watched module, from its start until its last gradient."""

    __slots__ = (
        "backward_depth",
        "backward_seq",
        "depth",
        "followed",
        "forward",
        "number",
        "parent",
        "pass_number",
        "pending",
        "phase",
        "recorded",
        "seq",
        "settle",
        "start_ns",
        "step",
        "thread",
        "token",
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
        self.followed = False  # its values and gradients are looked at
        self.recorded = False  # it has a row of its own
        self.phase = "forward"
        self.forward: LiveCall | None = None  # of a recomputation: the call that it repeats
        self.token = -1  # of the backward pass that reached this call last
        self.pass_number = -1
        self.backward_seq = -1
        self.backward_depth = 0
        self.pending: dict[tuple[str, str], int] = {}  # gradients expected -> backward pass that brought them last
        self.settle: list[tuple[Any, int | None, Any, Any]] | None = None  # input aliases, until the module has run


def _nothing(*arguments: object) -> None:
    pass


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
        self._tracks_gradients = backend.tracks_gradients
        self._on_step_begin = on_step_begin
        self._on_step_end = on_step_end
        self._stacks: dict[int, list[LiveCall]] = {}
        self._sequence = itertools.count()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._thread_numbers = itertools.count()
        self._home_thread = self.thread()
        self.stale: list[LiveCall] = []  # calls found to have ended past all hooks, for the capture to record
        self._origin_ns = time.perf_counter_ns()
        self._roots_run: set[Watched] = set()
        self._steps_by: str | None = None  # "optimizer", "forward", "user"; None while unknown
        self._calls_in_step = False
        self._ended_by = 0  # id of the optimizer that ended the last step
        self.follows_calls = True  # False while the hooks are off, on steps that are not recorded
        self.step = 0

    @property
    def steps_seen(self) -> int:
        """Number of steps in which something was called."""
        return self.step + self._calls_in_step

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

    # --- calls -----------------------------------------------------------------------------------------------------
    def begin(self, watched: Watched) -> LiveCall:
        """Open a call of ``watched`` in this thread."""
        thread = self.thread()
        stack = self._stacks.get(thread)
        if stack is None:
            stack = self._stacks[thread] = []
        elif stack and watched.is_root:
            self._unwind(stack)
        parent = stack[-1] if stack else None
        step = self._begin_outermost(watched, thread) if parent is None else parent.step
        if parent is not None and not parent.recorded:
            parent = parent.parent
        call = LiveCall(watched, parent, next(self._sequence), step, thread, time.perf_counter_ns() - self._origin_ns)
        if watched.step != step:
            watched.step = step
            watched.step_calls = []
            watched.recomputed = 0
        if self._in_backward() and watched.recomputed < len(watched.step_calls):
            # Checkpointed regions are recomputed last first; within one module the calls come back in that order, too.
            watched.recomputed += 1
            call.phase = "recompute"
            call.forward = watched.step_calls[-watched.recomputed]
            call.number = call.forward.number
        else:
            self._number(call)
            watched.step_calls.append(call)
            watched.call_count += 1
        stack.append(call)
        return call

    def _number(self, call: LiveCall) -> None:
        numbers = call.watched.numbers
        with self._lock:
            last = numbers.get(call.thread)
            if last is None or last[0] != call.step:
                for thread in [thread for thread, (step, _) in numbers.items() if step < call.step]:
                    del numbers[thread]  # threads come and go
                last = call.step, 0
            call.number = last[1]
            numbers[call.thread] = call.step, call.number + 1

    def end(self, watched: Watched) -> LiveCall | None:
        """Close the running call of ``watched``; calls inside it that never ended (a caught exception) go with it."""
        thread = self.thread()
        stack = self._stacks.get(thread)
        if not stack or not any(call.watched is watched for call in reversed(stack)):
            return None  # it never began: a hook before ours has raised
        call = stack.pop()
        while call.watched is not watched:
            self.stale.append(call)
            call = stack.pop()
        if not stack:
            del self._stacks[thread]
        return call

    def _unwind(self, stack: list[LiveCall]) -> None:
        """Forget calls that an interrupt, or another exception that goes past all hooks, has ended."""
        running = {id(module) for module in self._backend.running_modules()[1:]}  # the first is the call that begins
        while stack and id(stack[-1].watched.ref()) not in running:
            self.stale.append(stack.pop())

    def running(self) -> LiveCall | None:
        """Return the innermost running call of this thread."""
        stack = self._stacks.get(self.thread())
        if stack:
            self._unwind(stack)
        return stack[-1] if stack else None

    def abandon(self) -> Iterator[LiveCall]:
        """Yield the calls that are still open, innermost first, and forget them (an interrupt, the session's end)."""
        stale, self.stale = self.stale, []
        yield from stale
        for stack in list(self._stacks.values()):
            while stack:
                yield stack.pop()
        self._stacks.clear()

    def release(self) -> None:
        """Let go of the session, which is over."""
        self._on_step_begin = self._on_step_end = _nothing

    # --- steps -----------------------------------------------------------------------------------------------------
    def _begin_outermost(self, watched: Watched, thread: int) -> int:
        """Decide which step an outermost call belongs to."""
        if self._steps_by == "optimizer" and self.step and not self._calls_in_step and not self._tracks_gradients():
            return self.step - 1  # evaluation between training steps goes with the step that has just ended
        if not watched.is_root or thread != self._home_thread or self._in_backward():
            self._begin_step()
            return self.step
        if watched in self._roots_run:
            if self._steps_by is None:
                model = watched.ref()
                has_optimizer = model is not None and self._backend.has_optimizer(model)
                self._steps_by = "optimizer" if has_optimizer else "forward"
            if self._steps_by == "forward":
                self.end_step()
        self._begin_step()
        self._roots_run.add(watched)
        return self.step

    def _begin_step(self) -> None:
        if not self._calls_in_step:
            self._calls_in_step = True
            self._on_step_begin()

    def optimizer_stepped(self, optimizer: object) -> None:
        """An optimizer has stepped: that ends the step, unless the user ends steps himself."""
        if self._steps_by == "user":
            return
        # Of several optimizers that step together the first ends the step; where calls are not followed, that very one does.
        if self._calls_in_step or (not self.follows_calls and id(optimizer) == self._ended_by):
            self._steps_by = "optimizer"
            self._ended_by = id(optimizer)
            self.end_step()

    def user_stepped(self) -> None:
        """The user says that the step has ended; from now on nobody else does."""
        self._steps_by = "user"
        self.end_step()

    def end_step(self) -> None:
        """Close the step: calls are numbered from 0 again."""
        ended = self.step
        self.step += 1
        self._roots_run.clear()
        self._calls_in_step = False
        self._on_step_end(ended)
