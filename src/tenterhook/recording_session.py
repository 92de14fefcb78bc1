"""One model's recording while it is made: hooks on at its start, off at its end, whatever happens."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tenterhook.active_edits import EditWatch, watching_edits
from tenterhook.capture import Capture
from tenterhook.flushing import Flusher, lasts_in_children
from tenterhook.hook_schedule import HookSchedule
from tenterhook.inventory import list_added, model_manifest, modules_rows, table_of, watch_model, with_fused
from tenterhook.op_capture import OpCapture
from tenterhook.parameters import ParameterWatch
from tenterhook.reasons import WeightUse
from tenterhook.recording.environment import now
from tenterhook.recording.manifest import Manifest
from tenterhook.recording.memory import MemorySink
from tenterhook.recording.resume import Resumed
from tenterhook.recording.writer import DiskSink
from tenterhook.request import PARAMETER_KINDS, Request
from tenterhook.selection import resolve
from tenterhook.session_end import Ending, end_capture, finish_manifest, words_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["RecordingSession"]


class RecordingSession:
    """The hooks on a model, what they gather, and the place that it goes to. It keeps no model alive.

    Args:
        model: to be recorded from now on.
        name: the model's name in the recording.
        request: how.

    Raises:
        TargetError: the place to write to exists already, or cannot be written.
    """

    def __init__(self, model: Any, name: str, request: Request) -> None:
        self.closed = False
        self._model_ref: Callable[[], Any] = weakref.ref(model)
        self._backend = backend = request.backend
        self._manifest: Manifest = request.manifest
        self._sampling = request.sampling
        self._name = name
        self._select = request.select
        self._modules_known: object = None
        self._first_step = 0  # of this process
        self._parameters: list[ParameterWatch] = []
        self._ops: OpCapture | None = None
        self._watched = watch_model(
            backend, model, self._name, request.select, request.tensors, keep_fused=request.fused == "keep"
        )
        self._described = model_manifest(model, self._name, self._watched)
        self._weights = WeightUse(backend, model)
        # asked before the session switches it off
        self._blind = backend.blind_spots(model)
        self._fused = backend.fused(model) if request.fused != "keep" else ()
        sink: MemorySink | DiskSink | None = None
        with contextlib.ExitStack() as stack:
            self._edits: EditWatch = stack.enter_context(watching_edits())
            self.told: Sequence[str] = stack.enter_context(
                backend.seeing_everything(model if request.fused != "keep" else None)
            )
            # Made last, so that what cannot be recorded leaves nothing behind.
            self._manifest.started = now()
            self._manifest.models = [self._described]
            self.sink = sink = request.destination.open(self._manifest)
            try:
                self.capture = Capture(backend, sink, request.options, self._step_began, self._step_ended)
                self._follow(model, request)
                self._begun_ns = time.perf_counter_ns()
                self._put_on(stack)
            except BaseException:
                stack.close()
                sink.abandon()
                raise
            self._stack = stack.pop_all()

    def _follow(self, model: Any, request: Request) -> None:
        """Get ready to follow the model's calls, its functional calls and its parameters."""
        options = request.options
        capture = self.capture
        capture.watched = self._watched
        if options.ops:
            self._ops = OpCapture(capture, implementation=options.ops == "all")
            capture.around = self._ops.around
        if options.kinds & PARAMETER_KINDS:
            self._parameters.append(ParameterWatch(capture, model, self._watched))
        self.schedule = HookSchedule(
            capture, self._sampling, lambda: self._parameters, whole=self._ops is not None, rests=True
        )
        if isinstance(self.sink, DiskSink) and self.sink.resumed is not None:
            self._go_on(self.sink.resumed)
        if self._sampling.by_pattern:
            self._set_rates(model)

    def _put_on(self, stack: contextlib.ExitStack) -> None:
        capture = self.capture
        stepped = partial(capture.guarded, capture.tracker.optimizer_stepped)
        stack.callback(self._backend.on_optimizer_step(stepped).remove)
        stack.callback(capture.detach)
        if self._ops is not None:
            stack.callback(self._ops.close)
        self.schedule.settle()
        if isinstance(self.sink, DiskSink):
            stack.callback(Flusher(capture).stop)
        else:
            lasts_in_children(capture)
            self.sink.before_read = self.hand_over

    def _go_on(self, resumed: Resumed) -> None:
        self.capture.tracker.go_on(resumed.step, resumed.seq, resumed.start_ns)
        self.schedule.earlier = resumed.steps
        self._first_step = resumed.step
        for one in self._watched:
            one.call_count = one.recorded_count = resumed.calls[one.model, one.path, "forward"]
            one.gradient_count = resumed.calls[one.model, one.path, "backward"]

    def _set_rates(self, model: Any) -> None:
        entries = self._backend.entries(model)
        by_path = {watched.path: watched for watched in self._watched}
        for pattern, every in self._sampling.rates.items():
            for entry in resolve(pattern, entries, require_callable=True):
                by_path[entry.path].every = every
        self._sampling.use(watched.every for watched in self._watched if watched.wanted)

    # --- while it runs ---------------------------------------------------------------------------------------------
    @property
    def model(self) -> Any:
        """The model, None once it is gone."""
        return self._model_ref()

    @property
    def error(self) -> str | None:
        """What ended the session; None where it ended well, or still runs."""
        return self._manifest.error

    def _step_began(self) -> None:
        self.schedule.step_began()

    def _step_ended(self, step: int) -> None:
        model = self.model
        if step == self._first_step and model is not None:
            self._weights.look(model)  # gradients are cleared next
        self._manifest.steps = step + 1
        self.schedule.step_ended(step)

    def hand_over(self) -> None:
        """Give to the sink what has been gathered so far, so that it can be read."""
        if self.closed:
            return
        self.capture.rows.flush()
        if isinstance(self.sink, DiskSink):
            self.sink.flush()
            return
        capture = self.capture
        known = (capture.tracker.step, capture.rows.calls_recorded, capture.rows.values_recorded)
        if known != self._modules_known:
            self._modules_known = known
            self.sink.write_modules(self._modules())

    # --- the end ---------------------------------------------------------------------------------------------------
    def close(self, error: BaseException | None = None) -> None:
        """Take all hooks off and finish the recording. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        ending = Ending(self._manifest)

        def take_off() -> None:
            end_capture(ending, self.capture, self._parameters, error)
            ending.do(self._stack.close, "the session's changes could not be undone", None)

        with ending.at_any_rate(self.sink, take_off):
            self._manifest.error = words_of(error)
            take_off()
            modules = ending.do(self._modules, "the modules could not be listed", table_of([]))
            ending.do(self._finish_manifest, "the manifest is not whole", None)
            self.sink.close(self._manifest, modules)
        if isinstance(self.sink, MemorySink):
            self.sink.before_read = None
        if ending.interrupt is not None:
            raise ending.interrupt
        if ending.fault is not None and self.capture.options.on_error == "raise" and error is None:
            raise ending.fault

    def _modules(self) -> pa.Table:
        return table_of(self._module_rows())

    def _module_rows(self) -> list[dict[str, Any]]:
        model = self.model
        added = list_added(self._backend, model, self._name, self._select, self._watched) if model is not None else ()
        return modules_rows(
            self._backend, model, self._watched, self.capture, self._weights, blind=self._blind, added=added
        )

    def _finish_manifest(self) -> None:
        if self.model is not None:
            self._described = model_manifest(self.model, self._name, self._watched)
        self.told = with_fused(self.told, self._watched, self._fused, evaluated=False)
        finish_manifest(
            self._manifest,
            self.capture,
            [self._described],
            self.told,
            began_ns=self._begun_ns,
            recorded=self.schedule.recorded,
        )
        self._manifest.edits = self._edits.on(one.ref for one in self._watched)

    def step(self) -> None:
        """The user says that a step has ended."""
        self.capture.guarded(self.capture.tracker.user_stepped)
