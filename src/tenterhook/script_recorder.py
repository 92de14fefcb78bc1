"""Recording a script that knows nothing of it: models are met as they are called first."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import wrapt

from tenterhook.backends import FRAMEWORKS, Backend, Detachable
from tenterhook.calls import Watched
from tenterhook.capture import Capture
from tenterhook.event_log import EventLog
from tenterhook.flushing import INTERVAL, Flusher
from tenterhook.hook_schedule import HookSchedule
from tenterhook.inventory import model_manifest, modules_rows, table_of, unmatched, watch_model
from tenterhook.parameters import ParameterWatch
from tenterhook.reasons import WeightUse
from tenterhook.recording.environment import now, start_manifest
from tenterhook.recording.writer import DiskSink
from tenterhook.request import PARAMETER_KINDS, capture_options, check_kinds
from tenterhook.sampling import Sampling
from tenterhook.session_end import end_capture, finish_manifest, words_of

__all__ = ["RecordSummary", "ScriptRecorder"]


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
        steps: number of steps that ran.
        steps_recorded: of how many of them something was recorded (``every=``, ``steps=``).
        cost_fraction: time spent in our hooks, as a share of the rest of the time since the first call of a model.
        wall_seconds: time from start to close.
        size_bytes: size of the recording on disk.
        partial: why something that was asked for is not in it; None when all is.
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
    cost_fraction: float = 0.0
    wall_seconds: float = 0.0
    size_bytes: int = 0
    partial: str | None = None
    nothing_called: bool = True
    told: list[str] = field(default_factory=list)


class _Model:
    """One outermost module that the script has called."""

    def __init__(self, name: str, module: Any, watched: list[Watched]) -> None:
        self.name = name
        self.ref = weakref.ref(module)
        self.watched = watched
        self.structure = [(one.path, one.type) for one in watched]
        self.manifest = model_manifest(module, name, watched)
        self.parameters: ParameterWatch | None = None
        self.looked_at = -1  # step in which its modules were listed again last
        self.weights: WeightUse | None = None


class ScriptRecorder:
    """Records every model that a script calls, from the first call on.

    The frameworks are waited for and never imported. Each outermost module is met at its first call, gets its class's
    name, and hooks on all its modules; a module that turns up later inside a known model gets its own then.

    Args:
        to: directory to write.
        select: patterns; each needs to match in some model of the script only.
        log: text file that gets a line per event.
        argv: the script's command line, for the manifest.

    Raises:
        TargetError: ``to`` or ``log`` exists or cannot be written.
        TenterhookError: an option has a value that it cannot have.
    """

    def __init__(
        self,
        *,
        to: str | os.PathLike[str],
        select: Sequence[str] | None = None,
        kinds: Collection[str] | None = None,
        stats: str | None = "basic",
        sketch: bool = True,
        tensors: bool = False,
        every: int = 1,
        steps: str | None = None,
        log: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        on_error: str = "warn",
        note: str | None = None,
        argv: Sequence[str] = (),
    ) -> None:
        self._select = list(select) if select else None
        self._tensors = tensors
        wanted = check_kinds(kinds, tensors=tensors)
        self._options = replace(
            capture_options(wanted, stats=stats, sketch=sketch, recompute=False, on_error=on_error, to_disk=True),
            note_errors=False,  # a script's traceback is its own
        )
        self._sampling = Sampling(every, steps)
        self._manifest = start_manifest(
            argv=list(argv),
            kinds=sorted(wanted),
            select=", ".join(self._select or ["**"]),
            tensors=str(tensors).lower(),
            note=note,
        )
        self._log = EventLog(log) if log is not None else None
        self._sink = DiskSink(
            Path(to), self._manifest, rank=self._manifest.rank, overwrite=overwrite, flush_interval=INTERVAL
        )
        self._capture: Capture | None = None
        self._schedule: HookSchedule | None = None
        self._backend: Backend | None = None
        self._models: list[_Model] = []
        self._by_module: dict[int, Watched] = {}
        self._strays: Counter[tuple[str, str]] = Counter()  # (type, why it is not recorded) -> calls
        self._attachments: list[Detachable] = []
        self._matched: set[str] = set()
        self._stack = contextlib.ExitStack()
        self._told: list[Sequence[str]] = []
        self._pid = os.getpid()
        self._running = False
        self._began_ns = 0
        self._met_ns = 0  # when the first model was called

    # --- the session -----------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Wait for a framework's import, or take the one that is there."""
        self._running = True
        self._began_ns = time.perf_counter_ns()
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
        self._attachments.append(
            backend.on_any_call(self._is_unknown, lambda module, args, kwargs: self._met(backend, module, args, kwargs))
        )

    def _begin(self, backend: Backend) -> Capture:
        """The first model decides which framework is recorded."""
        self._backend = backend
        self._met_ns = time.perf_counter_ns()
        for name, value in backend.environment().items():
            if name not in ("rank", "world"):  # the folder was named by the launcher's variables, before any framework
                setattr(self._manifest, name, value)
        self._capture = Capture(backend, self._sink, self._options, self._step_began, self._step_ended, self._log)
        self._schedule = HookSchedule(self._capture, self._sampling, self._followed_parameters)
        self._schedule.settle()
        if self._log is not None:
            self._log.summary = backend.summary
        stepped = partial(self._capture.guarded, self._capture.tracker.optimizer_stepped)
        self._attachments.append(backend.on_optimizer_step(stepped))
        self._stack.callback(Flusher(self._capture).stop)
        return self._capture

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
            one.__traceback__ = _without_own_frames(trace)
            waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]

    def close(self, error: BaseException | None = None) -> RecordSummary:
        """Take everything off, finish the recording and say how it went. Never raises."""
        self._running = False
        for attachment in self._attachments:
            attachment.remove()
        summary = RecordSummary(Path(self._sink.path))
        rows: list[dict[str, Any]] = []
        try:
            if self._capture is not None:
                end_capture(self._capture, self._followed_parameters(), error)
                rows = self._module_rows()
        except Exception as fault:  # the script has run; what is there is kept, and this is told in the summary
            self._manifest.partial = f"{type(fault).__name__}: {fault}"
        finally:
            self._stack.close()
            self._finish(summary, rows, error)
        return summary

    def _followed_parameters(self) -> list[ParameterWatch]:
        return [model.parameters for model in self._models if model.parameters is not None]

    def _module_rows(self) -> list[dict[str, Any]]:
        assert self._capture is not None and self._backend is not None
        rows = []
        for model in self._models:
            rows += modules_rows(self._backend, model.ref(), model.watched, self._capture, model.weights)
        return rows

    def _finish(self, summary: RecordSummary, rows: list[dict[str, Any]], error: BaseException | None) -> None:
        manifest = self._manifest
        wall = (time.perf_counter_ns() - self._began_ns) / 1e9
        manifest.error = words_of(error)
        told = [sentence for told in self._told for sentence in told]
        if self._capture is not None and self._schedule is not None:
            finish_manifest(
                manifest,
                self._capture,
                [model.manifest for model in self._models],
                told,
                began_ns=self._met_ns,
                recorded=self._schedule.recorded,
            )
            summary.calls, summary.values = self._capture.rows.calls_recorded, self._capture.rows.values_recorded
            cost = manifest.cost
            summary.cost_fraction = cost.hook_seconds / max(cost.wall_seconds - cost.hook_seconds, 1e-9)
        else:
            manifest.ended, manifest.told = now(), told
        summary.told = manifest.told
        self._sink.close(manifest, table_of(rows))
        if self._log is not None:
            self._log.close()
        selected = [row for row in rows if row["selected"]]
        several = len(self._models) > 1
        summary.nothing_called = not self._models
        summary.modules_selected = len(selected)
        summary.modules_fired = sum(1 for row in selected if row["calls"])
        summary.missing = [
            (f"{row['model']}/{row['path'] or '(root)'}" if several else row["path"] or "(root)", row["reason"])
            for row in selected
            if row["reason"]
        ]
        summary.missing += [(name, f"{why} (called {count} times)") for (name, why), count in self._strays.items()]
        if self._select and self._models:
            summary.missing += unmatched(self._select, self._matched, rows)
        summary.steps = manifest.steps
        summary.steps_recorded = manifest.steps_recorded or 0
        summary.wall_seconds = wall
        summary.partial = self._sink.failure or manifest.partial
        summary.size_bytes = sum(file.stat().st_size for file in summary.path.rglob("*") if file.is_file())

    # --- meeting models --------------------------------------------------------------------------------------------
    def _is_unknown(self, module: Any) -> bool:
        watched = self._by_module.get(id(module))
        return watched is None or watched.ref() is not module

    def _met(self, backend: Backend, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called that has no hooks of ours: a new model, or a new part of one that is running."""
        if (
            not self._running
            or os.getpid() != self._pid
            or (self._backend is not None and backend is not self._backend)
        ):
            return
        capture = self._capture or self._begin(backend)
        capture.guarded(self._take_in, capture, module, args, kwargs)

    def _take_in(self, capture: Capture, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running = capture.tracker.settled()
        if running is None:
            self._adopt(capture, module)
        else:
            model = next((one for one in self._models if one.name == running.watched.model), None)
            root = model.ref() if model is not None else None
            if model is None or root is None or not self._join(capture, model, root, module):
                self._strays[type(module).__name__, "not part of a model"] += 1
                return
        watched = self._by_module.get(id(module))
        if watched is not None and watched.attachment is not None:
            capture.begin_running_call(watched, module, args, kwargs)

    def _adopt(self, capture: Capture, module: Any) -> None:
        backend = capture.backend
        try:
            backend.check(module)
        except Exception as error:  # a script module, say: it runs unseen, which the summary tells
            self._strays[type(module).__name__, str(error).splitlines()[0]] += 1
            return
        name = type(module).__name__
        watched = watch_model(backend, module, name, self._select, self._tensors, lenient=True, matched=self._matched)
        model = _Model(name, module, watched)
        old = next((one for one in self._models if one.ref() is None and one.structure == model.structure), None)
        if old is not None:
            self._succeed(old, model)
            self._forget(capture, old)
            self._models[self._models.index(old)] = model
        else:
            taken = {one.name for one in self._models}
            number = 2
            while model.name in taken:
                model.name = f"{name}-{number}"
                number += 1
            self._models.append(model)
        model.manifest.name = model.name
        model.weights = WeightUse(backend, module)
        if self._options.kinds & PARAMETER_KINDS:
            model.parameters = ParameterWatch(capture, module, watched)
        for one in watched:
            one.model = model.name
            self._watch(capture, one)
        if model.parameters is not None and capture.active:
            model.parameters.step_begins()

    def _succeed(self, old: _Model, new: _Model) -> None:
        """A model of the same make that is gone (``nn.CrossEntropyLoss()(...)`` in a loop) is gone on with under its name."""
        new.name = old.name
        for before, after in zip(old.watched, new.watched, strict=True):
            after.succeed(before)

    def _forget(self, capture: Capture, old: _Model) -> None:
        for one in old.watched:
            if one.attachment is not None:
                one.attachment.remove()
                one.attachment = None
        gone = set(map(id, old.watched))
        capture.watched = [one for one in capture.watched if id(one) not in gone]
        self._by_module = {key: one for key, one in self._by_module.items() if id(one) not in gone}

    def _join(self, capture: Capture, model: _Model, root: Any, module: Any) -> bool:
        """Look whether ``module`` has become part of a known model since that was met; once a step, since it is a long look."""
        if model.looked_at == capture.tracker.step:
            return False
        model.looked_at = capture.tracker.step
        fresh = watch_model(
            capture.backend, root, model.name, self._select, self._tensors, lenient=True, matched=self._matched
        )
        joined = False
        for one in fresh:
            if self._is_unknown(one.ref()):
                model.watched.append(one)
                self._watch(capture, one)
                joined = joined or one.ref() is module
        return joined

    def _watch(self, capture: Capture, watched: Watched) -> None:
        module = watched.ref()
        old = self._by_module.get(id(module))
        if old is not None and old.ref() is module and old.attachment is not None:
            old.attachment.remove()  # it was met by itself before the model that it is part of
            old.attachment = None
        self._by_module[id(module)] = watched
        capture.watched.append(watched)
        if self._schedule is not None:
            self._schedule.meet(watched)

    # --- steps -----------------------------------------------------------------------------------------------------
    def _step_began(self) -> None:
        if self._schedule is not None:
            self._schedule.step_began()

    def _step_ended(self, step: int) -> None:
        capture = self._capture
        if capture is None or self._schedule is None:
            return
        for model in self._models:
            root = model.ref()
            if step == 0 and model.weights is not None and root is not None:
                model.weights.look(root)  # gradients are cleared next
        capture.watched = [one for one in capture.watched if one.ref() is not None]
        self._schedule.step_ended(step)


def _without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    kept = []
    while traceback is not None:
        if not str(traceback.tb_frame.f_globals.get("__name__", "")).startswith("tenterhook."):
            kept.append(traceback)
        traceback = traceback.tb_next
    made: TracebackType | None = None
    for one in reversed(kept):
        made = TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made
