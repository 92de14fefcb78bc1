"""Recording a script that knows nothing of it: models are met as they are called first."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import wrapt

from tenterhook.active_edits import EditWatch, watching_edits
from tenterhook.backends import FRAMEWORKS, Backend, Detachable
from tenterhook.capture import Capture
from tenterhook.errors import UnsupportedError
from tenterhook.flushing import PACE, Flusher
from tenterhook.hook_schedule import HookSchedule
from tenterhook.inventory import table_of
from tenterhook.op_capture import OpCapture, check_ops
from tenterhook.own_frames import without_own_frames
from tenterhook.recording.environment import now
from tenterhook.recording.resume import Resumed
from tenterhook.recording.writer import DiskSink
from tenterhook.request import PARAMETER_KINDS, check_kinds
from tenterhook.sampling import Sampling
from tenterhook.script_models import ScriptModels
from tenterhook.script_request import ScriptRequest
from tenterhook.session_end import Ending, end_capture, finish_manifest, words_of

__all__ = ["FullStep", "RecordSummary", "ScriptRecorder", "ScriptRequest"]

_DESCRIBED = 64  # models that are named as soon as they are called; a script that makes ever new ones has the rest named at its end


class FullStep(NamedTuple):
    """The step that holds the most calls of one model: how many, its number, and the model's name."""

    calls: int
    step: int
    model: str


@dataclass(slots=True)
class RecordSummary:
    """How a recorded script went.

    Attributes:
        path: the recording's directory.
        modules_selected: number of modules that the selection matched, over all models.
        modules_fired: how many of them were called.
        missing: (path, reason) of what was asked for and not seen.
        calls: number of calls recorded, forward and backward.
        values: number of tensors seen.
        steps: number of steps that the script made.
        steps_recorded: number of those that were looked at.
        fullest: the step that holds the most calls of one model; None where nothing was called.
        optimizer_steps: how many steps each of several optimizers has ended that step in turn; empty for one.
        hook_seconds: time spent in our hooks.
        wall_seconds: time from the first call of a model to the end; from the start where none was called.
        size_bytes: size of the recording on disk.
        error: the exception that ended the script; None where it ended well.
        partial: why something that was asked for is not in it; None when all is.
        lost_rows: rows that were seen and could not be stored.
        nothing_called: whether no module was called at all.
        told: what was changed for the run so that hooks see everything, as sentences.
    """

    path: Path
    modules_selected: int = 0
    modules_fired: int = 0
    missing: list[tuple[str, str]] = field(default_factory=list)
    calls: int = 0
    values: int = 0
    steps: int = 0
    steps_recorded: int = 0
    fullest: FullStep | None = None
    optimizer_steps: list[int] = field(default_factory=list)
    hook_seconds: float = 0.0
    wall_seconds: float = 0.0
    size_bytes: int = 0
    error: str | None = None
    partial: str | None = None
    lost_rows: int = 0
    nothing_called: bool = True
    told: list[str] = field(default_factory=list)


