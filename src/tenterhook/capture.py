"""What a recording session does at each event: rows for calls, rows for values, tensors where asked for.

A capture is the engine that the sessions in :mod:`tenterhook.recorder` share: it attaches to the modules it is given,
follows their calls through a tracker, measures what flows, and hands blocks of rows to a sink.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tenterhook.aliasing import InputAliases
from tenterhook.backends import Backend, Detachable, Suspendable
from tenterhook.errors import UnsupportedError
from tenterhook.notes import call_note, note_error
from tenterhook.recording.blocks import CALL_ITEMS, ValueBlock, calls_batch
from tenterhook.recording.sink import Sink
from tenterhook.tracker import LiveCall, Tracker, Watched
from tenterhook.values import ParameterNames, argument_leaves, bind_arguments, leaves, replace_arguments

__all__ = ["Capture", "CaptureOptions", "EventListener"]

_log = logging.getLogger("tenterhook")

_BLOCK_ROWS = 2048
_CALL_ITEMS = len(CALL_ITEMS)
_SAMPLED = 13  # of so many handlers one is timed; prime, so that no model's own rhythm falls in with it
_IN_PLACE = "changed in place by the module: gradient of the tensor as it came, earlier uses of it included"
_GRADIENTS = frozenset({"grad_input", "grad_output", "param_grad"})

EventListener = Callable[[str, LiveCall, str, str, Any], None]
"""``(event, call, kind, slot, tensor or error)``; events are ``start``, ``end``, ``raised``, ``value`` and ``backward``."""


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What to look at; see :func:`tenterhook.record` for the meaning of each."""

    kinds: frozenset[str]
    statistics: bool = True
    sketch: bool = True
    recompute: bool = False
    on_error: str = "warn"
    scaler: Any = None  # gives the factor of loss scaling: ``get_scale()``
    ops: bool | str = False  # functional calls: those of the user's modules, or "all"
    tensors_dtype: str | None = None  # that kept tensors of floating point are stored in
    to_numpy: bool = False  # the sink stores arrays, not the framework's own tensors
    note_errors: bool = True  # errors of the user's model get a note; not those of a script, whose traceback is its own


