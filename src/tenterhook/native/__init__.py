"""The native call path, where it was built: plain calls of modules recorded without a frame of Python.

The extension ``tenterhook.native._calls`` does for the plain case what :mod:`tenterhook.tracker`, :mod:`tenterhook.capture` and
:mod:`tenterhook.gradient_capture` do for every case, and writes the same rows. The environment variable
``TENTERHOOK_CALLS=python`` leaves it out.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Any

from tenterhook.stats import DTYPE_CODES, RowBuffer

try:
    from tenterhook.native import _calls
    from tenterhook.stats import _kernel
except ImportError:  # built without a compiler: the Python code gives the same rows
    _calls = _kernel = None

__all__ = ["CALLS", "NATIVE", "FrameworkParts", "measured_by", "new_engine"]

NATIVE: Any = None if os.environ.get("TENTERHOOK_CALLS") == "python" else _calls
"""The extension, or None where it is not built or not wanted."""

CALLS: str = "python" if NATIVE is None else "native"
"""What records plain calls: ``"native"`` or ``"python"``."""

if NATIVE is not None and _kernel is not None:
    # a copy or a pickle of a hook of ours: takes anything, returns None, and loads where tenterhook is not installed
    _inert = contextlib.nullcontext().__exit__
    NATIVE.connect(_kernel.api, _inert, (getattr, (contextlib.nullcontext(), "__exit__")), (_inert, (None, None, None)))


@dataclass(frozen=True, slots=True)
class FrameworkParts:
    """What the native path calls of a framework; fields that are functions take what the framework gives them.

    Attributes:
        exchange: the capsule of DLPack's exchange functions.
        tensor_types: exactly these are plain tensors.
        graph_task: number of the backward pass that runs, -1 outside of one.
        grads_on: whether gradients are tracked.
        forward_ad_on: whether no ``autograd.Function`` of the user is being run forward.
        saved_hooks: the newest hooks on saved tensors, None without any.
        inference_on: whether inference mode is on.
        modes_on: whether something of the user's would see what is asked of a tensor.
        is_neg: whether a tensor is a negated view.
        is_view: whether a tensor is a view.
        threads: how many threads the framework computes with just now.
        storage: how many bytes into a tensor's object its handle lies, and the addresses of the C functions that take that and give
            the size of its storage in bytes, and its offset there in elements; None where its methods have to be asked.
        new_hooks: an empty table of a tensor's hooks.
        unusual: lists that have something in them while hooks of ours wait to be taken off.
        notices: containers that have something in them for the next call that begins a step to look at.
        tracing: the state of a trace that is being made of what runs, None without one.
        call: the function that a module's class is called by.
        call_impl: the function of a module's class that does nothing but call ``forward`` where there are no hooks and nothing
            is traced; None where there is none to rely on.
        global_tables: the tables of hooks on all modules; None where nothing can stand around a module's calls but hooks.
    """

    exchange: Any
    tensor_types: tuple[type, ...]
    graph_task: Any
    grads_on: Any
    forward_ad_on: Any
    saved_hooks: Any
    inference_on: Any
    modes_on: Any
    is_neg: Any
    is_view: Any
    threads: Any
    new_hooks: Any
    unusual: tuple[Any, ...]
    notices: tuple[Any, ...] = ()
    tracing: Any = None
    call: Any = None
    call_impl: Any = None
    storage: tuple[int, int, int] | None = None
    global_tables: tuple[Any, ...] | None = None


def measured_by(buffer: RowBuffer) -> Any:
    """Return the object of the kernel that fills a buffer's rows; None where that is not the native one."""
    rows = getattr(buffer.measure_flat, "__self__", None)
    return rows if _kernel is not None and type(rows) is _kernel.Rows else None


def new_engine(parts: FrameworkParts | None) -> Any:
    """Make the engine of one session, or None where a framework, or this build, has no native path."""
    if NATIVE is None or parts is None or measured_by(RowBuffer(1)) is None:
        return None
    try:
        engine = NATIVE.Engine(parts.exchange, time.perf_counter_ns)
    except TypeError:  # another major version of DLPack
        return None
    for name in (
        "graph_task",
        "grads_on",
        "forward_ad_on",
        "saved_hooks",
        "inference_on",
        "modes_on",
        "is_neg",
        "is_view",
        "threads",
        "new_hooks",
        "tracing",
        "call",
        "call_impl",
    ):
        setattr(engine, name, getattr(parts, name))
    engine.kernel_threads = _kernel.threads if _kernel is not None else None
    if parts.storage is not None:
        engine.storage_place, engine.storage_size, engine.storage_offset = parts.storage
    engine.busy, engine.notices = parts.unusual, parts.notices
    engine.global_tables = parts.global_tables
    engine.arounds = {}
    engine.tensor_types = parts.tensor_types
    engine.dtype_names = (*DTYPE_CODES, "cpu")
    return engine
