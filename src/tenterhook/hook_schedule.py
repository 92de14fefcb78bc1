"""On which steps the hooks of a recording are on: off between samples, and while it is paused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from tenterhook.attaching import release
from tenterhook.calls import Watched
from tenterhook.capture import Capture
from tenterhook.parameters import ParameterWatch
from tenterhook.sampling import Sampling

__all__ = ["HookSchedule"]


_MOST_PLANS = 64


class _Plan(NamedTuple):
    kinds: list[tuple[list[Watched], bool, bool]]  # modules, whether they need hooks, whether they are recorded
    sees_all: bool


class HookSchedule:
    """Has the hooks on for the steps that are recorded, and off for the others.

    Evaluation between training steps belongs to the step that has just ended and is recorded where that is. So between
    two steps what either needs is on, until the first call of the coming step tells that it has begun.

    Args:
        capture: attaches and detaches; knows the modules.
        sampling: which steps are recorded.
        parameters: gives what follows parameters and their gradients.
        whole: have hooks on all modules, wanted or not: a functional call's module has to be known.
        rests: nobody else has anything to do at the end of a step that is not recorded, but to count it.

    Attributes:
        whole: hooks are on all modules.
        earlier: number of steps that were recorded before the present one.
    """

    def __init__(
        self,
        capture: Capture,
        sampling: Sampling,
        parameters: Callable[[], Iterable[ParameterWatch]],
        *,
        whole: bool = False,
        rests: bool = False,
    ) -> None:
        self._capture = capture
        capture.tracker.is_due = lambda watched, step: self._wants(step) and self._is_due(watched, step)
        self._sampling = sampling
        self._parameters = parameters
        self.whole = whole
        self._rests = rests
        self._steps: tuple[int, ...] = (0,)
        self._wanted: list[int] = []  # those of them that are recorded
        self._paused = False
        self._between = False
        # Of a list, so long: modules by kind.
        self._grouped: tuple[list[Watched], int, list[list[Watched]]] | None = None
        self._plans: dict[object, _Plan] = {}  # for those kinds, by what they follow from: few come again and again
        self._state: tuple[object, ...] | None = None  # what the hooks that are on now follow from
        self._rates: tuple[frozenset[int], frozenset[int]] = frozenset(), frozenset()  # recorded now; with hooks on
        self._rows = 0  # that there were when the step began
        self.earlier = 0

    # --- steps -----------------------------------------------------------------------------------------------------
    def step_began(self) -> None:
        """The first call of a step is about to begin."""
        if self._between:
            self.settle()
        self._rows = self._capture.rows_recorded
        if self._capture.active:
            for parameters in self._parameters():
                parameters.step_begins()

    def step_ended(self, step: int) -> None:
        """A step has ended."""
        for parameters in self._parameters():
            parameters.step_ended(step)
        rows = self._capture.rows_recorded
        self.earlier += rows > self._rows
        self._rows = rows
        self._have_on()

    def pause(self) -> None:
        """Take the hooks off until :meth:`resume`."""
        self._paused = True
        self._have_on()

    def resume(self) -> None:
        """Have them on again, on steps that are recorded."""
        self._paused = False
        self._have_on()

    def settle(self) -> None:
        """Have on what the present step needs, and nothing else."""
        self._between = False
        self._put_on(self._capture.tracker.step)

    def _have_on(self) -> None:
        """Have on what may be called next, which between two steps may be either's."""
        tracker = self._capture.tracker
        if self._sampling.always or not tracker.evaluation_goes_back or tracker.has_begun:
            self.settle()
        else:
            self._between = True
            self._put_on(tracker.step - 1, tracker.step)

    @property
    def recorded(self) -> int:
        """Number of steps of which something has been recorded."""
        running = self._capture.tracker.has_begun and self._capture.rows_recorded > self._rows
        return self.earlier + running

    # --- hooks -----------------------------------------------------------------------------------------------------
    def _wants(self, step: int) -> bool:
        return not self._paused and self._sampling.wants(step)

    def _put_on(self, *steps: int) -> None:
        """Have on what any of the steps needs; what is recorded for the time being is the first of them.

        Most steps need what the one before has needed: then no module is looked at.
        """
        self._capture.tracker.wake()
        self._steps = steps
        self._capture.tracker.due_step = -1 if self._sampling.always else steps[0]
        self._wanted = [step for step in steps if self._wants(step)]
        self._capture.active = bool(self._wanted)
        tracker, first = self._capture.tracker, steps[0] in self._wanted
        state = (bool(self._wanted), first, self._paused, tracker.needs_root, tracker.root_has_run, self.whole)
        rates = self._rates
        if self._sampling.by_pattern:
            fits = self._sampling.fits
            rates = fits(steps[0]) if first else frozenset(), frozenset().union(*map(fits, self._wanted))
        if state != self._state:
            self._visit(self._plan(state, rates))
        elif rates != self._rates:
            self._visit(self._plan(state, rates), (rates[0] ^ self._rates[0]) | (rates[1] ^ self._rates[1]))
        self._state, self._rates = state, rates
        rests = self._rests and tracker.root_has_run and tracker.needs_root and not (self._wanted or self._paused)
        tracker.rests_until = self._sampling.earliest(tracker.step) if rests else 0

    def _kinds(self) -> list[list[Watched]]:
        """Return the modules, those together of which the same holds on each step; looked up anew where there are others."""
        watched = self._capture.watched
        if self._grouped is None or self._grouped[0] is not watched or self._grouped[1] != len(watched):
            kinds: dict[tuple[object, ...], list[Watched]] = {}
            for one in watched:
                kinds.setdefault((one.wanted, one.is_root, one.every), []).append(one)
            self._grouped = watched, len(watched), list(kinds.values())
            self._plans.clear()
        return self._grouped[2]

    def _plan(self, *follows_from: object) -> _Plan:
        """Return which kinds need hooks, as it follows from the state and the rates."""
        kinds = self._kinds()
        plan = self._plans.get(follows_from)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            needs = [(self._needs_hooks(kind[0]), kind) for kind in kinds]
            needs.sort(key=lambda one: one[0])  # what comes off first
            sees_all = all(self._is_needed(kind[0]) for kind in kinds if kind[0].wanted)
            plan = self._plans[follows_from] = _Plan([(kind, on, kind[0].due) for on, kind in needs], sees_all)
        return plan

    def _visit(self, plan: _Plan, changed: Collection[int] | None = None) -> None:
        """Have on what a plan says: of all modules, or of those only whose rates have changed."""
        capture = self._capture
        for kind, on, due in plan.kinds:
            if changed is None or kind[0].every in changed:
                switch = capture.attach_all if on else capture.release_all
                switch(kind, due=due)
        capture.tracker.sees_all = plan.sees_all
        capture.tracker.hooks_came_off()
        for parameters in self._parameters():
            if self._wanted:
                parameters.resume()
            else:
                parameters.pause()

    def again(self) -> None:
        """The rates have changed."""
        self._state = self._grouped = None
        self._put_on(*(self._steps if self._between else (self._capture.tracker.step,)))

    def meet(self, watched: Watched) -> None:
        """Have hooks on a module that is new, or none, as the present step needs it."""
        tracker = self._capture.tracker
        tracker.sees_all = tracker.sees_all and (not watched.wanted or self._is_needed(watched))
        if self._needs_hooks(watched):
            self._capture.attach(watched)
        else:
            release(watched, rest=True)

    def _needs_hooks(self, watched: Watched) -> bool:
        """Whether a module is to have hooks now; tells it whether it is recorded on the present step."""
        tracker = self._capture.tracker
        watched.due = self._steps[0] in self._wanted and self._is_due(watched, self._steps[0])
        if self._is_needed(watched) or (self._wanted and (watched.is_root or self.whole)):
            return True
        # Until it is known what ends a step, what runs on those that are not recorded is followed; that is the root, mostly.
        follows = not self._paused and tracker.needs_root
        return follows and (watched.is_root or (watched.wanted and not tracker.root_has_run))

    def _is_needed(self, watched: Watched) -> bool:
        return watched.wanted and any(self._is_due(watched, step) for step in self._wanted)

    def _is_due(self, watched: Watched, step: int) -> bool:
        return step % watched.every == 0 or not self._sampling.by_pattern

    def forget_gone(self) -> None:
        """Let go of modules that are no more."""
        self._capture.watched = [one for one in self._capture.watched if one.ref() is not None]
        self._state = None  # what is gone may have been all that was not seen