class ScriptRecorder:
    """Records every model that a script calls, from the first call on.

    The frameworks are waited for and never imported. Each outermost module is met at its first call, gets its class's
    name, and hooks on all its modules; a module that turns up later inside a known model gets its own then.

    Args:
        to: directory to write.
        request: what is to be recorded.

    Raises:
        TargetError: ``to`` or the log exists or cannot be written.
        SelectionError: a pattern is malformed.
        TenterhookError: an option has a value that it cannot have.
    """

    def __init__(self, to: str | os.PathLike[str], request: ScriptRequest | None = None) -> None:
        asked = ScriptRequest() if request is None else request
        wanted = check_kinds(asked.kinds, tensors=asked.tensors)
        self._options = asked.options(wanted)
        self._sampling = Sampling(asked.every, asked.steps)
        self._models = ScriptModels(
            asked.select, tensors=asked.tensors, sampling=self._sampling, parameters=bool(wanted & PARAMETER_KINDS)
        )
        self._manifest = asked.manifest(wanted, self._sampling)
        self._log = asked.open_log(self._manifest)
        self._sink = DiskSink(
            Path(to),
            self._manifest,
            rank=self._manifest.rank,
            overwrite=asked.overwrite,
            resume=False if asked.resume is None else asked.resume,
            pace=PACE,
        )
        self._capture: Capture | None = None
        self._schedule: HookSchedule | None = None
        self._backend: Backend | None = None
        self._attachments: list[Detachable] = []
        self._stack = contextlib.ExitStack()
        self._told: list[Sequence[str]] = []
        self._edits = EditWatch(())
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._running = False
        self._began_ns = self._met_ns = 0  # when it was started; when the first model was called
        self._fullest: FullStep | None = None
        self._first_step = self._described = 0  # of this process; models that the manifest on the disk names
        self.tell: Callable[[str], None] | None = None
        """Called with what should be known while the script runs: patterns that match nothing in the models of the first step."""

    @property
    def rank(self) -> int:
        """Which of the processes of the run this one is."""
        return self._manifest.rank

    @property
    def world(self) -> int:
        """How many processes the run has."""
        return self._manifest.world

    # --- the session -----------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Wait for a framework's import, or take the one that is there."""
        self._running = True
        self._began_ns = time.perf_counter_ns()
        self._edits = self._stack.enter_context(watching_edits())
        for framework in FRAMEWORKS:
            if framework in sys.modules:
                self._framework_imported(framework)
            else:
                wrapt.register_post_import_hook(lambda module: self._framework_imported(module.__name__), framework)

    def _framework_imported(self, framework: str) -> None:
        if not self._running or os.getpid() != self._pid:
            return
        backend: Backend = importlib.import_module(FRAMEWORKS[framework]).BACKEND
        # Before the first call: that may be in compiled code already, where it is too late to have it run eager.
        self._told.append(self._stack.enter_context(backend.seeing_everything(None)))
        self._attachments.append(backend.on_any_call(partial(self._models.wants, backend), partial(self._met, backend)))

    def _begin(self, backend: Backend) -> Capture:
        """The first model decides which framework is recorded."""
        self._backend = backend
        self._met_ns = time.perf_counter_ns()
        for name, value in backend.environment().items():
            if name not in ("rank", "world"):  # the folder was named by the launcher's variables, before any framework
                setattr(self._manifest, name, value)
        self._capture = Capture(backend, self._sink, self._options, self._step_began, self._step_ended, self._log)
        self._schedule = HookSchedule(self._capture, self._sampling, lambda: self._models.parameters)
        self._models.schedule = self._schedule
        if self._sink.resumed is not None:
            self._go_on(self._capture, self._schedule, self._sink.resumed)
        if self._log is not None:
            self._log.summary = backend.summary
        stepped = partial(self._capture.guarded, self._capture.tracker.optimizer_stepped)
        self._attachments.append(backend.on_optimizer_step(stepped))
        if self._options.ops:
            self._follow_ops(backend, self._capture)
        self._schedule.settle()
        self._stack.callback(Flusher(self._capture).stop)
        return self._capture

    def _go_on(self, capture: Capture, schedule: HookSchedule, resumed: Resumed) -> None:
        capture.tracker.go_on(resumed.step, resumed.seq, resumed.start_ns)
        schedule.earlier = resumed.steps
        self._models.earlier, self._models.earlier_modules = resumed.calls, resumed.modules
        self._first_step = resumed.step

    def _follow_ops(self, backend: Backend, capture: Capture) -> None:
        try:
            check_ops(backend, "open")
        except UnsupportedError as error:  # the script runs already: the rest is recorded, and this is told
            self._told.append([f"no functional calls: {str(error).splitlines()[0]}"])
            return
        ops = self._models.ops = OpCapture(capture)
        if self._schedule is not None:
            self._schedule.whole = True
        capture.around = ops.around
        self._stack.callback(ops.close)

    def tidy(self, error: BaseException | None) -> None:
        """Take out of the tracebacks of ``error`` and of those behind it what recording has brought into them."""
        seen: set[int] = set()
        waiting = [error]
        while waiting:
            one = waiting.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            trace = one.__traceback__ if self._backend is None else self._backend.bare_traceback(one.__traceback__)
            one.__traceback__ = without_own_frames(trace)
            waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]

    def close(self, error: BaseException | None = None) -> RecordSummary:
        """Take everything off, finish the recording and say how it went. Raises nothing but an interrupt that came meanwhile."""
        self._running = False
        ending = Ending(self._manifest)
        summary = RecordSummary(Path(self._sink.path))
        rows: list[dict[str, Any]] = []
        capture = self._capture

        def take_off() -> None:
            for attachment in self._attachments:
                ending.do(attachment.remove, "hooks could not be taken off", None)
            if capture is not None:
                end_capture(ending, capture, self._models.parameters, error)
            ending.do(self._stack.close, "the session's changes could not be undone", None)

        with ending.at_any_rate(self._sink, take_off):
            if self._log is not None and self._log.failure is not None:
                self._manifest.partial = self._log.failure
            take_off()
            if capture is not None:
                rows = ending.do(lambda: self._models.rows(capture), "the modules could not be listed", rows)
            ending.do(lambda: self._finish(summary, error), "the manifest is not whole", None)
            self._sink.close(self._manifest, table_of(rows))
        if self._log is not None:
            ending.do(self._log.close, "the log could not be closed", None)
        self._sum_up(summary, rows)
        if ending.interrupt is not None:
            raise ending.interrupt
        return summary

    def _finish(self, summary: RecordSummary, error: BaseException | None) -> None:
        manifest = self._manifest
        summary.wall_seconds = (time.perf_counter_ns() - self._began_ns) / 1e9
        manifest.error = words_of(error)
        manifest.edits = self._edits.on(None)
        told = [sentence for told in self._told for sentence in told]
        if self._capture is not None and self._schedule is not None:
            for model in self._models.known:
                told = model.with_fused(told, self._capture.backend)
            finish_manifest(
                manifest,
                self._capture,
                self._models.manifests(manifest.models),
                told,
                began_ns=self._met_ns,
                recorded=self._schedule.recorded,
            )
            self._note_fullest()
            summary.fullest = self._fullest
            summary.steps_recorded = self._schedule.recorded
            summary.calls, summary.values = self._capture.rows.calls_recorded, self._capture.rows.values_recorded
            summary.wall_seconds, summary.hook_seconds = manifest.cost.wall_seconds, manifest.cost.hook_seconds
        else:
            manifest.ended, manifest.told = now(), told
        summary.told = [*manifest.missing_steps, *manifest.told]

    def _sum_up(self, summary: RecordSummary, rows: list[dict[str, Any]]) -> None:
        manifest = self._manifest
        selected = [row for row in rows if row["selected"]]
        summary.nothing_called = not self._models.known
        summary.modules_selected = len(selected)
        summary.modules_fired = sum(1 for row in selected if row["calls"])
        summary.missing = self._models.missing(rows)
        summary.steps = manifest.steps
        summary.optimizer_steps = manifest.optimizer_steps
        summary.error = manifest.error
        summary.partial = manifest.partial or self._sink.failure
        summary.lost_rows = self._sink.lost_rows
        for file in summary.path.rglob("*"):
            with contextlib.suppress(OSError):  # another rank goes on, and its files with it
                summary.size_bytes += file.stat().st_size if file.is_file() else 0

    # --- meeting models --------------------------------------------------------------------------------------------
    def _met(self, backend: Backend, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called that has no hooks of ours: a new model, or a new part of one that is running."""
        if (
            not self._running
            or os.getpid() != self._pid
            or (self._backend is not None and backend is not self._backend)
        ):
            return
        with self._lock:  # threads may meet the first models at once
            capture = self._capture or self._begin(backend)
        capture.guarded(self._models.take_in, capture, module, args, kwargs)
        if self._described < len(self._models.known) <= _DESCRIBED:
            self._described = len(self._models.known)
            self._manifest.models = self._models.manifests(self._manifest.models)
            self._sink.describe(self._manifest)

    # --- steps -----------------------------------------------------------------------------------------------------
    def _step_began(self) -> None:
        self._note_fullest()
        if self._schedule is not None:
            self._schedule.step_began()

    def _step_ended(self, step: int) -> None:
        if self._schedule is None:
            return
        for model in self._models.known:
            root = model.ref()
            if step == self._first_step and root is not None:
                model.weights.look(root)  # gradients are cleared next
        if step == self._first_step and self.tell is not None:
            for pattern, why in self._models.unmatched():
                self.tell(f"{pattern} {why}")
        self._models.forget_gone()
        self._schedule.step_ended(step)

    def _note_fullest(self) -> None:
        """Note the step with the most calls of one model; before the next step begins, since what runs in between belongs to it."""
        for model in self._models.known:
            calls, step = model.calls_in_step
            if self._fullest is None or calls > self._fullest.calls:
                self._fullest = FullStep(calls, step, model.name)
