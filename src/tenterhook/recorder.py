"""Recording sessions: ``th.record(model)``."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Self

from tenterhook.active_edits import EditWatch, edits_on, watching_edits
from tenterhook.address import Kind
from tenterhook.backends import Backend, Detachable, find_backend
from tenterhook.capture import Capture
from tenterhook.errors import TenterhookError
from tenterhook.flushing import INTERVAL, Flusher
from tenterhook.inventory import model_manifest, model_name, modules_rows, table_of, watch_model
from tenterhook.op_capture import OpCapture, check_ops
from tenterhook.parameters import ParameterWatch
from tenterhook.reasons import WeightUse
from tenterhook.recording.environment import now, start_manifest
from tenterhook.recording.manifest import Cost, Manifest
from tenterhook.recording.memory import MemorySink
from tenterhook.recording.reader import open_recording
from tenterhook.recording.recording import Recording
from tenterhook.recording.resume import Resumed
from tenterhook.recording.writer import DiskSink
from tenterhook.row_capture import CaptureOptions
from tenterhook.sampling import Sampling
from tenterhook.selection import Selection, describe, resolve

if TYPE_CHECKING:
    import pyarrow as pa

    from tenterhook.recording.call import Call
    from tenterhook.recording.coverage import Coverage
    from tenterhook.recording.view import ModuleView

__all__ = ["KINDS", "PARAMETER_KINDS", "Recorder", "capture_options", "check_kinds", "record"]

KINDS: tuple[str, ...] = tuple(kind.value for kind in Kind)
"""Everything that can be recorded."""

PARAMETER_KINDS = frozenset({"param", "param_grad", "update"})
"""The kinds that belong to parameters rather than to calls."""


def check_kinds(kinds: Collection[str] | None, *, tensors: bool) -> frozenset[str]:
    """Return the kinds to record; by default output and grad_output, with tensors kept the input too.

    Raises:
        TenterhookError: a kind that does not exist.
    """
    if kinds is None:
        return frozenset({"output", "grad_output", "input"} if tensors else {"output", "grad_output"})
    wanted = frozenset([kinds] if isinstance(kinds, str) else [str(getattr(kind, "value", kind)) for kind in kinds])
    unknown = sorted(wanted - set(KINDS))
    if unknown:
        raise TenterhookError(f"no kind {unknown[0]!r} can be recorded\n  the kinds are {', '.join(KINDS)}")
    return wanted


def capture_options(
    kinds: frozenset[str],
    *,
    stats: str | None,
    sketch: bool,
    recompute: bool,
    on_error: str,
    to_disk: bool,
    scaler: Any = None,
    ops: bool | str = False,
    tensors_dtype: str | None = None,
) -> CaptureOptions:
    """Check what the user asked for and put it into the engine's terms.

    Raises:
        TenterhookError: an option has a value that it cannot have.
    """
    if stats not in ("basic", None):
        raise TenterhookError(f"stats={stats!r} is not known\n  use 'basic' or None")
    if on_error not in ("warn", "raise"):
        raise TenterhookError(f"on_error={on_error!r} is not known\n  use 'warn' or 'raise'")
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise TenterhookError(
            f"scaler= needs a GradScaler, something with get_scale(), got {type(scaler).__name__}\n"
            "  pass the scaler whose scale(loss) you call backward on"
        )
    if ops not in (False, True, "all"):
        raise TenterhookError(f"ops={ops!r} is not known\n  use True, False or 'all'")
    if tensors_dtype not in (None, "float16", "bfloat16", "float32", "float64"):
        raise TenterhookError(
            f"tensors_dtype={tensors_dtype!r} is not known\n  use 'float16', 'bfloat16', 'float32', 'float64' or None"
        )
    return CaptureOptions(
        kinds=kinds,
        statistics=stats is not None,
        sketch=sketch,
        recompute=recompute,
        on_error=on_error,
        scaler=scaler,
        to_numpy=to_disk,
        ops=ops,
        tensors_dtype=tensors_dtype,
    )


class Recorder:
    """A recording in the making; made by :func:`tenterhook.record`, used in a ``with`` statement.

    Everything that a finished recording answers can be asked at any time, during the session and after it:
    ``rec["features.11"].output``, ``rec.order()``, ``rec.table("values")``, ``rec.query("select ...")``, ``rec.coverage``.
    """

    def __init__(
        self,
        model: Any,
        select: Selection,
        *,
        backend: Backend,
        options: CaptureOptions,
        tensors: Selection | bool,
        sink: MemorySink | DiskSink,
        manifest: Manifest,
        sampling: Sampling,
        fused: str,
    ) -> None:
        self._model_ref: Callable[[], Any] = weakref.ref(model)  # a recorder that has started keeps no model alive
        self._waiting: Any = model
        self._backend = backend
        self._sink = sink
        self._manifest = manifest
        self._sampling = sampling
        self._fused = fused
        self._capture = Capture(backend, sink, options, self._step_began, self._step_ended)
        self._name = model_name(backend, model)
        self._watched = watch_model(backend, model, self._name, select, tensors, keep_fused=fused == "keep")
        self._weights: WeightUse | None = None
        self._capture.watched = self._watched
        self._described = model_manifest(model, self._name, self._watched)
        self._ops = OpCapture(self._capture, implementation=options.ops == "all") if options.ops else None
        self._capture.around = None if self._ops is None else self._ops.around
        self._parameters = (
            ParameterWatch(self._capture, model, self._watched) if options.kinds & PARAMETER_KINDS else None
        )
        if isinstance(sink, DiskSink) and sink.resumed is not None:
            self._go_on(sink.resumed)
        if sampling.by_pattern:
            self._set_rates()
        self._stack = contextlib.ExitStack()
        self._state: Literal["new", "running", "closed"] = "new"
        self._paused = False
        self._told: Sequence[str] = ()
        self._edits: EditWatch = []
        self._began_ns = 0
        self._recording: Recording | None = None
        self._growing: Recording | None = None  # what is on the disk by now, while more comes
        self._modules_known: object = None
        if isinstance(sink, MemorySink):
            sink.before_read = self._hand_over

    @property
    def _model(self) -> Any:
        return self._model_ref()

    def _go_on(self, resumed: Resumed) -> None:
        self._capture.tracker.go_on(resumed.step, resumed.seq, resumed.start_ns)
        for one in self._watched:
            one.call_count = resumed.calls[one.model, one.path, "forward"]
            one.gradient_count = resumed.calls[one.model, one.path, "backward"]

    @property
    def resumed_from(self) -> int:
        """The step from which an earlier recording is gone on with (``resume=True``); 0 where all of it is recorded now."""
        resumed = self._sink.resumed if isinstance(self._sink, DiskSink) else None
        return 0 if resumed is None else resumed.step

    # --- the session -----------------------------------------------------------------------------------------------
    def start(self) -> Self:
        """Put the hooks on. ``with`` does this."""
        if self._state != "new":
            raise TenterhookError(f"this recording is {self._state} already\n  call th.record() again for another one")
        self._state = "running"
        self._began_ns = time.perf_counter_ns()
        try:
            hidden = self._model if self._fused != "keep" else None
            self._weights = WeightUse(self._backend, self._model)
            self._edits = self._stack.enter_context(watching_edits())
            self._told = self._stack.enter_context(self._backend.seeing_everything(hidden))
            stepped = partial(self._capture.guarded, self._capture.tracker.optimizer_stepped)
            self._on(self._backend.on_optimizer_step(stepped))
            self._stack.callback(self._capture.detach)
            if self._ops is not None:
                self._stack.callback(self._ops.close)
            self._settle_hooks()
            self._waiting = None
            if isinstance(self._sink, DiskSink):
                self._stack.callback(Flusher(self._capture).stop)
        except BaseException:
            self._stack.close()
            self._state = "closed"
            self._sink.abandon()
            raise
        return self

    def _on(self, attachment: Detachable) -> None:
        self._stack.callback(attachment.remove)

    def close(self, error: BaseException | None = None) -> None:
        """Take all hooks off and finish the recording. A second call does nothing."""
        if self._state != "running":
            return
        self._state = "closed"
        if error is not None:
            self._manifest.error = f"{type(error).__name__}: {error}".rstrip(": ")
        try:
            self._capture.abandon_open_calls(error)
            if self._parameters is not None:
                self._parameters.close()
            self._capture.close()
        except Exception as fault:  # a fault of ours: it must not stand in the way of the user's own exception
            if self._capture.options.on_error == "raise" and error is None:
                raise
            self._capture.stop(f"{type(fault).__name__}: {fault}")
        finally:
            self._stack.close()
            self._sink.close(self._finished_manifest(), self._modules_at_end(error))
            if isinstance(self._sink, MemorySink):
                self._sink.before_read = None

    def _modules_at_end(self, error: BaseException | None) -> pa.Table:
        try:
            return self._modules()
        except Exception as fault:
            if self._capture.options.on_error == "raise" and error is None:
                raise
            self._manifest.partial = self._manifest.partial or f"the modules could not be listed: {fault}"
            return table_of([])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    # --- steps and sampling ----------------------------------------------------------------------------------------
    def step(self) -> None:
        """Say that a step has ended. From the first call on, nothing else ends a step in this session."""
        self._capture.guarded(self._capture.tracker.user_stepped)

    def pause(self) -> None:
        """Take the hooks off until :meth:`resume`; steps go on being counted."""
        self._paused = True
        self._settle_hooks()

    def resume(self) -> None:
        """Put the hooks on again after :meth:`pause`."""
        self._paused = False
        self._settle_hooks()

    def _step_began(self) -> None:
        if self._parameters is not None and self._capture.active:
            self._parameters.step_begins()

    def _step_ended(self, step: int) -> None:
        if self._parameters is not None:
            self._parameters.step_ended(step)
        if step == 0 and self._weights is not None and self._model is not None:
            self._weights.look(self._model)  # gradients are cleared next
        self._manifest.steps = step + 1
        self._settle_hooks()

    def _settle_hooks(self) -> None:
        if self._state != "running":
            return
        if self._paused or not self._sampling.wants(self._capture.tracker.step):
            self._capture.active = False
            follow_root = not self._paused and self._capture.tracker.needs_root
            root = self._watched[0]
            self._capture.detach(but=root if follow_root else None, rest=True)
            if follow_root:
                self._capture.attach(root)
            if self._parameters is not None:
                self._parameters.pause()
        else:
            self._resume_hooks()

    def _resume_hooks(self) -> None:
        self._capture.active = True
        if self._parameters is not None:
            self._parameters.resume()
        step = self._capture.tracker.step
        for watched in self._watched:
            watched.due = step % watched.every == 0 or not self._sampling.by_pattern
            if (
                (watched.wanted and watched.due) or watched.is_root or self._ops is not None
            ):  # an op's module has to be known
                self._capture.attach(watched)
            else:
                self._capture.release(watched)

    def _set_rates(self) -> None:
        entries = self._backend.entries(self._model)
        by_path = {watched.path: watched for watched in self._watched}
        for pattern, every in self._sampling.rates.items():
            for entry in resolve(pattern, entries, require_callable=True):
                by_path[entry.path].every = every
        self._sampling.use(watched.every for watched in self._watched if watched.wanted)

    # --- reading ---------------------------------------------------------------------------------------------------
    def _hand_over(self) -> None:
        if self._state == "running":
            self._capture.rows.flush()
            known = (self._capture.tracker.step, self._capture.rows.calls_recorded, self._capture.rows.values_recorded)
            if isinstance(self._sink, MemorySink) and known != self._modules_known:
                self._modules_known = known
                self._sink.write_modules(self._modules())

    def _modules(self) -> pa.Table:
        return table_of(modules_rows(self._backend, self._model, self._watched, self._capture, self._weights))

    def _finished_manifest(self) -> Manifest:
        manifest = self._manifest
        manifest.ended = now()
        if self._model is not None:
            self._described = model_manifest(self._model, self._name, self._watched)
        manifest.models = [self._described]
        manifest.cost = Cost(
            hook_seconds=self._capture.hook_ns / 1e9, wall_seconds=(time.perf_counter_ns() - self._began_ns) / 1e9
        )
        manifest.steps = self._capture.tracker.steps_seen
        manifest.partial = manifest.partial or self._capture.failure
        manifest.edits = edits_on(self._edits, (one.ref() for one in self._watched))
        manifest.told = list(self._told)
        return manifest

    @property
    def recording(self) -> Recording:
        """The recording as it stands; one that is written to disk is read from there."""
        if self._recording is None:
            if isinstance(self._sink, MemorySink):
                self._recording = Recording(self._sink)
            elif self._state == "closed":
                self._recording = open_recording(self._sink.path)
            else:
                self._hand_over()
                self._sink.flush()
                if self._growing is None:
                    self._growing = open_recording(self._sink.path)
                self._growing.refresh()
                return self._growing
        return self._recording

    @property
    def ended_by(self) -> str | None:
        """The exception that ended the session, ``"ValueError: bad batch"``; None where it ended well, or still runs."""
        return self._manifest.error

    @property
    def told(self) -> list[str]:
        """What was changed for the session's time so that hooks see everything, as sentences."""
        return list(self._told)

    def __getitem__(self, path: str) -> ModuleView | Any:
        """Return what was recorded of one module: ``.output``, ``.grad_output``, ``.input``, ``.grad_input``, ``.calls``.

        An address, as they are printed, gives the module in one call (``rec["fc#0@3"]``) or one value
        (``rec["fc:output#0@3"]``).

        Raises:
            NotRecordedError: no such module was recorded; the nearest names are listed.
        """
        return self.recording[path]

    def __contains__(self, path: object) -> bool:
        return path in self.recording

    def __iter__(self) -> Iterator[Any]:
        return iter(self.recording)

    def order(self) -> list[Call]:
        """Return all calls in execution order, forward and backward."""
        return self.recording.order()

    def table(self, name: str = "") -> pa.Table:
        """Return the table ``calls``, ``values`` or ``modules``."""
        return self.recording.table(name)

    def query(self, sql: str) -> pa.Table:
        """Answer a SELECT over the tables ``calls``, ``values`` and ``modules``."""
        return self.recording.query(sql)

    @property
    def coverage(self) -> Coverage:
        """What was asked for, what of it was seen, and why the rest was not."""
        return self.recording.coverage

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Recording:
        """Write what has been recorded to ``path`` (``NAME.thk``).

        Raises:
            TargetError: the place exists already, or cannot be written.
        """
        return self.recording.save(path, overwrite=overwrite)

    def __repr__(self) -> str:
        seen = f"{self._capture.rows.calls_recorded} calls, {self._capture.rows.values_recorded} values"
        return f"<Recorder of {self._name}, {self._state}: {seen}>"


