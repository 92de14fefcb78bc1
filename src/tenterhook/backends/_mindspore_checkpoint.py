"""Recomputation in MindSpore: which parts of a forward will run again in the backward pass, and what is to be done then.

A cell that recomputes (``Cell.recompute()``, ``ms.recompute``) keeps the arguments of its calls on a stack, and its
``bprop`` runs the last of them again; without reentry a handle keeps a function that does. What is asked for is kept beside
the first, and put around the second.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from mindspore.common.recompute import _RecomputeCell, _RecomputeHandle
from mindspore.graph.api import _pynative_executor as executor

from tenterhook.backends._reruns import AroundT, Reruns

__all__ = ["Region", "begin_rerun", "forget_regions", "is_early_stop", "is_recomputing", "regions", "was_changed_by"]


class Region(Reruns):
    """One run of a region: what is to be around its second run."""

    hold: Callable[[], Any] = staticmethod(
        contextlib.nullcontext
    )  # keeps MindSpore changed; set by the module that can

    def __init__(self, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._run = run
        self._hold: Any = None

    def on_rerun(self, key: object, around: AroundT, attachment: Any = None) -> AroundT:
        if self._hold is None:
            self._hold = Region.hold()
            _regions.holding.add(self)
        return super().on_rerun(key, around, attachment)

    def release(self) -> None:
        """Nothing needs to stay changed for this region any more."""
        if self._hold is not None:
            hold, self._hold = self._hold, None
            hold.release()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self._run is not None
        with self.around():
            return self._run(*args, **kwargs)


class _Regions:
    """The regions of cells that recompute, beside the arguments that those keep."""

    def __init__(self) -> None:
        # cell -> place in its stack of arguments -> (the arguments, the region)
        self.waiting: weakref.WeakKeyDictionary[Any, dict[int, tuple[Any, Region]]] = weakref.WeakKeyDictionary()
        self.running: dict[int, list[Region]] = {}  # thread -> regions that are run again, innermost last
        self.holding: weakref.WeakSet[Region] = weakref.WeakSet()


_regions = _Regions()


def regions() -> Sequence[Region]:
    """Return the regions around the forward that runs now; cheap where there is none."""
    if not executor.grad_flag() or (executor.enable_grad() and not executor.is_saved_tensor_hook_active()):
        return ()
    found: list[Region] = []
    for frame in _frames():
        if _is_rerun(frame):
            break  # what is outside of a recomputation is no part of this forward
        name = frame.f_code.co_name
        if name == "construct" and isinstance(owner := frame.f_locals.get("self"), _RecomputeCell):
            found.append(_region_of(owner))
        elif name == "recompute_without_reentrant" and "handle" in frame.f_locals:
            handle = frame.f_locals["handle"]
            if not isinstance(handle.recompute_fn, Region):
                handle.recompute_fn = Region(handle.recompute_fn)
            found.append(handle.recompute_fn)
    return found


def _region_of(cell: _RecomputeCell) -> Region:
    place = len(cell.args) - 1
    waiting = _regions.waiting.setdefault(cell, {})
    if place not in waiting or waiting[place][0] is not cell.args[place]:
        waiting[place] = (cell.args[place], Region())
    return waiting[place][1]


def begin_rerun() -> contextlib.ExitStack:
    """A cell begins to run a region again; returns what ends that.

    To be called from a function that its ``bprop`` calls.
    """
    stack = contextlib.ExitStack()
    owner = next((frame.f_locals["self"] for frame in _frames() if frame.f_code.co_name == "bprop"), None)
    waiting = _regions.waiting.get(owner) if owner is not None else None
    _, region = waiting.pop(len(owner.args), (None, None)) if waiting and owner is not None else (None, None)
    if region is None:
        return stack
    running = _regions.running.setdefault(threading.get_ident(), [])
    running.append(region)
    stack.callback(running.pop)
    stack.enter_context(region.around())
    return stack


def forget_regions() -> None:
    """No backward pass will come for the regions that wait for one."""
    _regions.waiting.clear()
    for region in list(_regions.holding):
        region.release()
    _regions.holding.clear()


def _frames() -> Iterator[FrameType]:
    """Yield the frames of MindSpore's recomputation that this code runs in, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == _RecomputeCell.__module__:
            yield frame
        frame = frame.f_back


def _is_rerun(frame: FrameType) -> bool:
    name = frame.f_code.co_name
    return name == "bprop" or (name == "recompute" and isinstance(frame.f_locals.get("self"), _RecomputeHandle))


def is_recomputing() -> bool:
    """Whether the forward that runs now is a region's, in a backward pass."""
    return any(_is_rerun(frame) for frame in _frames())


def was_changed_by(key: object) -> bool:
    """In a recomputation: whether the region's first run was registered for ``key``; True where it cannot be told."""
    for frame in _frames():
        if _is_rerun(frame):
            if frame.f_code.co_name == "bprop":
                running = _regions.running.get(threading.get_ident())
                return bool(running) and key in running[-1]
            run = frame.f_locals["self"].recompute_fn
            return isinstance(run, Region) and key in run
    return True


def is_early_stop(error: BaseException) -> bool:
    """Whether an exception only ends a recomputation that has all it needs."""
    return type(error).__name__ == "_StopRecomputationError"
