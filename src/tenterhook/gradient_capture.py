"""Gradients of a recording session: taps on the outputs and inputs of calls, and what each backward pass brings to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tenterhook.aliasing import InputAliases
from tenterhook.backends import Backend, Detachable
from tenterhook.backward_passes import RunningPass
from tenterhook.calls import LiveCall
from tenterhook.leaf_taps import LeafTaps
from tenterhook.row_capture import RowCapture
from tenterhook.tracker import Tracker
from tenterhook.values import argument_leaves, bind_arguments, no_tensor_in

__all__ = ["NO_INPUT", "GradientCapture"]

NO_INPUT = "no input requires a gradient"

_IN_PLACE = "changed in place by the module: gradient of the tensor as it came, earlier uses of it included"


def _nothing(*arguments: object) -> None:
    pass


class GradientCapture:
    """Taps gradients and records them as they come.

    Args:
        backend: the framework.
        tracker: knows the calls.
        rows: makes the rows.
        arrived: what a tap calls: ``(call, kind, slot, note, gradient)``; guards :meth:`came`.
        guarded: runs a handler of ours.
    """

    def __init__(
        self,
        backend: Backend,
        tracker: Tracker,
        rows: RowCapture,
        arrived: Callable[..., None],
        guarded: Callable[..., Any],
    ) -> None:
        self._backend = backend
        self._tracker = tracker
        self._rows = rows
        self._arrived = arrived
        self._guarded = guarded
        self.told: list[str] = []
        """What of the gradients could not be taken, as sentences."""
        self._leaf_taps = LeafTaps(self.told.append)
        self._turn = 0  # backward passes so far
        self._outer_passes: dict[int, int] = {}  # backward pass -> the one that it runs inside of
        self._passes: weakref.WeakValueDictionary[int, RunningPass[LiveCall]] = weakref.WeakValueDictionary()
        self._engine: Any = None
        self._untold: RunningPass[LiveCall] | None = None  # the newest, where the framework tells no end of a pass

    def use(self, engine: Any) -> None:
        """Have the native path take plain gradients."""
        self._engine = engine
        engine.owner, engine.came, engine.outer_passes = self, self._arrived, self._outer_passes

    def tap(
        self, call: LiveCall, kind: str, slot: str, tensor: Any, module: Any, note: str | None = None
    ) -> Detachable | None:
        """Wait for the gradient of a tensor; None where none can come, which is counted."""
        tap = self._tap(call, kind, slot, tensor, module, note)
        if isinstance(tap, str):
            call.watched.no_gradient[tap] += 1
            return None
        return tap

    def tap_output(self, call: LiveCall, found: Sequence[tuple[str, Any]], module: Any, output: Any) -> None:
        """Wait for the gradients of what a call gave; why none can come is counted where there is no tensor to which one can."""
        taps = [self._tap(call, "grad_output", slot, tensor, module, None) for slot, tensor in found]
        if all(isinstance(tap, str) for tap in taps):
            for reason in taps or [no_tensor_in(output)]:
                call.watched.no_gradient[reason] += 1  # type: ignore[index] - all are text

    def _tap(
        self, call: LiveCall, kind: str, slot: str, tensor: Any, module: Any, note: str | None
    ) -> Detachable | str | None:
        watched = call.watched
        is_leaf = self._backend.is_leaf(tensor)
        place = (id(watched), slot)
        if is_leaf and call.forward is not None and self._leaf_taps.has(tensor, place):
            return None  # without reentry it is the call that is repeated here whose gradient comes
        tap = self._backend.tap(tensor, partial(self._arrived, call, kind, slot, note), module, self)
        if isinstance(tap, str):
            return tap
        call.expect(kind, slot)
        if is_leaf:
            self._leaf_taps.keep(tensor, place, tap, self._turn)
        return tap

    def alias_inputs(self, call: LiveCall, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the module aliases of its inputs, so that the gradient seen is the one through this module."""
        names = call.watched.input_names
        call.aliases = aliases = InputAliases(self._backend)

        def tap(slot: str, tensor: Any, itself: bool) -> Detachable | None:
            return self.tap(call, "grad_input", slot, tensor, *((module, _IN_PLACE) if itself else (None,)))

        types = self._backend.tensor_types
        for slot, tensor in argument_leaves(bind_arguments(names, args, kwargs), types):
            if self._backend.wants_gradient(tensor):
                aliases.add(slot, tensor, tap if call.expects_gradient else None)
        if not aliases.by_slot:
            if self._backend.tracks_gradients():  # with reentry a region is run without, and again for its gradients
                call.watched.no_gradient[NO_INPUT] += 1
            return None
        return aliases.given(names, args, kwargs)

    def came(self, call: LiveCall, now: int, kind: str, slot: str, note: str | None, gradient: Any) -> int:
        """Record a gradient; returns the number of the event."""
        # Checkpointing without reentry never differentiates what it recomputed; with reentry it differentiates only that.
        target = call.forward if call.forward is not None else call
        token = self._backend.backward_token()
        if target is not call and token != call.token:
            self._outer_passes[token] = call.token  # with reentry a region's gradients come in a pass of their own
        if target.token != token:
            self._begin_backward(target, token, now)
        target.watched.gradient_count += 1
        if call.expect(kind, slot, token) > 1:
            self._passes[token].calls.append(call)
        return self._rows.value(target, kind, slot, gradient, backward=True, note=note)

    def _begin_backward(self, call: LiveCall, token: int, now: int) -> None:
        call.token = token
        call.pass_number += 1
        call.backward_seq = self._tracker.next_seq()
        if token not in self._passes:
            running = self._passes[token] = RunningPass()
            self._turn += 1
            if not self._backend.at_backward_end(partial(self._guarded, self._end_backward, token, running)):
                self._untold = running
        if self._engine is not None:
            self._engine.pass_token = token  # the rest of its plain gradients are native
        passes = [token]
        while passes[-1] in self._outer_passes:
            passes.append(self._outer_passes[passes[-1]])
        parent = call.parent
        while parent is not None and parent.token not in passes:
            parent = parent.parent
        call.backward_depth = 0 if parent is None else parent.backward_depth + 1
        self._rows.backward_call(call, now, parent)

    def _end_backward(self, token: int, running: RunningPass[LiveCall]) -> None:
        """Tell the gradients that did not come from those that are zero."""
        self._outer_passes.pop(token, None)
        seen: set[int] = set()
        self._passes.pop(token, None)
        if self._engine is not None and self._engine.pass_token == token:
            self._engine.pass_token = -2
        for call in running.calls:
            if id(call) in seen:
                continue
            seen.add(id(call))
            target = call.forward if call.forward is not None else call
            for (kind, slot), last in call.pending.items():
                if last != token:
                    self._rows.missing_gradient(target, kind, slot, "no gradient: not used by what was differentiated")

    def close(self) -> None:
        """Take off the taps that outlive their graph, and let go of the session."""
        self._arrived = self._guarded = _nothing
        self._leaf_taps.remove(self._turn)
