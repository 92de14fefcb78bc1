"""Recording sessions: ``th.record(model)``."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Self

from tenterhook.backends import find_backend
from tenterhook.capture import Capture
from tenterhook.errors import NotRecordedError, TenterhookError
from tenterhook.inventory import model_name
from tenterhook.recording.memory import MemorySink
from tenterhook.recording.reader import open_recording
from tenterhook.recording.recording import Recording
from tenterhook.recording.writer import DiskSink
from tenterhook.recording_session import RecordingSession
from tenterhook.request import Destination, Request, capture_options, check_kinds, check_resume, lasting
from tenterhook.request import start as start_manifest
from tenterhook.sampling import Sampling
from tenterhook.selection import Selection

if TYPE_CHECKING:
    import pyarrow as pa

    from tenterhook.recording.call import Call
    from tenterhook.recording.coverage import Coverage
    from tenterhook.recording.view import ModuleView

__all__ = ["Recorder", "record"]

_HOW = "use it in a with statement, with th.record(model) as rec: ..., or call its start() and close()"


class Recorder:
    """A recording in the making; made by :func:`tenterhook.record`, used in a ``with`` statement.

    Everything that a finished recording answers can be asked at any time, during the session and after it:
    ``rec["features.11"].output``, ``rec.order()``, ``rec.table("values")``, ``rec.query("select ...")``, ``rec.coverage``.
    """

    def __init__(self, model: Any, request: Request) -> None:
        self._waiting: tuple[Any, Request] | None = (model, request)  # once it has started it keeps no model alive
        self._name = model_name(request.backend, model)
        self._session: RecordingSession | None = None
        self._recording: Recording | None = None
        self._growing: Recording | None = None  # what is on the disk by now, while more comes

    # --- the session -----------------------------------------------------------------------------------------------
    def start(self) -> Self:
        """Put the hooks on. ``with`` does this.

        Raises:
            TenterhookError: it has been started before.
            TargetError: the directory to write to exists, or cannot be written.
        """
        if self._waiting is None:
            raise TenterhookError(f"this recording is {self._state} already\n  call th.record() again for another one")
        (model, request), self._waiting = self._waiting, None
        self._session = RecordingSession(model, self._name, request)
        return self

    def close(self, error: BaseException | None = None) -> None:
        """Take all hooks off and finish the recording. A second call does nothing."""
        if self._session is not None:
            self._session.close(error)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Self]:
        """Record one call of ``fn``: ``output, rec = th.record(model, tensors=True).run(model, x)``.

        Returns:
            what ``fn`` returns, and this recorder, finished.
        """
        with self:
            output = fn(*args, **kwargs)
        return output, self

    @property
    def _state(self) -> Literal["new", "running", "closed"]:
        if self._session is None:
            return "new" if self._waiting is not None else "closed"
        return "closed" if self._session.closed else "running"

    def _begun(self) -> RecordingSession:
        if self._session is None:
            why = "has not begun" if self._waiting is not None else "could not begin"
            raise NotRecordedError(f"this recording of {self._name} {why}, so nothing is in it\n  {_HOW}")
        return self._session

    def _running(self, doing: str) -> RecordingSession:
        if self._session is None and self._waiting is not None:
            raise TenterhookError(f"{doing} of a recording that has not begun\n  {_HOW}")
        if self._session is None or self._session.closed:
            raise TenterhookError(
                f"{doing} of a recording that has ended\n  call it inside the with statement, or th.record() again"
            )
        return self._session

    @property
    def _capture(self) -> Capture:
        return self._begun().capture

    @property
    def _sink(self) -> MemorySink | DiskSink:
        return self._begun().sink

    def _hand_over(self) -> None:
        self._begun().hand_over()

    @property
    def resumed_from(self) -> int:
        """The step from which an earlier recording is gone on with (``resume=``); 0 where all of it is recorded now."""
        resumed = self._sink.resumed if isinstance(self._sink, DiskSink) else None
        return 0 if resumed is None else resumed.step

    # --- steps and sampling ----------------------------------------------------------------------------------------
    def step(self) -> None:
        """Say that a step has ended. From the first call on, nothing else ends a step in this session.

        Raises:
            TenterhookError: the recording has not begun, or has ended.
        """
        self._running("step()").step()

    def pause(self) -> None:
        """Take the hooks off until :meth:`resume`; steps go on being counted where an optimizer or you end them.

        Raises:
            TenterhookError: the recording has not begun, or has ended.
        """
        self._running("pause()").schedule.pause()

    def resume(self) -> None:
        """Put the hooks on again after :meth:`pause`; to go on with a recording on disk, give ``resume=True`` to ``th.record``.

        Raises:
            TenterhookError: the recording has not begun, or has ended.
        """
        self._running("resume()").schedule.resume()

    # --- reading ---------------------------------------------------------------------------------------------------
    @property
    def recording(self) -> Recording:
        """The recording as it stands; one that is written to disk is read from there.

        Raises:
            NotRecordedError: it has not begun.
        """
        if self._recording is None:
            session = self._begun()
            if isinstance(session.sink, MemorySink):
                self._recording = Recording(session.sink)
            elif session.closed:
                self._recording = open_recording(session.sink.path)
            else:
                session.hand_over()
                if self._growing is None:
                    self._growing = open_recording(session.sink.path)
                self._growing.refresh()
                return self._growing
        return self._recording

    @property
    def ended_by(self) -> str | None:
        """The exception that ended the session, ``"ValueError: bad batch"``; None where it ended well, or still runs."""
        return self._begun().error

    @property
    def told(self) -> list[str]:
        """What was changed for the session's time so that hooks see everything, as sentences."""
        return list(self._begun().told)

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
        seen = "nothing yet"
        if self._session is not None:
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
    alias: bool = False,
    ops: bool | Literal["all"] = False,
    every: int | Mapping[str, int] = 1,
    steps: Iterable[int] | str | None = None,
    tensors_dtype: str | None = None,
    budget: int | None = None,
    overwrite: bool = False,
    resume: bool | int = False,
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
        alias: whether kept tensors are the program's own, without a copy and where they are, host or device. One that the
            program changes in place later is *stale*: ``Value.stale`` says so, and it is not given as what was seen. Where the
            framework keeps no count of changes (inference mode, MindSpore) tensors are copied all the same. Changes that torch
            does not count, through ``.data`` or NumPy, go unseen. Only in memory.
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
        resume: go on with a recording at ``to`` of an earlier process (not to be taken for ``rec.resume()``, which ends a
            pause). With True from the step after the last complete one, which ``rec.resumed_from`` tells; your loop skips
            the steps before it. A training that goes on from its checkpoint gives the number of the step that it does
            next, ``resume=31``: what was recorded of that and later steps is taken out, at 0 everything; steps before
            it that were lost stay a gap, which the coverage tells. Where there is no recording, a new one begins, at
            that step. Under ``torchrun`` with True each rank finds its own step.
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
    select, tensors = lasting(select), False if tensors is None else lasting(tensors)
    wanted = check_kinds(kinds, tensors=tensors is not False)
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
        alias=alias,
    )
    sampling = Sampling(every, steps)
    asked = {"stats": stats, "sketch": sketch, **sampling.asked, "ops": ops, "recompute": recompute,
             "scaler": scaler is not None, "tensors_dtype": tensors_dtype, "fused": fused}  # fmt: skip
    request = Request(
        backend=backend,
        select=select,
        tensors=tensors,
        options=options,
        sampling=sampling,
        destination=Destination(to, overwrite=overwrite, resume=check_resume(resume), budget=budget),
        manifest=start_manifest(backend, wanted, select, tensors, note, asked),
        fused=fused,
    )
    request.check(model)
    return Recorder(model, request)
