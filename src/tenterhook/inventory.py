"""The modules of a session: which are watched, and afterwards what was seen of them and why the rest was not."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tenterhook.backends import Backend
from tenterhook.capture import Capture
from tenterhook.recording.manifest import Model
from tenterhook.recording.schema import MODULES
from tenterhook.select import Entry, Selection, resolve
from tenterhook.tracker import Watched

__all__ = ["model_manifest", "modules_table", "watch_model"]


def watch_model(
    backend: Backend, model: Any, name: str, select: Selection, tensors: Selection | bool, *, lenient: bool = False
) -> list[Watched]:
    """List the modules of ``model`` as watched ones, the root first, marked by what is wanted of them.

    Raises:
        SelectionError: a selection matches nothing (unless ``lenient``: then nothing is wanted of this model).
    """
    entries = backend.entries(model)
    chosen = _chosen(select, entries, lenient)
    keep = set() if tensors is False or tensors is None else chosen if tensors is True else _chosen(tensors, entries, lenient)
    sizes: dict[str, int] = {}
    for parameter in backend.parameters(model):
        sizes[parameter.path] = sizes.get(parameter.path, 0) + backend.numel(parameter.parameter)
    watched = []
    for entry in entries:
        one = Watched(name, entry, wanted=entry.path in chosen, keep=entry.path in keep)
        one.entry_parameters = sizes.get(entry.path, 0)
        watched.append(one)
    return watched


def _chosen(select: Selection, entries: Sequence[Entry], lenient: bool) -> set[str]:
    if lenient:
        from_all = resolve_leniently(select, entries)
    else:
        from_all = resolve(select, entries, require_callable=True)
    return {entry.path for entry in from_all}


def resolve_leniently(select: Selection, entries: Sequence[Entry]) -> list[Entry]:
    """Resolve item by item, so that an item that fits another model of the script does no harm here."""
    raise NotImplementedError


def _source(module: Any) -> str | None:
    try:
        lines = inspect.getsourcelines(type(module))
        return f"{inspect.getsourcefile(type(module))}:{lines[1]}"
    except (OSError, TypeError):  # classes typed into a prompt have no source
        return None


def model_manifest(model: Any, name: str, watched: Sequence[Watched]) -> Model:
    """Describe one model for the manifest."""
    kind = type(model)
    return Model(
        name=name,
        type=f"{kind.__module__}.{kind.__qualname__}",
        parameters=sum(one.entry_parameters for one in watched),
        modules=len(watched),
    )


def modules_table(backend: Backend, model: Any, watched: Sequence[Watched], capture: Capture) -> pa.Table:
    """Build the table of modules with what was seen of each, and the reason where something was not."""
    blind = backend.blind_spots(model) if model is not None else {}
    present = {entry.path: entry for entry in backend.entries(model)} if model is not None else {}
    gradients_came = any(one.gradient_count for one in watched)
    rows = []
    for one in watched:
        entry = present.get(one.path)
        rows.append(
            {
                "model": one.model,
                "path": one.path,
                "raw_path": one.raw_path or one.path,
                "type": one.type,
                "aliases": list(one.aliases),
                "parameters": one.entry_parameters,
                "source": _source(one.ref()) if one.ref() is not None else None,
                "selected": one.wanted and (entry is None or entry.callable),
                "calls": one.call_count,
                "reason": _reason(one, entry, blind, capture, gradients_came) if one.wanted else None,
            }
        )
    return pa.Table.from_pylist(rows, MODULES)


def _reason(one: Watched, entry: Entry | None, blind: Any, capture: Capture, gradients_came: bool) -> str | None:
    """Say why a wanted module, or a kind of it, was not seen; None when all was."""
    module = one.ref()
    if module is None or (entry is not None and entry.module is not module):
        return f"module at '{one.name}' is no longer the one hooked: it was replaced"
    if entry is None:
        return f"module at '{one.name}' is no longer part of the model"
    if not entry.callable:
        return "container: its items are called, never it"
    if one.call_count == 0:
        if one.path in blind:
            return blind[one.path]
        if one.lost:
            return "hooks were removed by somebody else"
        return "never called"
    if "grad_output" in capture.options.kinds and one.gradient_count == 0:
        if one.no_gradient:
            return f"no gradient: {one.no_gradient.most_common(1)[0][0]}"
        return "no gradient: not used by what was differentiated" if gradients_came else "no gradient: no backward pass was run"
    return None
