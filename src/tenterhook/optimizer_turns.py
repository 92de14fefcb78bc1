"""Several optimizers: which of them ends a step, and whether they step in turn, as those of a GAN do."""

from __future__ import annotations

import weakref
from collections.abc import Callable

__all__ = ["OptimizerTurns"]

_ONCE_MORE = 3
"""So many changes from one to another are turns; fewer may be one training after another."""


class OptimizerTurns:
    """Knows which optimizer ended the last step, and counts the steps that each has ended.

    ``work`` is, of the time when an optimizer steps, the thread and how much was differentiated in it until then; None where that is
    not known.
    """

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._last = 0
        self._changes = 0
        self._ended_by: Callable[[], object] | None = None  # refers to the optimizer that ended the last step
        self._since: weakref.WeakSet[object] = weakref.WeakSet()  # others that have stepped since then
        self._work: tuple[int, int | None] = 0, None  # when it did

    def is_next(self, optimizer: object, work: tuple[int, int | None]) -> bool:
        """Whether an optimizer has stepped for a step of its own, where the calls before it are not seen.

        Of several optimizers that step together the first ends the step. So that very one does the next time, or whichever comes when
        that one is no more, or steps twice while that one does not, or steps when something new has been differentiated.
        """
        if self._ended_by is None:
            return False
        before = self._ended_by()
        if before is None or before is optimizer or optimizer in self._since:
            return True
        (thread, done), (last_thread, last_done) = work, self._work
        return thread == last_thread and None not in (done, last_done) and done != last_done

    def stepped_beside(self, optimizer: object) -> None:
        """An optimizer has stepped, and ended no step."""
        if self._ended_by is not None:
            self._since.add(optimizer)

    def ended(self, optimizer: object, work: tuple[int, int | None]) -> None:
        """An optimizer has ended a step."""
        which = id(optimizer)
        self._changes += bool(self._last) and which != self._last
        self._last = which
        self._steps[which] = self._steps.get(which, 0) + 1
        self._ended_by = weakref.ref(optimizer)
        self._since.clear()
        self._work = work

    @property
    def counts(self) -> list[int]:
        """How many steps each has ended, in the order in which they came; empty where they do not step in turn."""
        return list(self._steps.values()) if self._changes >= _ONCE_MORE else []
