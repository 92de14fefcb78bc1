"""What a recording session does at each event: rows for calls, rows for values, tensors where asked for.

A capture is the engine that the sessions in :mod:`tenterhook.recorder` share: it attaches to the modules it is given,
follows their calls through a tracker, measures what flows, and hands blocks of rows to a sink.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tenterhook.aliasing import explanation
from tenterhook.attaching import give_way_each, release, release_each
from tenterhook.backends import Backend, BeginningBackend, NativeBackend
from tenterhook.call_marks import CallMarks
from tenterhook.calls import LiveCall, Watched
from tenterhook.errors import UnsupportedError
from tenterhook.gradient_capture import GradientCapture
from tenterhook.native import NATIVE, new_engine
from tenterhook.notes import call_note, note_error
from tenterhook.recording.memory import MemorySink
from tenterhook.recording.sink import Sink
from tenterhook.row_capture import CaptureOptions, EventListener, RowCapture
from tenterhook.tracker import Tracker
from tenterhook.values import ParameterNames, argument_leaves, bind_arguments, leaves, no_tensor_in

__all__ = ["Capture"]

_log = logging.getLogger("tenterhook")

_SAMPLED = 13  # of so many handlers one is timed; prime, so that no model's own rhythm falls in with it


class Capture:
    """Attaches to modules and turns their events into rows."""

    def __init__(
        self,
        backend: Backend,
        sink: Sink,
        options: CaptureOptions,
        on_step_begin: Callable[[], None],
        on_step_end: Callable[[int], None],
        listener: EventListener | None = None,
    ) -> None:
        self.backend = backend
        self.sink = sink
        self.options = options
        self.tracker = Tracker(backend, on_step_begin, partial(self._step_ended, on_step_end))
        self.watched: list[Watched] = []
        self.failure: str | None = None  # why the capture stopped before its end
        self.stopped: str | None = None  # the same, where the session went on: what came then was not seen
        self.raised: str | None = None  # the class of the exception that ended the session
        self.outputs_unseen: dict[tuple[str, str], str] = {}  # model and path -> what is said of them
        self._closed, self._hook_ns = False, 0
        self.around: Callable[..., tuple[Any, Any, Any]] | None = None  # wraps the handlers that are attached
        self._listener, self._types = listener, backend.tensor_types
        self.rows = RowCapture(backend, sink, options, self.tracker, listener)
        self._gradients = GradientCapture(backend, self.tracker, self.rows, self._gradient, self.guarded)
        self.begun = CallMarks()  # calls that were begun before their hooks have run, which may not
        self._engine = new_engine(backend.native_parts()) if isinstance(backend, NativeBackend) else None
        kinds = options.kinds
        self._wants_output, self._wants_input = "output" in kinds, "input" in kinds
        self._wants_grad_output, self._wants_grad_input = "grad_output" in kinds, "grad_input" in kinds
        if self._engine is not None:
            self._go_native(self._engine)

    def _go_native(self, engine: Any) -> None:
        unseen = self.backend.unseen
        engine.plain = self._listener is None and not self._wants_grad_input and self.options.scaler is None
        engine.wants_input, engine.wants_output = self._wants_input, self._wants_output
        engine.wants_grad_output = self._wants_grad_output
        engine.before, engine.values_of, engine.fault = unseen(self._inputs), unseen(self._values_of), self._fault
        self.tracker.use(engine, lambda: give_way_each(self.watched))
        engine.busy += (self.begun,)
        self.rows.use(engine)
        self._gradients.use(engine)
        engine.value, engine.came = unseen(engine.value), unseen(engine.came)

    @property
    def closed(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._closed

    @closed.setter
    def closed(self, value: bool) -> None:
        self._closed = value
        if self._engine is not None:
            self._engine.closed = value

    @property
    def told(self) -> list[str]:
        """What of the gradients could not be taken, as sentences."""
        return self._gradients.told

    @property
    def hook_ns(self) -> int:
        """Nanoseconds spent in hooks, some of which are timed for all."""
        return self._hook_ns + (self._engine.hook_ns if self._engine is not None else 0)

    def _step_ended(self, on_step_end: Callable[[int], None], step: int) -> None:
        on_step_end(step)  # measures what parameters have become
        self.rows.send()

    @property
    def active(self) -> bool:
        """Whether calls are followed; not on steps that are not sampled."""
        return self.tracker.follows_calls

    @active.setter
    def active(self, value: bool) -> None:
        self.tracker.follows_calls = value
        if self._engine is not None:
            self._engine.follows = value

    @property
    def rows_recorded(self) -> int:
        """Number of rows, of calls and of values."""
        return self.rows.calls_recorded + self.rows.values_recorded

    # --- attaching -------------------------------------------------------------------------------------------------
    def attach(self, watched: Watched) -> None:
        """Put hooks around the calls of a watched module."""
        module = watched.ref()
        if self.closed or module is None or watched.attachment is not None or watched.closed:
            return
        if watched.resting is not None:
            watched.attachment, watched.resting = watched.resting, None
            watched.attachment.resume()
            return
        if watched.input_names is None and watched.wanted:
            watched.input_names = ParameterNames.of(self.backend.forward_function(module))
        handlers = partial(self._enter, watched), partial(self._leave, watched), partial(self._raised, watched)
        if self.around is not None:
            watched.attachment = self.backend.attach(module, *self.around(*handlers))
        elif self._engine is not None and isinstance(self.backend, NativeBackend):
            watched.attachment = self.backend.attach_native(module, *handlers, native=(self._engine, watched))
        else:
            watched.attachment = self.backend.attach(module, *handlers)

    def attach_all(self, modules: list[Watched], *, due: bool) -> None:
        """Put hooks around the calls of modules; ``due`` says whether they are recorded on this step."""
        if self._engine is not None and not self.closed:
            modules = NATIVE.put_all_on(modules, due)
        for watched in modules:
            watched.due = due
            if watched.attachment is None:
                self.attach(watched)

    def release_all(self, modules: list[Watched], *, due: bool) -> None:
        """Take the hooks of modules off, which will come back soon."""
        if self._engine is not None:
            modules = NATIVE.take_all_off(modules, due)
        for watched in modules:
            watched.due = due
            release(watched, rest=True)

    def _raised(self, watched: Watched, *arguments: Any) -> None:
        try:
            self.guarded(self._failed, watched, *arguments)
        except RecursionError:
            # The user's own recursion has used up the stack. A call around this one, where there is room again, finds that it never ended.
            return

    def detach(self, *, but: Watched | None = None, rest: bool = False) -> None:
        """Take all hooks off (but those of one module); gradients of calls that have been made still arrive.

        ``rest`` says that they will come back soon: where the framework's backend can, they are kept for that.
        """
        release_each([one for one in self.watched if one is not but], rest=rest)

    def stop(self, reason: str) -> None:
        """Give up, keeping what has been recorded."""
        if self.failure is None:
            self.see_no_more(reason)
            try:
                self.detach()
            except Exception as error:  # whoever stops has met a fault already; what stays on does nothing any more
                self.failure = f"{reason}; hooks could not be taken off: {type(error).__name__}: {error}"

    def see_no_more(self, reason: str) -> None:
        """Record nothing from now on; the hooks stay on and do nothing."""
        self.failure = self.failure or reason
        self.stopped = self.stopped or (None if self.closed else reason.partition("\n")[0])
        self.closed = True

    def _give_up(self, error: Exception) -> None:
        first = self.failure is None
        self.stop(f"{type(error).__name__}: {error}")
        if first:
            _log.warning("recording stopped by a fault in tenterhook; the run goes on", exc_info=error)

    def guarded(self, handler: Callable[..., Any], *arguments: Any) -> Any:
        """Run a handler of ours; a fault of ours must not end somebody's training."""
        if self.closed:
            return None
        if (untraced := self.backend.untraced()) is not None:
            with untraced:
                return self.guarded(handler, *arguments)
        start = time.perf_counter_ns()
        try:
            return handler(*arguments)
        except Exception as error:
            self._fault(error)
            return None
        finally:
            self._hook_ns += time.perf_counter_ns() - start

    def _fault(self, error: Exception) -> None:
        """Stop the recording for a fault in a handler; raises it where that is wanted."""
        if self.options.on_error == "raise" or isinstance(error, UnsupportedError):
            raise error  # what cannot be watched without changing the run is no fault of ours
        self._give_up(error)

    # What follows runs at each call and gradient; so it is guarded in place, and the time that it takes is sampled.
    def _enter(self, watched: Watched, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.closed:
            return None
        if (untraced := self.backend.untraced()) is not None:
            with untraced:
                self._enter(watched, module, args, kwargs)
            return None  # an alias of an input would not be in the graph
        if self.begun and isinstance(self.backend, BeginningBackend) and self.backend.hooked_call() in self.begun:
            return None
        try:
            call = self.tracker.begin(watched)
            if self.tracker.stale:
                self._record_stale()
            changed = None
            if self.tracker.records(watched, call.step):
                changed = self._before(call, module, args, kwargs)
            elif (
                watched.attachment is None
            ):  # the step that begins with this call is not recorded: its hooks have come off
                self.tracker.end(watched)
            if not call.seq % _SAMPLED:
                self._hook_ns += (self.tracker.now_ns() - call.start_ns) * _SAMPLED
            return changed
        except Exception as error:
            self._fault(error)
            return None

    def _leave(self, watched: Watched, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.closed:
            return
        if (untraced := self.backend.untraced()) is not None:
            with untraced:
                self._leave(watched, module, args, kwargs, output)
            return
        try:
            call = self.tracker.end(watched)
            if self.tracker.stale:
                self._record_stale()
            if call is None or not call.followed:
                return
            now = self.tracker.now_ns()
            self._after(call, now, module, output)
            if not call.seq % _SAMPLED:
                self._hook_ns += (self.tracker.now_ns() - now) * _SAMPLED
        except Exception as error:
            self._fault(error)

    def _gradient(self, call: LiveCall, kind: str, slot: str, note: str | None, gradient: Any) -> None:
        if self.closed:
            return
        try:
            now = self.tracker.now_ns()
            seq = self._gradients.came(call, now, kind, slot, note, gradient)
            if not seq % _SAMPLED:
                self._hook_ns += (self.tracker.now_ns() - now) * _SAMPLED
        except Exception as error:
            self._fault(error)

    def begin_running_call(self, watched: Watched, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call that the framework has begun already; aliases of its inputs come too late and are left out."""
        call = self.tracker.begin(watched)
        if self.tracker.stale:
            self._record_stale()
        if self.tracker.records(watched, call.step):
            self._before(call, module, args, kwargs, alias=False)

    # --- forward ---------------------------------------------------------------------------------------------------
    def _before(
        self, call: LiveCall, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, alias: bool = True
    ) -> Any:
        call.followed = True
        call.recorded = self.options.recompute or call.phase != "recompute"
        if self._listener is not None:
            self._listener("start", call, "", "", None)
        if self._wants_input and call.recorded:
            self._inputs(call, module, args, kwargs)
        return self._gradients.alias_inputs(call, module, args, kwargs) if alias and self._wants_grad_input else None

    def _after(self, call: LiveCall, now: int, module: Any, output: Any) -> None:
        if call.recorded:
            self.rows.call(call, now, None)
        if call.aliases is not None:
            aliases, call.aliases = call.aliases, None
            aliases.settle(f"{call.watched.type} at '{call.watched.name}'")
        if self._wants_output or self._wants_grad_output:
            self._values_of(call, module, output, self._wants_output and call.recorded)

    def _inputs(self, call: LiveCall, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for slot, tensor in argument_leaves(bind_arguments(call.watched.input_names, args, kwargs), self._types):
            self.rows.value(call, "input", slot, tensor)

    def _values_of(self, call: LiveCall, module: Any, output: Any, values: bool) -> None:
        """Record what a call has given, where that is not done yet, and wait for its gradients."""
        found = leaves(output, self._types)
        if values and not found:
            self.outputs_unseen[call.watched.model, call.watched.path] = no_tensor_in(output)
        for slot, tensor in found if values else ():
            self.rows.value(call, "output", slot, tensor)
        if self._wants_grad_output and call.expects_gradient:
            self._gradients.tap_output(call, found, module, output)

    def op_ended(self, call: LiveCall, output: Any, error: str | None) -> None:
        """Record a functional call; one that raised has no output."""
        if call.recorded:
            self.rows.call(call, self.tracker.now_ns(), error)
        for slot, tensor in () if error else leaves(output, self._types):
            if self._wants_output and call.recorded:
                self.rows.value(call, "output", slot, tensor)
            if self._wants_grad_output:
                self._gradients.tap(call, "grad_output", slot, tensor, None)

    def op_differentiated(self, call: LiveCall, slot: str, put_on: Callable[[Callable[[Any], None]], None]) -> None:
        """Wait for a gradient of a functional call, where the framework itself knows how."""
        if self._wants_grad_output:
            call.expect("grad_output", slot)
            put_on(partial(self._gradient, call, "grad_output", slot, None))

    def _failed(
        self, watched: Watched, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException
    ) -> None:
        call = self.tracker.end(watched)
        if self.tracker.stale:
            self._record_stale()
        if call is None:
            return
        if call.aliases is not None:
            call.aliases.drop()
            call.aliases = None
            if self.options.note_errors and (why := explanation(error)) is not None:
                note_error(error, why)
        stopped = self.backend.is_early_stop(error)  # a recomputation that has all it needs: no error of anybody
        if call.recorded:
            self.rows.call(call, self.tracker.now_ns(), None if stopped else f"{type(error).__name__}: {error}")
        if self.options.note_errors and call.followed and not stopped:
            place = f"call {call.number} of step {call.step}"
            note_error(
                error,
                call_note(self.backend, watched.path, module, args, kwargs, names=watched.input_names, call=place),
            )

    def abandon_open_calls(self, error: BaseException | None) -> None:
        """Record the calls that never came to their end (an interrupt goes past all hooks)."""
        text = "did not end" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")
        self._never_ended(self.tracker.abandon(), None if self.stopped else text)  # once stopped, nobody saw the ends

    def _record_stale(self) -> None:
        self._never_ended(self.tracker.take_stale(), "did not end")

    def _never_ended(self, calls: Iterable[LiveCall], text: str | None) -> None:
        for call in calls:
            aliases, call.aliases = call.aliases, None
            if aliases is not None:
                aliases.drop()
            if call.recorded:
                self.rows.call(call, None, None if self.tracker.ends_unseen(call) else text)

    # --- handing over ----------------------------------------------------------------------------------------------
    def forked(self) -> None:
        """In a child of the process, where its parent's other threads may hold the locks for ever: go on in memory, else end."""
        self.rows.forked()
        self.tracker.forked()
        if isinstance(self.sink, MemorySink):
            self.sink.forked()
        else:
            self.closed = True

    def close(self) -> None:
        """Take everything off and hand over what is left."""
        self.closed = True
        with contextlib.ExitStack() as parts:  # what is left is handed over, whatever becomes of the rest
            parts.callback(self._hand_over)
            for part in (self.tracker.release, self._gradients.close, self.detach):  # the last one first
                parts.callback(part)

    def _hand_over(self) -> None:
        try:
            self.rows.flush()
        except Exception as error:  # a fault of ours, which must not end somebody's training
            if self.options.on_error == "raise":
                raise
            self._give_up(error)
