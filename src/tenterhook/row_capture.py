"""Rows of a recording session: for calls, for values, with tensors kept where asked for, handed to a sink in blocks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tenterhook.backends import Backend
from tenterhook.calls import LiveCall, Watched
from tenterhook.native import measured_by
from tenterhook.recording.blocks import CallBlock, ValueBlock
from tenterhook.recording.memory import Alias
from tenterhook.recording.refused import not_kept, plain_array
from tenterhook.recording.sink import Sink
from tenterhook.tracker import Tracker

__all__ = ["CaptureOptions", "EventListener", "RowCapture"]

_BLOCK_ROWS = 4096
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
    alias: bool = False  # kept tensors are references, no copies, where the framework can tell later changes
    to_numpy: bool = False  # the sink stores arrays, not the framework's own tensors
    note_errors: bool = True  # errors of the user's model get a note; not those of a script, whose traceback is its own


class RowCapture:
    """Makes the rows of one session and hands them over; may be used by several threads."""

    def __init__(
        self,
        backend: Backend,
        sink: Sink,
        options: CaptureOptions,
        tracker: Tracker,
        listener: EventListener | None = None,
    ) -> None:
        self._backend = backend
        self._sink = sink
        self._options = options
        self._tracker = tracker
        self._listener = listener
        self._calls_recorded = 0
        self._values_recorded = 0
        self._scale: tuple[int, float] = (-1, 1.0)  # backward pass, its loss scale
        self._measures = options.statistics
        self._extra = options.scaler is not None
        self._lock = threading.RLock()
        self.unsure_rows = 0  # of which it is not known whether they have reached the sink
        self._engine: Any = None
        self._calls = CallBlock(_BLOCK_ROWS)
        self._block = self._new_block()

    @property
    def calls_recorded(self) -> int:
        """Rows of calls so far."""
        return self._calls_recorded + (self._engine.calls_recorded if self._engine is not None else 0)

    @property
    def values_recorded(self) -> int:
        """Rows of values so far."""
        return self._values_recorded + (self._engine.values_recorded if self._engine is not None else 0)

    def use(self, engine: Any) -> None:
        """Have the native path write to the same blocks."""
        self._engine = engine
        engine.measures = self._measures
        engine.calls_full, engine.values_full = self._calls_full, self._values_full
        engine.acquire, engine.release = self._lock.acquire, self._lock.release
        engine.value = partial(self.value, backward=True)
        self._show_blocks()

    def _show_blocks(self) -> None:
        if self._engine is not None:
            self._engine.use(self._calls.table, self._block.table, measured_by(self._block.buffer))

    def _calls_full(self) -> None:
        with self._lock:
            if self._calls.table.used >= self._calls.table.capacity:
                self._flush_calls()

    def _values_full(self) -> None:
        with self._lock:
            if self._block.table.reserved >= self._block.table.capacity:
                self._flush_values()

    def _new_block(self, after: ValueBlock | None = None) -> ValueBlock:
        statistics, sketch = self._options.statistics, self._options.sketch
        return ValueBlock(_BLOCK_ROWS, sketch=statistics and sketch, digest=statistics, after=after)

    # --- calls -----------------------------------------------------------------------------------------------------
    def call(self, call: LiveCall, now: int | None, error: str | None) -> None:
        """Record a call that has ended, at ``now`` by the tracker's clock; None where nobody saw the end."""
        parent = call.parent
        self._add_call(
            (
                call.watched.site(), call.seq, call.step, call.number, call.phase, 0, call.depth,
                None if parent is None else parent.seq, None if call.forward is None else call.forward.seq,
                call.thread, call.start_ns, None if error or now is None else now - call.start_ns, error, call.source,
            )
        )  # fmt: skip
        if self._listener is not None:
            self._listener("raised" if error else "end", call, "", "", error)

    def backward_call(self, call: LiveCall, now: int, parent: LiveCall | None) -> None:
        """Record that a backward pass has reached a call, by way of ``parent``."""
        self._add_call(
            (
                call.watched.site(), call.backward_seq, call.step, call.number, "backward",
                call.pass_number, call.backward_depth, None if parent is None else parent.backward_seq, call.seq,
                self._tracker.thread(), now, None, None, call.source,
            )
        )  # fmt: skip

    def _add_call(self, row: tuple[Any, ...]) -> None:
        with self._lock:
            while not self._calls.table.add(row):
                self._flush_calls()
            self._calls_recorded += 1

    # --- values ----------------------------------------------------------------------------------------------------
    def value(
        self, call: LiveCall, kind: str, slot: str, tensor: Any, *, backward: bool = False, note: str | None = None
    ) -> int:
        """Record one tensor of a call, ``backward`` of its backward pass; returns the number of the event."""
        watched = call.watched
        seq = self._tracker.next_seq()
        site = watched.sites.get((kind, slot)) or watched.site(kind, slot)
        key = None
        if self._extra or watched.keep:
            tensor, key, note = self._prepare(watched, kind, seq, tensor, note)
        shape, dtype, device = self._backend.summary(tensor)
        shard = self._backend.shard_offset(tensor)
        with self._lock:
            block, row = self._next_row()
            why = self._backend.measure(tensor, block.buffer, row) if self._measures else None
            block.table.add(
                (row, site, seq, call.backward_seq, call.step, call.number, "backward", call.pass_number,
                 shape, shard, dtype, device, key, _both(why, note))
                if backward else
                (row, site, seq, call.seq, call.step, call.number, call.phase, 0, shape, shard, dtype, device, key, _both(why, note))
            )  # fmt: skip
            self._values_recorded += 1
        if self._listener is not None:
            self._listener("backward" if backward else "value", call, kind, slot, tensor)
        return seq

    def parameter_value(self, watched: Watched, kind: str, name: str, tensor: Any, step: int) -> None:
        """Record a parameter, its gradient or its update; belongs to no call."""
        site = watched.site(kind, name)
        native = None if self._extra or watched.keep else self._engine
        if native is not None and native.record(site, tensor, step):
            return
        seq = self._tracker.next_seq()
        tensor, key, note = self._prepare(watched, kind, seq, tensor, None)
        shape, dtype, device = self._backend.summary(tensor)
        shard = self._backend.shard_offset(tensor)
        with self._lock:
            block, row = self._next_row()
            why = self._backend.measure(tensor, block.buffer, row) if self._measures else None
            block.table.add(
                (row, site, seq, None, step, None, None, None, shape, shard, dtype, device, key, _both(why, note))
            )  # fmt: skip
            self._values_recorded += 1

    def missing_gradient(self, call: LiveCall, kind: str, slot: str, note: str) -> None:
        """Record that a gradient never came: None, which is not zero."""
        watched = call.watched
        with self._lock:
            block, row = self._next_row()
            block.table.add(
                (row, watched.site(kind, slot), self._tracker.next_seq(), call.backward_seq, call.step, call.number,
                 "backward", call.pass_number, None, None, "none", None, None, note)
            )  # fmt: skip
            self._values_recorded += 1

    def missing_parameter(self, watched: Watched, kind: str, name: str, step: int, note: str) -> None:
        """Record why there is nothing to say of a parameter."""
        with self._lock:
            block, row = self._next_row()
            block.table.add(
                (row, watched.site(kind, name), self._tracker.next_seq(), None, step, None,
                 None, None, None, None, "none", None, None, note)
            )  # fmt: skip
            self._values_recorded += 1

    def _unscale(self, gradient: Any) -> tuple[Any, str | None]:
        """Take loss scaling out of a gradient; the scale is asked for once a pass, since that may wait for the device."""
        token = self._backend.backward_token()
        if token != self._scale[0] or token == -1:
            self._scale = (token, float(self._options.scaler.get_scale()))
        scale = self._scale[1]
        return (gradient, None) if scale == 1 else (self._backend.unscaled(gradient, scale), f"unscaled by {scale:g}")

    def _prepare(
        self, watched: Watched, kind: str, seq: int, tensor: Any, note: str | None
    ) -> tuple[Any, str | None, str | None]:
        """Take loss scaling out of a gradient and keep the tensor, where that is wanted; returns tensor, key and note."""
        if self._options.scaler is not None and kind in _GRADIENTS:
            tensor, unscaled = self._unscale(tensor)
            note = _both(note, unscaled)
        key = None
        if watched.keep:
            try:
                kept = self._kept(tensor)
            except Exception as refusal:  # broad: a class of tensors, which may be the user's, refuses in its own way
                return tensor, None, _both(note, not_kept(tensor, refusal))
            key = str(seq)
            if not self._sink.write_tensor(key, kept):
                key = None  # over budget, or the disk is full: the manifest says so
        return tensor, key, note

    def _kept(self, tensor: Any) -> Any:
        """What the sink is to store: a copy, or a reference that knows when it is out of date."""
        backend, options = self._backend, self._options
        if options.alias and (reference := backend.reference(tensor)) is not None:
            version = backend.version(reference)
            return Alias(reference, lambda: backend.version(reference) != version)
        kept = backend.keep(tensor, options.tensors_dtype)
        return plain_array(backend.to_numpy(kept)) if options.to_numpy else kept

    # --- handing over ----------------------------------------------------------------------------------------------
    def flush(self, *, wait: bool = True) -> bool:
        """Hand all rows gathered so far to the sink; False if some thread is busy with them and ``wait`` is not."""
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            with contextlib.ExitStack() as both:  # the one also where Ctrl-C comes in the other
                both.callback(self._flush_values)
                self._flush_calls()
        finally:
            self._lock.release()
        return True

    def send(self) -> None:
        """Begin to bring over what devices have measured, without waiting for it."""
        with self._lock:
            if self._block.buffer.deferred:
                self._block.buffer.send()

    def _next_row(self) -> tuple[ValueBlock, int]:
        """Return the block to write to, and the number of a row that is free in it."""
        while (row := self._block.table.reserve()) < 0:
            self._flush_values()
        return self._block, row

    # From the exchange of a block on nobody writes to the old one: Python code holds the lock, native code the GIL.
    def _flush_calls(self) -> None:
        block = self._calls
        if block.table.used:
            with self._handing(block.table.used):
                self._calls = CallBlock(_BLOCK_ROWS, block)
                self._show_blocks()
                self._sink.write_calls(block.batch())

    def _flush_values(self) -> None:
        block = self._block
        if block.table.reserved:
            with self._handing(block.table.used):
                self._block = self._new_block(block)
                self._show_blocks()
                if block.table.used:
                    self._sink.write_values(block.batch())

    @contextlib.contextmanager
    def _handing(self, rows: int) -> Iterator[None]:
        """Note that rows may be missing where Ctrl-C comes while they are handed over; a fault is told anyway."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.unsure_rows += rows
            raise

    def forked(self) -> None:
        """Go on in a child of the process, where the parent's other threads may have held the lock."""
        self._lock = threading.RLock()
        if self._engine is not None:
            self._engine.acquire, self._engine.release = self._lock.acquire, self._lock.release


def _both(first: str | None, second: str | None) -> str | None:
    """Put two notes on one value together."""
    return f"{first}; {second}" if first and second else first or second
