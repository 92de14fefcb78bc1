"""What a recording session was asked for, checked before anything is touched."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenterhook.address import Kind
from tenterhook.backends import Backend
from tenterhook.errors import TenterhookError
from tenterhook.flushing import PACE
from tenterhook.op_capture import check_ops
from tenterhook.recording.environment import start_manifest
from tenterhook.recording.manifest import Manifest
from tenterhook.recording.memory import MemorySink
from tenterhook.recording.target import refuse_taken
from tenterhook.recording.writer import DiskSink
from tenterhook.row_capture import CaptureOptions
from tenterhook.sampling import Sampling
from tenterhook.selection import Selection, describe, resolve

__all__ = [
    "KINDS",
    "PARAMETER_KINDS",
    "Destination",
    "Request",
    "capture_options",
    "check_kinds",
    "check_resume",
    "lasting",
]

KINDS: tuple[str, ...] = tuple(kind.value for kind in Kind)
"""Everything that can be recorded."""

PARAMETER_KINDS = frozenset({"param", "param_grad", "update"})
"""The kinds that belong to parameters rather than to calls."""


def check_kinds(kinds: Collection[str] | None, *, tensors: bool) -> frozenset[str]:
    """Return the kinds to record; by default output and grad_output, with tensors kept the input too.

    Raises:
        TenterhookError: a kind that does not exist, or none at all.
    """
    if kinds is None:
        return frozenset({"output", "grad_output", "input"} if tensors else {"output", "grad_output"})
    wanted = frozenset([kinds] if isinstance(kinds, str) else [str(getattr(kind, "value", kind)) for kind in kinds])
    unknown = sorted(wanted - set(KINDS))
    if unknown:
        raise TenterhookError(f"no kind {unknown[0]!r} can be recorded\n  the kinds are {', '.join(KINDS)}")
    return wanted


def capture_options(
    kinds: frozenset[str],
    *,
    stats: str | None,
    sketch: bool,
    recompute: bool,
    on_error: str,
    to_disk: bool,
    scaler: Any = None,
    ops: bool | str = False,
    tensors_dtype: str | None = None,
    alias: bool = False,
) -> CaptureOptions:
    """Check what the user asked for and put it into the engine's terms.

    Raises:
        TenterhookError: an option has a value that it cannot have.
    """
    if stats not in ("basic", None):
        raise TenterhookError(f"stats={stats!r} is not known\n  use 'basic' or None")
    if on_error not in ("warn", "raise"):
        raise TenterhookError(f"on_error={on_error!r} is not known\n  use 'warn' or 'raise'")
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise TenterhookError(
            f"scaler= needs a GradScaler, something with get_scale(), got {type(scaler).__name__}\n"
            "  pass the scaler whose scale(loss) you call backward on"
        )
    if ops not in (False, True, "all"):
        raise TenterhookError(f"ops={ops!r} is not known\n  use True, False or 'all'")
    if tensors_dtype not in (None, "float16", "bfloat16", "float32", "float64"):
        raise TenterhookError(
            f"tensors_dtype={tensors_dtype!r} is not known\n  use 'float16', 'bfloat16', 'float32', 'float64' or None"
        )
    if alias and (to_disk or tensors_dtype is not None):
        raise TenterhookError(
            "alias=True keeps the program's own tensors, in memory and as they are\n  leave out to= and tensors_dtype="
        )
    return CaptureOptions(
        kinds=kinds,
        statistics=stats is not None,
        sketch=sketch,
        recompute=recompute,
        on_error=on_error,
        scaler=scaler,
        to_numpy=to_disk,
        ops=ops,
        tensors_dtype=tensors_dtype,
        alias=alias,
    )


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a recording goes: memory, or a directory; see :func:`tenterhook.record`."""

    to: str | os.PathLike[str] | None = None
    overwrite: bool = False
    resume: bool | int = False
    budget: int | None = None

    def check(self, manifest: Manifest) -> None:
        """Refuse what cannot be, and a directory that is taken; nothing is made yet.

        Raises:
            TenterhookError: options that do not go together.
            TargetError: the directory exists.
        """
        if self.resume is not False and (self.to is None or self.overwrite):
            raise TenterhookError(
                f"resume={self.resume} goes on with a recording on disk\n  give to=, and leave out overwrite="
            )
        if self.budget is not None and self.to is None:
            raise TenterhookError("budget= is for tensors that are written to disk\n  give to=, or leave budget= out")
        if self.to is not None and self.resume is False and not self.overwrite:
            refuse_taken(Path(self.to), manifest.world, manifest.rank)

    def open(self, manifest: Manifest) -> MemorySink | DiskSink:
        """Make the place that rows and tensors go to.

        Raises:
            TargetError: the directory exists already or cannot be written.
        """
        if self.to is None:
            return MemorySink(manifest, rank=manifest.rank)
        return DiskSink(
            Path(self.to),
            manifest,
            rank=manifest.rank,
            overwrite=self.overwrite,
            resume=self.resume,
            budget=self.budget,
            pace=PACE,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A recording that was asked for, of one model; see :func:`tenterhook.record` for the meaning of each part."""

    backend: Backend
    select: Selection
    tensors: Selection | bool
    options: CaptureOptions
    sampling: Sampling
    destination: Destination
    manifest: Manifest
    fused: str = "open"

    def check(self, model: Any) -> None:
        """Look whether the model can be recorded so; nothing is put on or made.

        Raises:
            UnsupportedError: the framework shows no functional calls.
            SelectionError: a selection matches nothing.
            TenterhookError: options that do not go together.
            TargetError: the directory exists.
        """
        if self.fused not in ("open", "keep"):
            raise TenterhookError(f"fused={self.fused!r} is not known\n  use 'open' or 'keep'")
        if self.options.ops:
            check_ops(self.backend, self.fused)
            if self.sampling.by_pattern:
                raise TenterhookError(
                    "ops= are recorded at one rate\n  give every= as a number, or record ops= in a session of their own"
                )
        entries = self.backend.entries(model)
        names = [entry.name for entry in self.backend.parameters(model)]
        chosen = resolve(self.select, entries, require_callable=True, parameters=names)
        if not isinstance(self.tensors, bool):
            kept = resolve(self.tensors, entries, require_callable=True)
            if not {entry.path for entry in chosen} & {entry.path for entry in kept}:
                raise TenterhookError(
                    f"tensors={', '.join(describe(self.tensors))} are of modules that are not recorded: "
                    f"select={', '.join(describe(self.select))}\n  select them, too"
                )
        for pattern in self.sampling.rates if self.sampling.by_pattern else ():
            resolve(pattern, entries, require_callable=True)
        self.destination.check(self.manifest)


def check_resume(resume: Any) -> bool | int:
    """Return whether, or from which step on, a recording is gone on with: True, False or a number; 0 is a number.

    Raises:
        TenterhookError: it is none of these.
    """
    if isinstance(resume, bool):
        return resume
    try:
        step = operator.index(resume)
    except TypeError:
        raise TenterhookError(
            f"resume={resume!r} is neither True nor the number of a step\n  give the step that your loop does next, as 31"
        ) from None
    if step < 0:
        raise TenterhookError(f"resume={resume!r} is no step\n  steps are numbered from 0")
    return step


def lasting(selection: Selection) -> Selection:
    """Return a selection that can be read more than once, which an iterator cannot."""
    return list(selection) if isinstance(selection, Iterator) else selection


def start(
    backend: Backend,
    kinds: frozenset[str],
    select: Selection,
    tensors: Selection | bool,
    note: str | None,
    asked: dict[str, Any],
) -> Manifest:
    """Return the manifest of a recording of one model that begins now, in this process."""
    return start_manifest(
        **backend.environment(),
        select=", ".join(describe(select)),
        kinds=sorted(kinds),
        note=note,
        options=asked,
        tensors=str(tensors).lower() if isinstance(tensors, bool) else ", ".join(describe(tensors)),
    )
