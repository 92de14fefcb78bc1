"""Parameters, their gradients and their updates, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tenterhook.backends import Detachable
from tenterhook.capture import Capture
from tenterhook.tracker import Watched

__all__ = ["ParameterWatch"]


class ParameterWatch:
    """Follows the parameters of the watched modules: kinds ``param``, ``param_grad`` and ``update``.

    A parameter is looked at as the step's first forward finds it; its update is what the optimizer made of it by the
    step's end. Updates need a copy of every watched parameter for the length of a step.
    """

    def __init__(self, capture: Capture, model: Any, watched: Sequence[Watched]) -> None:
        self._capture = capture
        kinds = capture.options.kinds
        self._wants_value, self._wants_gradient, self._wants_update = (
            kind in kinds for kind in ("param", "param_grad", "update")
        )
        by_path = {one.path: one for one in watched if one.wanted}
        self._parameters = [
            (by_path[entry.path], entry.name.rpartition(".")[2], entry.parameter)
            for entry in capture.backend.parameters(model)
            if entry.path in by_path
        ]
        self._taps: list[Detachable] = []
        self._before: list[Any] | None = None

    def step_begins(self) -> None:
        """A step that is recorded is about to begin."""
        if self._wants_gradient and not self._taps:
            for watched, name, parameter in self._parameters:
                tap = self._capture.backend.tap_parameter(parameter, partial(self._gradient, watched, name))
                if not isinstance(tap, str):
                    self._taps.append(tap)
        if not (self._wants_value or self._wants_update):
            return
        with self._capture.backend.untracked():
            if self._wants_value:
                for watched, name, parameter in self._parameters:
                    self._capture.parameter_value(watched, "param", name, parameter, self._capture.tracker.step)
            if self._wants_update:
                self._before = [self._capture.backend.keep(parameter) for _, _, parameter in self._parameters]

    def _gradient(self, watched: Watched, name: str, gradient: Any) -> None:
        if self._capture.active and not self._capture.closed:
            self._capture.parameter_value(watched, "param_grad", name, gradient, self._capture.tracker.step)

    def step_ended(self, step: int) -> None:
        """A step has ended; what changed since it began is its update."""
        before, self._before = self._before, None
        if before is None:
            return
        with self._capture.backend.untracked():
            for (watched, name, parameter), old in zip(self._parameters, before, strict=True):
                update = self._capture.backend.keep(parameter) - old
                self._capture.parameter_value(watched, "update", name, update, step)

    def pause(self) -> None:
        """Take the taps off until the next step that is recorded."""
        for tap in self._taps:
            tap.remove()
        self._taps.clear()

    def close(self) -> None:
        """Take everything off; an unfinished step has no update."""
        self.pause()
        self._before = None
        self._parameters = []
