"""Parameters, their gradients and their updates, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tenterhook.backends import Backend, Detachable
from tenterhook.calls import Watched
from tenterhook.capture import Capture

__all__ = ["LateTap", "ParameterWatch", "tap_parameter"]


class LateTap:
    """A tap on a parameter that has no shape yet (of a lazy module): put on in the first call that gives it one.

    Args:
        backend: the framework.
        module: the module that owns the parameter.
        parameter: the parameter, which stays the same object.
        tap: puts the tap on.
    """

    def __init__(self, backend: Backend, module: Any, parameter: Any, tap: Callable[[], Detachable | str]) -> None:
        self._backend = backend
        self._parameter = parameter
        self._tap = tap
        self._on: Detachable | None = backend.attach(module, self._before, None)

    @property
    def live(self) -> bool:
        """Whether the tap, or what waits to put it on, is in place."""
        return self._on is not None and self._on.live

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._on is None or not self._backend.numel(self._parameter):
            return
        self._on.remove()
        tap = self._tap()
        self._on = None if isinstance(tap, str) else tap

    def remove(self) -> None:
        """Take it off. A second call does nothing."""
        if self._on is not None:
            self._on.remove()
            self._on = None


def tap_parameter(
    backend: Backend,
    module: Any,
    parameter: Any,
    fn: Callable[[Any], Any],
    *,
    accumulated: bool = False,
    edits: bool = False,
    looks_at: Sequence[Any] | None = None,
) -> Detachable | str:
    """Call ``fn(gradient)`` once a backward pass, also for a parameter that gets its shape only at the first call.

    ``looks_at`` are the modules that use it, ``module`` by default: where nobody else follows their calls, that is done here,
    since some of these may lie in checkpointed regions.

    Returns:
        the tap, or the reason why no gradient can come.
    """
    put = partial(backend.tap_parameter, parameter, fn, accumulated=accumulated, edits=edits)
    tap = put() if backend.numel(parameter) else LateTap(backend, module, parameter, put)
    users = [one for one in ((module,) if looks_at is None else looks_at) if one is not None]
    return tap if isinstance(tap, str) or not users else _Watched(backend, users, tap, getattr(fn, "site", None))


class _Watched:
    """A tap on a parameter, with a look at the calls of its modules: some of them may lie in a region differentiated by itself.

    The backend has to know of such regions before the first gradient comes, since it then comes in parts.
    """

    def __init__(self, backend: Backend, modules: Sequence[Any], tap: Detachable, site: object) -> None:
        self._backend = backend
        self._tap = tap
        self.site = site  # by which th.installed_hooks knows whose this is
        self._calls = [backend.attach(module, self._before, None) for module in modules]

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._backend.tracks_gradients():
            self._backend.regions()

    @property
    def live(self) -> bool:
        """Whether the tap is in place."""
        return self._tap.live

    def remove(self) -> None:
        """Take both off. A second call does nothing."""
        self._tap.remove()
        for calls in self._calls:
            calls.remove()


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
        if self._wants_gradient:
            for one, name, _ in self._parameters:
                one.ungraded[name] = "no backward pass reached it"
        self._taps: list[Detachable] = []
        self._before: list[tuple[Watched, str, Any, Any]] | None = None
        self._step = -1  # that has been begun

    def step_begins(self) -> None:
        """A step that is recorded is about to begin; more than once for a model that is met at a step's start."""
        if self._step == self._capture.tracker.step:
            return
        self._step = self._capture.tracker.step
        self.resume()
        if not (self._wants_value or self._wants_update):
            return
        with self._capture.backend.untracked():
            if self._wants_value:
                for watched, name, parameter in self._shaped():
                    self._capture.rows.parameter_value(watched, "param", name, parameter, self._capture.tracker.step)
            if self._wants_update:
                self._before = [(*one, self._capture.backend.keep(one[2])) for one in self._shaped()]

    def resume(self) -> None:
        """Put the taps on gradients on, where they are not."""
        if self._wants_gradient and not self._taps:
            for watched, name, parameter in self._parameters:
                module = watched.ref()
                if module is None:
                    continue
                tap = tap_parameter(
                    self._capture.backend,
                    module,
                    parameter,
                    partial(self._capture.guarded, self._gradient, watched, name),
                    looks_at=(),
                )
                if isinstance(tap, str):
                    watched.ungraded[name] = tap
                else:
                    self._taps.append(tap)

    def _shaped(self) -> list[tuple[Watched, str, Any]]:
        """All parameters of this step's modules but those of lazy ones that have not run yet."""
        return [one for one in self._parameters if one[0].due and self._capture.backend.numel(one[2])]

    def _gradient(self, watched: Watched, name: str, gradient: Any) -> None:
        capture = self._capture
        if not (capture.active and watched.due):
            return
        watched.ungraded.pop(name, None)
        # Each checkpointed region with reentry is differentiated by itself: what it adds to a shared parameter is a part only.
        running = capture.tracker.passes.current() if capture.tracker.reenters else None
        if running is None:
            capture.rows.parameter_value(watched, "param_grad", name, gradient, capture.tracker.step)
            return
        key = (self, watched, name)
        with capture.backend.untracked():
            known = running.sums.get(key)
            running.sums[key] = gradient if known is None else known + gradient
        if known is None:
            running.at_end.append(
                lambda: capture.guarded(
                    capture.rows.parameter_value,
                    watched,
                    "param_grad",
                    name,
                    running.sums.pop(key),
                    capture.tracker.step,
                )
            )

    def step_ended(self, step: int) -> None:
        """A step has ended; what changed since it began is its update."""
        before, self._before = self._before, None
        if before is None:
            return
        with self._capture.backend.untracked():
            for watched, name, parameter, old in before:
                update = self._capture.backend.difference(parameter, old)
                self._capture.rows.parameter_value(watched, "update", name, update, step)

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
