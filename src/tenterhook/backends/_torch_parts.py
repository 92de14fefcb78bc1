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

from tenterhook.backends._torch_checkpoint import callers, pass_reenters
from tenterhook.backends._torch_unseen import hiding

__all__ = ["Once", "Parts"]

_queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def _queue_callback(fn: Callable[[], None]) -> None:
    _queue(hiding(fn))


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
        if not pass_reenters():
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


class Sum:
    """The sum of the parts so far; held by the pass that it belongs to."""

    __slots__ = ("__weakref__", "before", "total")

    def __init__(self) -> None:
        self.total: Any = None
        self.before: torch.Tensor | None = None  # .grad as this pass found it

    def add(self, gradient: torch.Tensor) -> None:
        """Take one part in."""
        with torch.no_grad():
            # torch may go on adding to the very tensor that it gave us
            self.total = gradient.clone() if self.total is None else self.total + gradient


class Parts:
    """The parts of one parameter's gradient."""

    __slots__ = ("_leaf", "_sum")

    def __init__(self, leaf: torch.Tensor) -> None:
        self._leaf = weakref.ref(leaf)
        self._sum: weakref.ref[Sum] | None = None

    def waiting(self, give: Callable[[torch.Tensor], torch.Tensor | None]) -> Sum | None:
        """Return what this gradient is to be added to; None where it is all there is to come.

        At the end of the outermost pass ``give`` is called with the sum, and returns its replacement or None.
        """
        place = _region()
        known = None if self._sum is None else self._sum()
        leaf = self._leaf()
        if known is not None or leaf is None:
            return known
        begun = Sum()
        if not _at_outermost_end(partial(self._end, begun, give), *place):
            return None
        if leaf.grad is not None:
            with torch.no_grad():
                begun.before = leaf.grad.clone()
        self._sum = weakref.ref(begun)
        return begun

    def _end(self, whole: Sum, give: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._sum = None
        new = give(whole.total)
        leaf = self._leaf()
        if new is not None and leaf is not None:
            with torch.no_grad():
                leaf.grad = new if whole.before is None else whole.before + new


class Once:
    """Something that is done once a backward pass, at its end where it would be done in parts."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: weakref.ref[Sum] | None = None

    def wait(self, fn: Callable[[], None]) -> bool:
        """Have ``fn`` called at the end of the outermost pass, if it is not waiting already; False where it can run now."""
        place = _region()
        if self._waiting is not None and self._waiting() is not None:
            return True
        mark = Sum()
        if not _at_outermost_end(partial(self._end, mark, fn), *place):
            return False
        self._waiting = weakref.ref(mark)
        return True

    def _end(self, mark: Sum, fn: Callable[[], None]) -> None:
        self._waiting = None
        fn()
