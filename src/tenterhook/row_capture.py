"""Rows of a recording session: for calls, for values, with tensors kept where asked for, handed to a sink in blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tenterhook.backends import Backend
from tenterhook.calls import LiveCall, Watched
from tenterhook.recording.blocks import CALL_ITEMS, ValueBlock, calls_batch
from tenterhook.recording.memory import Alias
from tenterhook.recording.sink import Sink
from tenterhook.tracker import Tracker

__all__ = ["CaptureOptions", "EventListener", "RowCapture"]

_BLOCK_ROWS = 2048
_CALL_ITEMS = len(CALL_ITEMS)
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
        self.calls_recorded = 0
        self.values_recorded = 0
        self._scale: tuple[int, float] = (-1, 1.0)  # backward pass, its loss scale
        self._measures = options.statistics
        self._extra = options.scaler is not None
        self._lock = threading.RLock()
        self._calls: list[Any] = []  # the items of the rows, one row after the other
        self._block = self._new_block()

    def _new_block(self) -> ValueBlock:
        return ValueBlock(
            _BLOCK_ROWS, sketch=self._options.statistics and self._options.sketch, digest=self._options.statistics
        )

    # --- calls -----------------------------------------------------------------------------------------------------
    def call(self, call: LiveCall, now: int, error: str | None) -> None:
        """Record a call that has ended, at ``now`` by the tracker's clock."""
        parent = call.parent
        self._add_call(
            (
                call.watched.site(), call.seq, call.step, call.number, call.phase, 0, call.depth,
                None if parent is None else parent.seq, None if call.forward is None else call.forward.seq,
                call.thread, call.start_ns, None if error else now - call.start_ns, error, call.source,
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
        seq = self._tracker.next_seq()
        site = watched.sites.get((kind, slot)) or watched.site(kind, slot)
        key = None
        if self._extra or watched.keep:
            tensor, key, note = self._prepare(watched, kind, seq, tensor, note)
        shape, dtype, device = self._backend.summary(tensor)
        shard = self._backend.shard_offset(tensor)
        with self._lock:
            block = self._block if self._block.used < self._block.capacity else self._next_block()
            row = block.used
            block.used += 1
            why = self._backend.measure(tensor, block.buffer, row) if self._measures else None
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
        seq = self._tracker.next_seq()
        tensor, key, note = self._prepare(watched, kind, seq, tensor, None)
        shape, dtype, device = self._backend.summary(tensor)
        shard = self._backend.shard_offset(tensor)
        with self._lock:
            block = self._block if self._block.used < self._block.capacity else self._next_block()
            row = block.used
            block.used += 1
            why = self._backend.measure(tensor, block.buffer, row) if self._measures else None
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
                row, watched.site(kind, slot), self._tracker.next_seq(), call.backward_seq, call.step, call.number,
                "backward", call.pass_number, None, None, "none", None, None, note,
            )  # fmt: skip
            self.values_recorded += 1

    def missing_parameter(self, watched: Watched, kind: str, name: str, step: int, note: str) -> None:
        """Record why there is nothing to say of a parameter."""
        with self._lock:
            block = self._block if self._block.used < self._block.capacity else self._next_block()
            row = block.used
            block.used += 1
            block.cells += (
                row, watched.site(kind, name), self._tracker.next_seq(), None, step, None,
                None, None, None, None, "none", None, None, note,
            )  # fmt: skip
            self.values_recorded += 1

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
            note = unscaled if note is None or unscaled is None else f"{note}; {unscaled}"
        key = None
        if watched.keep:
            key = str(seq)
            if not self._sink.write_tensor(key, self._kept(tensor)):
                key = None  # over budget, or the disk is full: the manifest says so
        return tensor, key, note

    def _kept(self, tensor: Any) -> Any:
        """What the sink is to store: a copy, or a reference that knows when it is out of date."""
        backend, options = self._backend, self._options
        if options.alias and (reference := backend.reference(tensor)) is not None:
            version = backend.version(reference)
            return Alias(reference, lambda: backend.version(reference) != version)
        kept = backend.keep(tensor, options.tensors_dtype)
        return backend.to_numpy(kept) if options.to_numpy else kept

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

    def send(self) -> None:
        """Begin to bring over what devices have measured, without waiting for it."""
        with self._lock:
            if self._block.buffer.deferred:
                self._block.buffer.send()

    def _next_block(self) -> ValueBlock:
        self._flush_values()
        return self._block

    def _flush_calls(self) -> None:
        if self._calls:
            rows, self._calls = self._calls, []
            self._sink.write_calls(calls_batch(rows))

    def _flush_values(self) -> None:
        if self._block.cells:
            block, self._block = self._block, self._new_block()
            self._sink.write_values(block.batch())

    def forked(self) -> None:
        """Go on in a child of the process, where the parent's other threads may have held the lock."""
        self._lock = threading.RLock()
