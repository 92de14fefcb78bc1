"""Functional calls between modules (``F.relu``, ``@``, ``flatten``) as rows of a recording.

Frameworks show functional calls only to a mode of the thread. It is entered when the outermost call of a followed model
begins and left when that call ends, in whichever thread, so that nothing sees calls outside the model. An op is what
gives a tensor; it is addressed by the module in which it runs and its name: ``(root)/relu#1``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from tenterhook.address import format_place
from tenterhook.backends import Backend, OpTrace
from tenterhook.calls import LiveCall, Watched
from tenterhook.capture import Capture
from tenterhook.errors import TenterhookError
from tenterhook.handles import in_callback
from tenterhook.selection import Entry
from tenterhook.values import leaves

__all__ = ["OpCapture", "check_ops"]

_Handler = Callable[..., Any]


class _Deaf:
    """A listener that wants to know nothing."""

    def begins(self, name: str, source: Callable[[], str | None]) -> None:
        pass

    def ends(self, begun: Any, output: Any, error: BaseException | None) -> None:
        pass

    def differentiated(self, begun: Any, slot: str, put_on: Callable[[Callable[[Any], None]], None]) -> None:
        pass


def check_ops(backend: Backend, fused: str) -> None:
    """Refuse what cannot be: functional calls of a framework that shows none, and fused paths beside them.

    Raises:
        UnsupportedError: the framework shows no functional calls.
        TenterhookError: fused paths are to be kept.
    """
    backend.trace_ops(_Deaf())
    if fused == "keep":
        raise TenterhookError(
            'ops=True leaves fused and compiled code, which fused="keep" is to keep\n  leave one of the two out'
        )


class OpCapture:
    """Follows functional calls for a :class:`tenterhook.capture.Capture`; told of them by the backend.

    Args:
        capture: follows the modules and makes the rows.
        implementation: record also what the framework's own modules call (``F.linear`` in ``nn.Linear``).
    """

    def __init__(self, capture: Capture, *, implementation: bool = False) -> None:
        self._capture = capture
        self._backend = capture.backend
        self._implementation = implementation
        self._modes: dict[int, OpTrace] = {}  # thread -> the mode that is on in it
        self._quiet: set[int] = set()  # threads in which code of ours runs
        self._followed: dict[Watched, bool] = {}
        self._ops: dict[tuple[Watched, str], Watched] = {}

    # --- around the calls of modules -------------------------------------------------------------------------------
    def around(self, before: _Handler, after: _Handler, failed: _Handler) -> tuple[_Handler, _Handler, _Handler]:
        """Wrap the handlers of one module's calls, so that the outermost call has the mode on."""
        return partial(self._before, before), partial(self._after, after), partial(self._after, failed)

    def _before(self, handler: _Handler, *arguments: Any) -> Any:
        returned = self._quietly(handler, *arguments)
        self.begin_running_call()
        return returned

    def begin_running_call(self) -> None:
        """Follow a call that begins, unless one around it is followed already."""
        thread = threading.get_ident()
        if thread not in self._modes and self._capture.active and not self._capture.closed:
            mode = self._backend.trace_ops(self)
            mode.__enter__()
            self._modes[thread] = mode

    def _after(self, handler: _Handler, *arguments: Any) -> Any:
        returned = self._quietly(handler, *arguments)
        if self._capture.tracker.running() is None:
            mode = self._modes.get(threading.get_ident())
            if mode is not None:
                self._quietly(self._capture.guarded, mode.gives, arguments[-1])
            self._leave()
        return returned

    def _quietly(self, handler: _Handler, *arguments: Any) -> Any:
        thread = threading.get_ident()
        if thread in self._quiet:
            return handler(*arguments)
        self._quiet.add(thread)
        try:
            return handler(*arguments)
        finally:
            self._quiet.discard(thread)

    def _leave(self) -> None:
        mode = self._modes.pop(threading.get_ident(), None)
        if mode is not None:
            mode.__exit__(None, None, None)

    def close(self) -> None:
        """Leave the mode, where an interrupt has gone past the end of the call; one in another thread is deaf from now on."""
        self._leave()

    # --- functional calls ------------------------------------------------------------------------------------------
    def begins(self, name: str, source: Callable[[], str | None]) -> LiveCall | None:
        """A functional call begins; returns None where it is not ours to record."""
        capture = self._capture
        if capture.closed or not capture.active or threading.get_ident() in self._quiet or in_callback():
            return None
        parent = capture.tracker.around_op()
        if parent is None or not parent.followed or not self._follows(parent.watched):
            return None
        return self._quietly(capture.guarded, self._begin, parent, name, source)

    def _begin(self, parent: LiveCall, name: str, source: Callable[[], str | None]) -> LiveCall:
        tracker = self._capture.tracker
        outer = parent if parent.recorded else parent.parent
        call = LiveCall(
            self._op(parent.watched, name), outer, tracker.next_seq(), parent.step, parent.thread, tracker.now_ns()
        )
        call.around = parent
        call.phase = parent.phase
        call.recorded = parent.recorded
        call.source = source()
        return call

    def ends(self, begun: LiveCall, output: Any, error: BaseException | None) -> None:
        """It has returned, or raised."""
        self._quietly(self._capture.guarded, self._end, begun, output, error)

    def _end(self, call: LiveCall, output: Any, error: BaseException | None) -> None:
        if error is None and not leaves(output, self._backend.tensor_types):
            return
        self._number(call)
        self._capture.op_ended(call, output, None if error is None else f"{type(error).__name__}: {error}")

    def differentiated(self, begun: LiveCall, slot: str, put_on: Callable[[Callable[[Any], None]], None]) -> None:
        """The framework has differentiated a call that has ended, and can tell of its gradient."""
        self._quietly(self._capture.guarded, self._capture.op_differentiated, begun, slot, put_on)

    def _number(self, call: LiveCall) -> None:
        watched, parent = call.watched, call.around
        assert parent is not None
        call.around = None
        ops = parent.ops = parent.ops if parent.ops is not None else []
        ops.append(call)
        repeated = parent.forward.ops if parent.forward is not None else None
        if repeated is not None and len(ops) <= len(repeated) and repeated[len(ops) - 1].watched is watched:
            call.forward = repeated[len(ops) - 1]  # a recomputation makes the same calls in the same order
            call.number = call.forward.number
            return
        self._capture.tracker.number_op(call)

    def _follows(self, watched: Watched) -> bool:
        """Whether functional calls in this module are the user's; those of the framework's modules are their implementation."""
        follows = self._followed.get(watched)
        if follows is None:
            module = watched.ref()
            follows = self._implementation or module is None or not self._backend.owns_forward(module)
            self._followed[watched] = follows
        return follows

    def _op(self, parent: Watched, name: str) -> Watched:
        op = self._ops.get((parent, name))
        if op is None:
            place = Entry(path=format_place(parent.path, op=name), module=parent.ref())
            op = Watched(parent.model, place, wanted=True, keep=parent.keep)
            op.type = "op"
            op = self._ops.setdefault((parent, name), op)  # another thread may have been first
        return op
