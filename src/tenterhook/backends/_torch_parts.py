"""A parameter's gradient that comes in parts, put together to that of the whole backward pass.

Checkpointing with reentry differentiates each region in a backward pass of its own, inside of the pass that the user began. A
parameter of several regions, or of one and of the rest, gets a part in each. The parts flow on to ``.grad`` as they come; their
sum is given to callbacks at the end of the outermost pass, and what they put in its place is put into ``.grad``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch

from tenterhook.backends._torch_checkpoint import callers, reentry_is_possible

__all__ = ["Once", "Parts"]

_queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


class _Rerun:
    """One region that is being differentiated by itself, the outermost of its thread, and what is to be done after it."""

    __slots__ = ("__weakref__", "ends", "mark")

    def __init__(self, mark: weakref.ref[Any] | None) -> None:
        self.mark = mark  # something that lives as long as this run of the region
        self.ends: list[Callable[[], None]] = []


_reruns: dict[int, _Rerun] = {}  # by thread


def _region() -> tuple[FrameType | None, Any]:
    """Return the frame of the outermost region that runs again around the present backward pass, and its mark.

    What is left of a pass that failed is forgotten here.
    """
    outermost: FrameType | None = None
    for frame in _region_frames():
        outermost = frame
    arguments = () if outermost is None else outermost.f_locals.get("args", ())
    mark = next((one for one in arguments if isinstance(one, torch.Tensor)), None)
    thread = threading.get_ident()
    known = _reruns.get(thread)
    if known is not None and (outermost is None or known.mark is None or known.mark() is not mark):
        del _reruns[thread]
    return outermost, mark


def _at_outermost_end(fn: Callable[[], None], frame: FrameType | None, mark: Any) -> bool:
    """Call ``fn`` when the outermost backward pass ends; False where that is the present one and nothing comes in parts."""
    if frame is None:
        if not reentry_is_possible():
            return False
        _queue_callback(fn)
        return True
    thread = threading.get_ident()
    rerun = _reruns.get(thread)
    if rerun is None:
        rerun = _reruns[thread] = _Rerun(None if mark is None else weakref.ref(mark))
        reference = weakref.ref(rerun)

        def region_ended(*gradients: Any) -> None:
            handle.remove()
            ended = reference()
            if ended is not None and _reruns.get(thread) is ended:
                del _reruns[thread]
                for end in ended.ends:  # we are in the outermost pass again
                    _queue_callback(end)

        handle = frame.f_locals["ctx"].register_hook(region_ended)
    rerun.ends.append(fn)
    return True


def _region_frames() -> Iterator[FrameType]:
    for frame in callers():
        if frame.f_code.co_name == "backward" and hasattr(frame.f_locals.get("ctx"), "run_function"):
            yield frame


class _Held:
    """The sum so far, held by the pass that it belongs to."""

    __slots__ = ("__weakref__", "before", "total")

    def __init__(self, total: Any, before: torch.Tensor | None) -> None:
        self.total = total
        self.before = before  # .grad as this pass found it


class Parts:
    """The parts of one parameter's gradient."""

    __slots__ = ("_held", "_leaf")

    def __init__(self, leaf: torch.Tensor) -> None:
        self._leaf = weakref.ref(leaf)
        self._held: weakref.ref[_Held] | None = None

    def hold_back(self, gradient: torch.Tensor, give: Callable[[torch.Tensor], torch.Tensor | None]) -> bool:
        """Take one part in, and give the sum at the end; False where this gradient is all there is to come.

        ``give`` is called with the gradient of the whole pass, and returns its replacement or None.
        """
        place = _region()
        held = None if self._held is None else self._held()
        if held is not None:
            with torch.no_grad():
                held.total = held.total + gradient
            return True
        leaf = self._leaf()
        if leaf is None:
            return False
        held = _Held(gradient, None)
        if not _at_outermost_end(partial(self._end, held, give), *place):
            return False
        with torch.no_grad():
            held.total = gradient.clone()  # torch may go on adding to this very tensor
            held.before = None if leaf.grad is None else leaf.grad.clone()
        self._held = weakref.ref(held)
        return True

    def _end(self, held: _Held, give: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._held = None
        new = give(held.total)
        leaf = self._leaf()
        if new is not None and leaf is not None:
            with torch.no_grad():
                leaf.grad = new if held.before is None else held.before + new


class Once:
    """Something that is done once a backward pass, at its end where it would be done in parts."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: weakref.ref[_Held] | None = None

    def wait(self, fn: Callable[[], None]) -> bool:
        """Have ``fn`` called at the end of the outermost pass, if it is not waiting already; False where it can run now."""
        place = _region()
        if self._waiting is not None and self._waiting() is not None:
            return True
        held = _Held(None, None)
        if not _at_outermost_end(partial(self._end, held, fn), *place):
            return False
        self._waiting = weakref.ref(held)
        return True

    def _end(self, held: _Held, fn: Callable[[], None]) -> None:
        self._waiting = None
        fn()
