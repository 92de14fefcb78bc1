"""Where the steps of a session end: at an optimizer's step, at the root's next forward without one, or where the user says."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tenterhook.backends import Backend
from tenterhook.calls import Watched
from tenterhook.optimizer_turns import OptimizerTurns

__all__ = ["StepCount", "never_due"]


def never_due(watched: Watched, step: int) -> bool:
    """Say that a module is recorded on no other step."""
    return False


class StepCount:
    """Counts the steps of one session.

    Args:
        backend: the framework.
        on_step_begin: called before the first call of a step.
        on_step_end: called with the number of the step that has ended.

    Attributes:
        turns: of optimizers that step one after the other.
        sees_all: every wanted module has its hooks, so that a step without a call is none.
        root_has_run: a root has been called.
        is_due: says whether a module is recorded on another step.
        rests_until: before this step nothing is recorded, nor anything else done at a step's end.
    """

    def __init__(self, backend: Backend, on_step_begin: Callable[[], None], on_step_end: Callable[[int], None]) -> None:
        self._backend = backend
        self._in_backward = backend.in_backward
        self._tracks_gradients = backend.tracks_gradients
        self._on_step_begin = on_step_begin
        self._on_step_end = on_step_end
        self._engine: Any = None
        self._steps_lock = threading.RLock()
        self._local = threading.local()
        self._thread_numbers = itertools.count()
        self._home_thread = self.thread()
        self._leader: weakref.ref[threading.Thread] | None = None  # whose forwards of the root end steps
        self._roots_run: set[Watched] = set()
        self._steps_by: str | None = None  # "optimizer", "forward", "user"; None while unknown
        self._calls_in_step = False
        self._step = 0  # where no engine counts
        self._due_step = -1
        self.is_due: Callable[[Watched, int], bool] = never_due
        self.turns = OptimizerTurns()
        self.sees_all = True
        self.root_has_run = False
        self.rests_until = 0

    def thread(self) -> int:
        """Return this thread's number: 0 where the session began; not its identifier, which the next thread may get again."""
        try:
            return self._local.number
        except AttributeError:
            self._local.number = number = next(self._thread_numbers)
            return number

    @property
    def step(self) -> int:
        """Number of the present step."""
        return self._step if self._engine is None else self._engine.step

    @step.setter
    def step(self, value: int) -> None:
        if self._engine is None:
            self._step = value
        else:
            self._engine.step = value

    @property
    def due_step(self) -> int:
        """The step that ``due`` of the watched modules speaks of; -1 for any."""
        return self._due_step

    @due_step.setter
    def due_step(self, value: int) -> None:
        self._due_step = value
        if self._engine is not None:
            self._engine.due_step = value

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

    def wake(self) -> None:
        """Have nobody count steps but :meth:`_step_of`, until the root runs the next time."""
        if self._engine is not None:
            self._engine.wake()

    def _rest(self, root: Watched, thread: int) -> None:
        """Have the native path count the steps that this thread's calls of the root end, as long as nothing else is to be done."""
        # An optimizer may have been found just now: it ends steps from here on.
        if self._engine is None or not self.needs_root:
            return
        if self.step + 1 < self.rests_until and len(self._roots_run) == 1:
            self._engine.rest(root, self.rests_until, thread, self._steps_by == "forward")

    def _step_of(self, watched: Watched, thread: int) -> int:
        self.wake()
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
        self._rest(watched, thread)
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
            self.wake()
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
            self.wake()
            self._steps_by = "user"
            self.end_step()

    def end_step(self) -> None:
        """Close the step: calls are numbered from 0 again."""
        ended = self.step
        self._calls_in_step = False  # before the number, for who looks from another thread
        self.step += 1
        self._roots_run.clear()
        self._on_step_end(ended)
