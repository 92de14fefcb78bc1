"""Several optimizers that step in turn, as those of a GAN do."""

from __future__ import annotations

__all__ = ["OptimizerTurns"]

_ONCE_MORE = 3
"""So many changes from one to another are turns; fewer may be one training after another."""


class OptimizerTurns:
    """Counts the steps that each optimizer has ended."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._last = 0
        self._changes = 0

    def ended(self, optimizer: object) -> None:
        """An optimizer has ended a step."""
        which = id(optimizer)
        self._changes += bool(self._last) and which != self._last
        self._last = which
        self._steps[which] = self._steps.get(which, 0) + 1

    @property
    def counts(self) -> list[int]:
        """How many steps each has ended, in the order in which they came; empty where they do not step in turn."""
        return list(self._steps.values()) if self._changes >= _ONCE_MORE else []
