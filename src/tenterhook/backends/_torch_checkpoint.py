"""Activation checkpointing in torch: which parts of a forward will run again in the backward pass, and what is to be done then.

A checkpointed region keeps a function that recomputes it, in a frame object of its saved-tensor hooks or, with reentry, in the
context of an autograd function. We put ourselves around that function, so what belongs to a region lives as long as its graph,
runs again as often as the region does, and leaves nothing on any module. ``tests/semantics`` fails where a torch release
keeps that function elsewhere.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from tenterhook._fork_locks import ForkLock
from tenterhook.backends._reruns import Reruns

__all__ = [
    "Region",
    "callers",
    "is_early_stop",
    "is_recomputing",
    "pass_reenters",
    "regions",
    "seeing_reentry",
    "top_saved_tensor_hooks",
    "was_changed_by",
]

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
top_saved_tensor_hooks: Callable[[bool], Any] | None = getattr(_autograd, "_top_saved_tensors_default_hooks", None)


class Region(Reruns):
    """Stands in place of the function that recomputes a region, and runs it inside what was asked for."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.around():
            return self._run(*args, **kwargs)


_nodes: weakref.WeakSet[Any] = weakref.WeakSet()  # of the graphs that live: the regions with reentry that we know of
_lock = ForkLock()
_asked: tuple[int, bool] = (-1, False)  # a backward pass, and whether it reenters
_will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node


def pass_reenters() -> bool:
    """Whether the backward pass that runs now comes to a region that is differentiated in a pass of its own.

    Regions are known from the beginning of a session on, those of other checkpointing than torch's where a hook of ours is in them.
    """
    global _asked  # noqa: PLW0603 - the answer is the same for each of the many gradients of a pass
    if not _nodes:
        return False
    current = torch._C._current_graph_task_id()
    asked = _asked  # passes of other threads may be asked after meanwhile
    if asked[0] != current:
        with _lock:
            nodes = list(_nodes)
        asked = _asked = (current, any(map(_will_execute, nodes)))
    return asked[1]


def seeing_reentry() -> Callable[[], None]:
    """Know of each region with reentry from now on, also of those in which no module is called; returns what ends that."""
    forward: Any = CheckpointFunction.__dict__["forward"]
    run = forward.__func__
    on = True

    @functools.wraps(run)
    def begun(ctx: Any, *args: Any) -> Any:
        if on:
            with _lock:
                _nodes.add(ctx)
        return run(ctx, *args)

    def end() -> None:
        nonlocal on
        on = False  # somebody may have put himself around ours, and go on calling it
        if CheckpointFunction.__dict__["forward"] is ours:
            CheckpointFunction.forward = forward

    ours: Any = staticmethod(begun)
    CheckpointFunction.forward = ours
    return end


def regions() -> Sequence[Region]:
    """Return the checkpointed regions around the forward that runs now; cheap where gradients are tracked and there is none."""
    if torch.is_grad_enabled() and top_saved_tensor_hooks is not None and top_saved_tensor_hooks(False) is None:
        return ()
    found: list[Region] = []
    hooks = top_saved_tensor_hooks(False) if top_saved_tensor_hooks is not None else None
    if hooks is not None and "_checkpoint_hook" in getattr(hooks[0], "__qualname__", ""):
        names = hooks[0].__code__.co_freevars
        _collect(found, dict(zip(names, hooks[0].__closure__, strict=True))["frame"].cell_contents, "recompute_fn")
    for frame in callers():
        code = frame.f_code
        if _is_rerun(frame):
            break  # what is outside of a recomputation is no part of this forward
        if code.co_name == "forward" and "ctx" in code.co_varnames:
            _collect(found, frame.f_locals.get("ctx"), "run_function")
        elif code.co_name == "checkpoint" and "gen" in code.co_varnames:
            running = getattr(frame.f_locals.get("gen"), "gi_frame", None)
            if running is not None:
                _collect(found, running.f_locals.get("new_frame"), "recompute_fn")
    return found


def _collect(found: list[Region], owner: Any, attribute: str) -> None:
    run = getattr(owner, attribute, None)
    if not callable(run):
        return
    if not isinstance(run, Region):
        run = Region(run)
        setattr(owner, attribute, run)
        if attribute == "run_function":
            with _lock:
                _nodes.add(owner)
    if run not in found:
        found.append(run)


def callers() -> Iterator[FrameType]:
    """Yield the frames that led to our own code, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_rerun(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name == "unpack_hook":
        return "frame" in code.co_freevars
    return code.co_name == "backward" and hasattr(frame.f_locals.get("ctx"), "run_function")


def is_recomputing() -> bool:
    """Whether the forward that runs now is a region's, in a backward pass."""
    return any(_is_rerun(frame) for frame in callers())


def was_changed_by(key: object) -> bool:
    """In a recomputation: whether the region's first run was registered for ``key``; True where it cannot be told."""
    for frame in callers():
        if _is_rerun(frame):
            owner = frame.f_locals.get("frame") or frame.f_locals.get("ctx")
            run = getattr(owner, "recompute_fn", None) or getattr(owner, "run_function", None)
            return isinstance(run, Region) and key in run
    return True


def is_early_stop(error: BaseException) -> bool:
    """Whether an exception only ends a recomputation that has all it needs."""
    return type(error).__name__ == "_StopRecomputationError"