def record(
    model: Any,
    select: Selection = None,
    *,
    kinds: Collection[str] | None = None,
    to: str | os.PathLike[str] | None = None,
    stats: str | None = "basic",
    sketch: bool = True,
    tensors: Selection | bool = False,
    ops: bool | Literal["all"] = False,
    every: int | Mapping[str, int] = 1,
    steps: Iterable[int] | str | None = None,
    tensors_dtype: str | None = None,
    budget: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    recompute: bool = False,
    scaler: Any = None,
    fused: Literal["open", "keep"] = "open",
    on_error: Literal["warn", "raise"] = "warn",
    note: str | None = None,
) -> Recorder:
    """Record what runs inside ``model``: which module ran when, forward and backward, and what flowed through.

    Use it in a ``with`` statement around your own calls; nothing of them changes, and outputs, gradients, buffers and the
    random state are bit for bit those of an unrecorded run. Memory grows with the rows recorded (about 150 bytes a value,
    400 with its sketch); for whole runs give ``to=``.

    Args:
        model: a torch ``Module`` or MindSpore ``Cell``.
        select: which modules (see :mod:`tenterhook.selection`); all by default.
        kinds: of ``input``, ``output``, ``grad_input``, ``grad_output``, ``param``, ``param_grad``, ``update``; by default
            output and grad_output, with ``tensors`` input too. With ``grad_input`` the gradients of a tensor that is used
            several times inside a module, and outside of it as well, are summed in another order: last bits may change.
        to: directory ``NAME.thk`` to write to; in memory by default.
        stats: ``"basic"`` or None.
        sketch: whether each value gets its sketch, by which recordings are compared without their tensors.
        tensors: whether values are kept whole: True, or a selection of the modules whose are.
        ops: whether functional calls that give a tensor (``F.relu``, ``@``, ``flatten``) are recorded, too, under the module
            that makes them: ``rec["(root)/relu"]``. Those inside the framework's own modules (``F.linear`` in ``nn.Linear``)
            are only with ``"all"``. Not with ``fused="keep"``.
        every: record every n-th step; or a mapping from patterns to n, ``{"**": 100, "head.**": 1}``, where a later pattern
            overrules, and a module that none matches is recorded on every step.
        steps: record these steps only: numbers, or text such as ``"0:100:10,500"``.
        tensors_dtype: ``"float16"``, ``"bfloat16"``, ``"float32"`` or ``"float64"``: what tensors of real numbers are stored
            as. Statistics, sketches and digests are those of the tensor as it came.
        budget: bytes of tensors that may be stored in ``to``; then tensors stop and rows go on.
        overwrite: whether a recording at ``to`` may be replaced.
        resume: go on with an unfinished recording at ``to`` from the step after the last complete one, which
            ``rec.resumed_from`` tells; your loop skips the steps before it. Where there is none, a new one begins. Under
            ``torchrun`` each rank finds its own step.
        recompute: whether the recomputation of checkpointed modules gets rows of its own.
        scaler: the ``GradScaler`` of a loss that is scaled; gradients are recorded unscaled then, those of half precision
            as float32 (callbacks of :func:`tenterhook.hooks` are given gradients as they flow, scaled).
        fused: ``"keep"`` leaves fused fast paths as they are, and what runs in them unseen.
        on_error: what a fault of ours does: stop the recording and warn, or raise.
        note: words of your own to keep with the recording.

    Raises:
        HookError: ``model`` is no module.
        UnsupportedError: it cannot be hooked (a script module).
        SelectionError: ``select`` or ``tensors`` matches nothing.
        TargetError: ``to`` exists already or cannot be written.
    """
    backend = find_backend(model)
    backend.check(model)
    keeps = tensors is not False and tensors is not None
    wanted = check_kinds(kinds, tensors=keeps)
    options = capture_options(
        wanted,
        stats=stats,
        sketch=sketch,
        recompute=recompute,
        on_error=on_error,
        to_disk=to is not None,
        scaler=scaler,
        ops=ops,
        tensors_dtype=tensors_dtype,
    )
    if resume and (to is None or overwrite):
        raise TenterhookError("resume=True goes on with a recording on disk\n  give to=, and leave out overwrite=")
    if ops:
        check_ops(backend, fused)
    sampling = Sampling(every, steps)
    if ops and sampling.by_pattern:
        raise TenterhookError(
            "ops= are recorded at one rate\n  give every= as a number, or record ops= in a session of their own"
        )
    entries = backend.entries(model)
    resolve(select, entries, require_callable=True, parameters=[entry.name for entry in backend.parameters(model)])
    if keeps and tensors is not True:
        resolve(tensors, entries, require_callable=True)
    for pattern in sampling.rates if sampling.by_pattern else ():
        resolve(pattern, entries, require_callable=True)
    if budget is not None and to is None:
        raise TenterhookError("budget= is for tensors that are written to disk\n  give to=, or leave budget= out")
    manifest = start_manifest(
        **backend.environment(), select=", ".join(describe(select)), kinds=sorted(wanted), note=note,
        tensors=str(tensors).lower() if isinstance(tensors, bool) else ", ".join(describe(tensors)),
    )  # fmt: skip
    rank = manifest.rank
    sink = (
        MemorySink(manifest, rank=rank)
        if to is None
        else DiskSink(
            Path(to), manifest, rank=rank, overwrite=overwrite, resume=resume, budget=budget, flush_interval=INTERVAL
        )
    )
    try:
        return Recorder(
            model,
            select,
            backend=backend,
            options=options,
            tensors=tensors,
            sink=sink,
            manifest=manifest,
            sampling=sampling,
            fused=fused,
        )
    except BaseException:
        sink.abandon()
        raise
