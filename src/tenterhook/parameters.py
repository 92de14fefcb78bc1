"""Parameters, their gradients and their updates, step by step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tenterhook.backends import Backend, Detachable, ParameterBackend, ParameterEntry
from tenterhook.calls import Watched
from tenterhook.capture import Capture

__all__ = ["LateTap", "ParameterWatch", "tap_parameter"]

_FROZEN = "requires_grad=False"


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
    return (
        tap
        if isinstance(tap, str) or not users or not backend.reenters
        else _Watched(backend, users, tap, getattr(fn, "site", None))
    )


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


class _Followed:
    """One parameter, under the name by which its module has it now."""

    __slots__ = ("name", "parameter", "tap", "watched")

    def __init__(self, watched: Watched, name: str, parameter: Any) -> None:
        self.watched = watched
        self.name = name
        self.parameter: Callable[[], Any] = weakref.ref(parameter)  # one that is replaced must not be kept
        self.tap: Detachable | None = None

    def release(self) -> None:
        if self.tap is not None:
            self.tap.remove()
            self.tap = None


class ParameterWatch:
    """Follows the parameters of the watched modules: kinds ``param``, ``param_grad`` and ``update``.

    A parameter is looked at as the step's first forward finds it; its update is what the optimizer made of it by the
    step's end. Updates need a copy of every watched parameter for the length of a step. Which parameters there are is
    looked up at each step that is recorded: they are replaced, frozen, pruned and merged while a model is trained.
    """

    def __init__(self, capture: Capture, model: Any, watched: Sequence[Watched]) -> None:
        self._capture = capture
        self._model: Callable[[], Any] = weakref.ref(model)
        kinds = capture.options.kinds
        self._wants_value, self._wants_gradient, self._wants_update = (
            kind in kinds for kind in ("param", "param_grad", "update")
        )
        self._by_path = {one.path: one for one in watched if one.wanted}
        self._followed: dict[tuple[str, str], _Followed] = {}
        self._before: list[tuple[_Followed, Any, object]] | None = None
        self._backend = capture.backend if isinstance(capture.backend, ParameterBackend) else None
        self._had: object = None  # modules and parameters, when they were looked at last
        self._step = -1  # that has been begun
        self._look()

    def _look(self) -> None:
        """Find the parameters that the modules have now."""
        model = self._model()
        if self._backend is not None and model is not None:
            had, self._had = self._had, self._backend.same_parameters(model, self._had)
            if had is not None and had is self._had:
                return
        present: dict[tuple[str, str], _Followed] = {}
        for entry in self._capture.backend.parameters(model) if model is not None else ():
            watched, name = self._place(entry)
            if watched is None:
                continue
            known = self._followed.pop((watched.path, name), None)
            if known is None or known.parameter() is not entry.parameter:
                if known is not None:
                    known.release()
                elif self._wants_gradient:
                    watched.ungraded[name] = "no backward pass reached it"
                known = _Followed(watched, name, entry.parameter)
            present[watched.path, name] = known
        for gone in self._followed.values():
            gone.release()
            gone.watched.ungraded.pop(gone.name, None)
        self._followed = present

    def _place(self, entry: ParameterEntry) -> tuple[Watched | None, str]:
        """Find where a parameter is recorded: with its first module, or else with the first selected one that has it, too."""
        for full in (entry.name, *entry.aliases):
            path, _, name = full.rpartition(".")
            if (watched := self._by_path.get(path)) is not None:
                return watched, name
        return None, ""

    def step_begins(self) -> None:
        """A step that is recorded is about to begin; more than once for a model that is met at a step's start."""
        if self._step == self._capture.tracker.step:
            return
        self._step = self._capture.tracker.step
        self._look()
        self.resume()
        if not (self._wants_value or self._wants_update):
            return
        backend = self._capture.backend
        shaped = self._shaped()
        with backend.untraced() or contextlib.nullcontext(), backend.untracked():
            if self._wants_value:
                for one, parameter in shaped:
                    self._capture.rows.parameter_value(one.watched, "param", one.name, parameter, self._step)
            if self._wants_update:
                # A copy of what is spread over ranks is the part that is here: the whole's shape is kept beside it.
                self._before = [
                    (one, backend.snapshot(parameter), backend.summary(parameter)[0]) for one, parameter in shaped
                ]

    def resume(self) -> None:
        """Put the taps on gradients on, where they are not."""
        for one in self._followed.values() if self._wants_gradient else ():
            module, parameter = one.watched.ref(), one.parameter()
            if one.tap is not None or parameter is None:
                continue
            if module is None and not self._capture.backend.numel(parameter):
                continue  # a lazy module's, in the place of one that is gone
            tap = tap_parameter(
                self._capture.backend,
                module,
                parameter,
                partial(self._capture.guarded, self._gradient, one.watched, one.name),
                looks_at=(),
            )
            if isinstance(tap, str):
                one.watched.ungraded[one.name] = tap
            else:
                one.tap = tap
                if one.watched.ungraded.get(one.name) == _FROZEN:
                    one.watched.ungraded[one.name] = "no backward pass reached it"

    def _shaped(self) -> list[tuple[_Followed, Any]]:
        """All parameters of this step's modules but those of lazy ones that have not run yet."""
        due = [(one, one.parameter()) for one in self._followed.values() if one.watched.due]
        return [
            (one, parameter)
            for one, parameter in due
            if parameter is not None and self._capture.backend.numel(parameter)
        ]

    def _gradient(self, watched: Watched, name: str, gradient: Any) -> None:
        capture = self._capture
        if not (capture.active and watched.due):
            return
        watched.ungraded.pop(name, None)
        capture.rows.parameter_value(watched, "param_grad", name, gradient, capture.tracker.step)

    def step_ended(self, step: int) -> None:
        """A step has ended; what changed since it began is its update."""
        before, self._before = self._before, None
        if before is None:
            return
        backend, rows = self._capture.backend, self._capture.rows
        self._look()
        with backend.untracked():
            for one, old, shape in before:
                parameter = one.parameter()
                if parameter is None or self._followed.get((one.watched.path, one.name)) is not one:
                    why = "the parameter was replaced during the step"
                elif backend.summary(parameter)[0] != shape:
                    why = "the parameter got another shape during the step"
                else:
                    rows.parameter_value(one.watched, "update", one.name, backend.difference(parameter, old), step)
                    continue
                rows.missing_parameter(one.watched, "update", one.name, step, why)

    def pause(self) -> None:
        """Take the taps off until the next step that is recorded."""
        for one in self._followed.values():
            one.release()

    def close(self) -> None:
        """Take everything off; an unfinished step has no update."""
        self.pause()
        self._before = None
        self._followed = {}