class _Pass:
    """A backward pass that is running; held by the framework until its end, so that one that fails is forgotten, too."""

    __slots__ = ("__weakref__", "calls")

    def __init__(self) -> None:
        self.calls: list[LiveCall] = []  # with gradients still missing


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
        self.closed = False
        self.hook_ns = 0
        self.calls_recorded = 0
        self.values_recorded = 0
        self._scale: tuple[int, float] = (-1, 1.0)  # backward pass, its loss scale
        self.around: Callable[..., tuple[Any, Any, Any]] | None = None  # wraps the handlers that are attached
        self._listener = listener
        self._lock = threading.RLock()
        self._calls: list[Any] = []  # the items of the rows, one row after the other
        self._block = self._new_block()
        self._leaf_taps: weakref.WeakValueDictionary[tuple[int, int, str], Any] = weakref.WeakValueDictionary()
        self._outer_passes: dict[int, int] = {}  # backward pass -> the one that it runs inside of
        self._passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
        self._untold: _Pass | None = None  # the newest one, where the framework does not tell when a pass ends
        self._types = backend.tensor_types
        self._measures = options.statistics
        self._extra = options.scaler is not None
        kinds = options.kinds
        self._wants_output, self._wants_input = "output" in kinds, "input" in kinds
        self._wants_grad_output, self._wants_grad_input = "grad_output" in kinds, "grad_input" in kinds

    def _step_ended(self, on_step_end: Callable[[int], None], step: int) -> None:
        with self._lock:
            if self._block.buffer.deferred:
                self._block.buffer.send()
        on_step_end(step)

    def _new_block(self) -> ValueBlock:
        return ValueBlock(
            _BLOCK_ROWS, sketch=self.options.statistics and self.options.sketch, digest=self.options.statistics
        )

    @property
    def active(self) -> bool:
        """Whether calls are followed; not on steps that are not sampled."""
        return self.tracker.follows_calls

    @active.setter
    def active(self, value: bool) -> None:
        self.tracker.follows_calls = value

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
        failed = partial(self.guarded, self._failed, watched)
        handlers = partial(self._enter, watched), partial(self._leave, watched), failed
        watched.attachment = self.backend.attach(module, *(handlers if self.around is None else self.around(*handlers)))

    def detach(self, *, but: Watched | None = None, rest: bool = False) -> None:
        """Take all hooks off (but those of one module); gradients of calls that have been made still arrive.

        ``rest`` says that they will come back soon: where the framework's backend can, they are kept for that.
        """
        for watched in self.watched:
            if watched is not but:
                self.release(watched, rest=rest)

    def release(self, watched: Watched, *, rest: bool = False) -> None:
        """Take the hooks of one module off."""
        if not rest:
            watched.resting = None
        attachment, watched.attachment = watched.attachment, None
        if attachment is None:
            return
        if rest and isinstance(attachment, Suspendable) and attachment.suspend():
            watched.resting = attachment
        else:
            watched.lost = watched.lost or not attachment.live
            attachment.remove()

    def stop(self, reason: str) -> None:
        """Give up, keeping what has been recorded."""
        if self.failure is None:
            self.failure = reason
            self.closed = True
            self.detach()

    def _give_up(self, error: Exception) -> None:
        told = self.failure is not None
        self.stop(f"{type(error).__name__}: {error}")
        if not told:
            _log.warning("recording stopped by a fault in tenterhook; the run goes on", exc_info=error)

    def guarded(self, handler: Callable[..., Any], *arguments: Any) -> Any:
        """Run a handler of ours; a fault of ours must not end somebody's training."""
        if self.closed:
            return None
        start = time.perf_counter_ns()
        try:
            return handler(*arguments)
        except Exception as error:
            self._fault(error)
            return None
        finally:
            self.hook_ns += time.perf_counter_ns() - start

    def _fault(self, error: Exception) -> None:
        """Stop the recording for a fault in a handler; raises it where that is wanted."""
        if self.options.on_error == "raise" or isinstance(error, UnsupportedError):
            raise error  # what cannot be watched without changing the run is no fault of ours
        self._give_up(error)

    # What follows runs at each call and gradient; so it is guarded in place, and the time that it takes is sampled.
    def _enter(self, watched: Watched, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.closed:
            return None
        try:
            call = self.tracker.begin(watched)
            if self.tracker.stale:
                self._record_stale()
            changed = (
                self._before(call, module, args, kwargs)
                if watched.wanted and watched.due and self.tracker.follows_calls
                else None
            )
            if not call.seq % _SAMPLED:
                self.hook_ns += (self.tracker.now_ns() - call.start_ns) * _SAMPLED
            return changed
        except Exception as error:
            self._fault(error)
            return None

    def _leave(self, watched: Watched, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.closed:
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
                self.hook_ns += (self.tracker.now_ns() - now) * _SAMPLED
        except Exception as error:
            self._fault(error)

    def _gradient(self, call: LiveCall, kind: str, slot: str, note: str | None, gradient: Any) -> None:
        if self.closed:
            return
        try:
            now = self.tracker.now_ns()
            seq = self._came(call, now, kind, slot, note, gradient)
            if not seq % _SAMPLED:
                self.hook_ns += (self.tracker.now_ns() - now) * _SAMPLED
        except Exception as error:
            self._fault(error)

    def begin_running_call(self, watched: Watched, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call that the framework has begun already; aliases of its inputs come too late and are left out."""
        call = self.tracker.begin(watched)
        if self.tracker.stale:
            self._record_stale()
        if watched.wanted and watched.due and self.active:
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
            for slot, tensor in argument_leaves(bind_arguments(call.watched.input_names, args, kwargs), self._types):
                self.value(call, "input", slot, tensor)
        return self._alias_inputs(call, module, args, kwargs) if alias and self._wants_grad_input else None

    def _after(self, call: LiveCall, now: int, module: Any, output: Any) -> None:
        if call.recorded:
            self._call_row(call, now, None)
        if call.aliases is not None:
            aliases, call.aliases = call.aliases, None
            aliases.settle(f"{call.watched.type} at '{call.watched.name}'")
        if not (self._wants_output or self._wants_grad_output):
            return
        for slot, tensor in leaves(output, self._types):
            if self._wants_output and call.recorded:
                self.value(call, "output", slot, tensor)
            if self._wants_grad_output and call.expects_gradient:
                self._tap(call, "grad_output", slot, tensor, module)

    def op_ended(self, call: LiveCall, output: Any, error: str | None) -> None:
        """Record a functional call; one that raised has no output."""
        if call.recorded:
            self._call_row(call, self.tracker.now_ns(), error)
        for slot, tensor in () if error else leaves(output, self._types):
            if self._wants_output and call.recorded:
                self.value(call, "output", slot, tensor)
            if self._wants_grad_output:
                self._tap(call, "grad_output", slot, tensor, None)

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
        stopped = self.backend.is_early_stop(error)  # a recomputation that has all it needs: no error of anybody
        if call.recorded:
            self._call_row(call, self.tracker.now_ns(), None if stopped else f"{type(error).__name__}: {error}")
        if self.options.note_errors and call.followed and not stopped:
            place = f"call {call.number} of step {call.step}"
            note_error(
                error,
                call_note(self.backend, watched.path, module, args, kwargs, names=watched.input_names, call=place),
            )

    def abandon_open_calls(self, error: BaseException | None) -> None:
        """Record the calls that never came to their end (an interrupt goes past all hooks)."""
        text = "did not end" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")
        self._never_ended(self.tracker.abandon(), text)

    def _record_stale(self) -> None:
        stale, self.tracker.stale = self.tracker.stale, []
        self._never_ended(stale, "did not end")

    def _never_ended(self, calls: Iterable[LiveCall], text: str) -> None:
        for call in calls:
            if call.aliases is not None:
                call.aliases.drop()
                call.aliases = None
            if call.recorded:
                self._call_row(call, self.tracker.now_ns(), text)

    def _call_row(self, call: LiveCall, now: int, error: str | None) -> None:
        parent = call.parent
        watched = call.watched
        self._add_call(
            (
                watched.site(), call.seq, call.step, call.number, call.phase, 0, call.depth,
                None if parent is None else parent.seq, None if call.forward is None else call.forward.seq,
                call.thread, call.start_ns, None if error else now - call.start_ns, error, call.source,
            )
        )  # fmt: skip
        if self._listener is not None:
            self._listener("raised" if error else "end", call, "", "", error)

    def _add_call(self, row: tuple[Any, ...]) -> None:
        with self._lock:
            self._calls.extend(row)
            self.calls_recorded += 1
            if len(self._calls) >= _BLOCK_ROWS * _CALL_ITEMS:
                self._flush_calls()

    # --- values ----------------------------------------------------------------------------------------------------
    def value(
        self, call: LiveCall, kind: str, slot: str, tensor: Any, *, backward: bool = False, note: str | None = None
    ) -> int:
        """Record one tensor of a call, ``backward`` of its backward pass; returns the number of the event."""
        watched = call.watched
        seq = self.tracker.next_seq()
        site = watched.sites.get((kind, slot)) or watched.site(kind, slot)
        key = None
        if self._extra or watched.keep:
            tensor, key, note = self._prepare(watched, kind, seq, tensor, note)
        shape, dtype, device = self.backend.summary(tensor)
        shard = self.backend.shard_offset(tensor)
        with self._lock:
            block = self._block if self._block.used < self._block.capacity else self._next_block()
            row = block.used
            block.used += 1
            why = self.backend.measure(tensor, block.buffer, row) if self._measures else None
            block.cells += (
                (row, site, seq, call.backward_seq, call.step, call.number, "backward", call.pass_number,
                 shape, shard, dtype, device, key, why or note)
                if backward else
                (row, site, seq, call.seq, call.step, call.number, call.phase, 0, shape, shard, dtype, device, key, why or note)
            )  # fmt: skip
            self.values_recorded += 1
        if self._listener is not None:
            self._listener("backward" if backward else "value", call, kind, slot, tensor)
        return seq

    def parameter_value(self, watched: Watched, kind: str, name: str, tensor: Any, step: int) -> None:
        """Record a parameter, its gradient or its update; belongs to no call."""
        seq = self.tracker.next_seq()
        tensor, key, note = self._prepare(watched, kind, seq, tensor, None)
        shape, dtype, device = self.backend.summary(tensor)
        shard = self.backend.shard_offset(tensor)
        with self._lock:
            block = self._block if self._block.used < self._block.capacity else self._next_block()
            row = block.used
            block.used += 1
            why = self.backend.measure(tensor, block.buffer, row) if self._measures else None
            block.cells += (
                row, watched.site(kind, name), seq, None, step, None, None, None, shape, shard, dtype, device, key, why or note
            )  # fmt: skip
            self.values_recorded += 1

    def missing_gradient(self, call: LiveCall, kind: str, slot: str, note: str) -> None:
        """Record that a gradient never came: None, which is not zero."""
        watched = call.watched
        with self._lock:
            block = self._block if self._block.used < self._block.capacity else self._next_block()
            row = block.used
            block.used += 1
            block.cells += (
                row, watched.site(kind, slot), self.tracker.next_seq(), call.backward_seq, call.step, call.number,
                "backward", call.pass_number, None, None, "none", None, None, note,
            )  # fmt: skip
            self.values_recorded += 1

    def _unscale(self, gradient: Any) -> tuple[Any, str | None]:
        """Take loss scaling out of a gradient; the scale is asked for once a pass, since that may wait for the device."""
        token = self.backend.backward_token()
        if token != self._scale[0] or token == -1:
            self._scale = (token, float(self.options.scaler.get_scale()))
        scale = self._scale[1]
        return (gradient, None) if scale == 1 else (self.backend.unscaled(gradient, scale), f"unscaled by {scale:g}")

    def _prepare(
        self, watched: Watched, kind: str, seq: int, tensor: Any, note: str | None
    ) -> tuple[Any, str | None, str | None]:
        """Take loss scaling out of a gradient and keep the tensor, where that is wanted; returns tensor, key and note."""
        if self.options.scaler is not None and kind in _GRADIENTS:
            tensor, unscaled = self._unscale(tensor)
            note = unscaled if note is None or unscaled is None else f"{note}; {unscaled}"
        key = None
        if watched.keep:
            kept = self.backend.keep(tensor, self.options.tensors_dtype)
            key = str(seq)
            if not self.sink.write_tensor(key, self.backend.to_numpy(kept) if self.options.to_numpy else kept):
                key = None  # over budget, or the disk is full: the manifest says so
        return tensor, key, note

    def _next_block(self) -> ValueBlock:
        self._flush_values()
        return self._block

    # --- backward --------------------------------------------------------------------------------------------------
    def _tap(
        self, call: LiveCall, kind: str, slot: str, tensor: Any, module: Any, note: str | None = None
    ) -> Detachable | None:
        tap = self.backend.tap(tensor, partial(self._gradient, call, kind, slot, note), module, self)
        watched = call.watched
        if isinstance(tap, str):
            watched.no_gradient[tap] += 1
            return None
        call.pending[kind, slot] = -1  # the backward pass that brought it last
        if self.backend.is_leaf(
            tensor
        ):  # its hooks outlive the graph: only the newest one stays, until the session ends
            old = self._leaf_taps.pop(key := (id(tensor), id(watched), slot), None)
            if old is not None:
                old.remove()
            self._leaf_taps[key] = tap
        return tap

    def _came(self, call: LiveCall, now: int, kind: str, slot: str, note: str | None, gradient: Any) -> int:
        # Checkpointing without reentry never differentiates what it recomputed; with reentry it differentiates only that.
        target = call.forward if call.forward is not None else call
        token = self.backend.backward_token()
        if target is not call and token != call.token:
            self._outer_passes[token] = call.token  # with reentry a region's gradients come in a pass of their own
        if target.token != token:
            self._begin_backward(target, token, now)
        target.watched.gradient_count += 1
        pending = call.pending
        pending[kind, slot] = token
        if len(pending) > 1:
            self._passes[token].calls.append(call)
        return self.value(target, kind, slot, gradient, backward=True, note=note)

    def _begin_backward(self, call: LiveCall, token: int, now: int) -> None:
        call.token = token
        call.pass_number += 1
        call.backward_seq = self.tracker.next_seq()
        if token not in self._passes:
            running = self._passes[token] = _Pass()
            if not self.backend.at_backward_end(partial(self.guarded, self._end_backward, token, running)):
                self._untold = running
        passes = [token]
        while passes[-1] in self._outer_passes:
            passes.append(self._outer_passes[passes[-1]])
        parent = call.parent
        while parent is not None and parent.token not in passes:
            parent = parent.parent
        call.backward_depth = 0 if parent is None else parent.backward_depth + 1
        watched = call.watched
        self._add_call(
            (
                watched.site(), call.backward_seq, call.step, call.number, "backward",
                call.pass_number, call.backward_depth, None if parent is None else parent.backward_seq, call.seq,
                self.tracker.thread(), now, None, None, call.source,
            )
        )  # fmt: skip

    def _end_backward(self, token: int, running: _Pass) -> None:
        """Tell the gradients that did not come from those that are zero."""
        self._outer_passes.pop(token, None)
        seen: set[int] = set()
        self._passes.pop(token, None)
        for call in running.calls:
            if id(call) in seen:
                continue
            seen.add(id(call))
            target = call.forward if call.forward is not None else call
            for (kind, slot), last in call.pending.items():
                if last != token:
                    self.missing_gradient(target, kind, slot, "no gradient: not used by what was differentiated")

    def _alias_inputs(self, call: LiveCall, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the module aliases of its inputs, so that the gradient seen is the one through this module."""
        names = call.watched.input_names
        call.aliases = aliases = InputAliases(self.backend)

        def tap(slot: str, tensor: Any, itself: bool) -> Detachable | None:
            return self._tap(call, "grad_input", slot, tensor, *((module, _IN_PLACE) if itself else (None,)))

        for slot, tensor in argument_leaves(bind_arguments(names, args, kwargs), self._types):
            if self.backend.wants_gradient(tensor):
                aliases.add(slot, tensor, tap if call.expects_gradient else None)
        if not aliases.by_slot:
            call.watched.no_gradient["no input requires a gradient"] += 1
            return None
        return replace_arguments(names, args, kwargs, aliases.by_slot)

    # --- handing over ----------------------------------------------------------------------------------------------
    def flush(self, *, wait: bool = True) -> bool:
        """Hand all rows gathered so far to the sink; False if some thread is busy with them and ``wait`` is not."""
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            self._flush_calls()
            self._flush_values()
        finally:
            self._lock.release()
        return True

    def _flush_calls(self) -> None:
        if self._calls:
            rows, self._calls = self._calls, []
            self.sink.write_calls(calls_batch(rows))

    def _flush_values(self) -> None:
        if self._block.cells:
            block, self._block = self._block, self._new_block()
            self.sink.write_values(block.batch())

    def forked(self) -> None:
        """End in a child of the process: its parent's other threads may hold the lock there for ever."""
        self._lock = threading.RLock()
        self.closed = True

    def close(self) -> None:
        """Take everything off and hand over what is left."""
        self.closed = True
        self.detach()
        for tap in list(self._leaf_taps.values()):
            tap.remove()
        self._leaf_taps.clear()
        self.tracker.release()
        try:
            self.flush()
        except Exception as error:  # a fault of ours, which must not end somebody's training
            if self.options.on_error == "raise":
                raise
            self._give_up(error)
