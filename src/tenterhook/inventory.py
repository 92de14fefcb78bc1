"""The modules of a session: which are watched, and afterwards what was seen of them and why the rest was not."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from tenterhook.backends import Backend
from tenterhook.capture import Capture
from tenterhook.errors import SelectionError
from tenterhook.recording.manifest import Model
from tenterhook.recording.schema import MODULES
from tenterhook.select import Entry, Selection, resolve
from tenterhook.tracker import Watched

__all__ = ["model_manifest", "modules_rows", "table_of", "unmatched", "watch_model"]


def watch_model(
    backend: Backend,
    model: Any,
    name: str,
    select: Selection,
    tensors: Selection | bool,
    *,
    lenient: bool = False,
    matched: set[str] | None = None,
) -> list[Watched]:
    """List the modules of ``model`` as watched ones, the root first, marked by what is wanted of them.

    Args:
        backend: the model's framework.
        model: the outermost module.
        name: the model's name in the recording.
        select: which modules are wanted; patterns only, where ``lenient``.
        tensors: of which of these the tensors are kept.
        lenient: a pattern that matches nothing here does no harm: it may be meant for another model of the script.
        matched: where lenient, the patterns that matched something are added here.

    Raises:
        SelectionError: a selection matches nothing.
    """
    entries = backend.entries(model)
    chosen = {
        entry.path
        for entry in (
            _lenient(select, entries, matched) if lenient else resolve(select, entries, require_callable=True)
        )
    }
    keep: set[str] = set()
    if tensors is True:
        keep = chosen
    elif tensors is not False and tensors is not None:
        keep = {entry.path for entry in resolve(tensors, entries, require_callable=True)}
    sizes: dict[str, int] = {}
    for parameter in backend.parameters(model):
        sizes[parameter.path] = sizes.get(parameter.path, 0) + backend.numel(parameter.parameter)
    watched = []
    for entry in entries:
        one = Watched(name, entry, wanted=entry.path in chosen, keep=entry.path in keep)
        one.entry_parameters = sizes.get(entry.path, 0)
        watched.append(one)
    return watched


def _lenient(select: Any, entries: Sequence[Entry], matched: set[str] | None) -> list[Entry]:
    """Resolve pattern by pattern, leaving out those that match nothing here."""
    if select is None:
        return resolve(None, entries, require_callable=True)
    fitting = []
    for pattern in select:
        if pattern.startswith("!"):
            fitting.append(pattern)
            continue
        try:
            resolve(pattern, entries, require_callable=True)
        except SelectionError:
            continue
        fitting.append(pattern)
        if matched is not None:
            matched.add(pattern)
    if not fitting or (all(pattern.startswith("!") for pattern in fitting) and len(fitting) < len(select)):
        return []
    try:
        return resolve(fitting, entries, require_callable=True)
    except SelectionError:  # the excludes leave nothing of this model
        return []


def unmatched(select: Sequence[str], matched: set[str], rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """List the patterns that matched in no model of the script, with the nearest names."""
    entries = [Entry(path=row["path"], module=None, type_names=(row["type"],)) for row in rows]
    missing = []
    for pattern in select:
        if not pattern.startswith("!") and pattern not in matched:
            try:
                resolve(pattern, entries)
            except SelectionError as error:
                missing.append(
                    (pattern, "; ".join(line.strip() for line in str(error).splitlines()[1:]) or "matches nothing")
                )
    return missing


_sources: weakref.WeakKeyDictionary[type, str | None] = weakref.WeakKeyDictionary()


def _source(module: Any) -> str | None:
    kind = type(module)
    if kind not in _sources:  # Python parses a whole file to find a class in it
        try:
            _sources[kind] = f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
        except (OSError, TypeError):  # classes typed into a prompt have no source
            _sources[kind] = None
    return _sources[kind]


def model_manifest(model: Any, name: str, watched: Sequence[Watched]) -> Model:
    """Describe one model for the manifest."""
    kind = type(model)
    return Model(
        name=name,
        type=f"{kind.__module__}.{kind.__qualname__}",
        parameters=sum(one.entry_parameters for one in watched),
        modules=len(watched),
    )


def table_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Build the table of modules from its rows."""
    return pa.Table.from_pylist(list(rows), MODULES)


def modules_rows(backend: Backend, model: Any, watched: Sequence[Watched], capture: Capture) -> list[dict[str, Any]]:
    """List the rows of the table of modules: what was seen of each, and the reason where something was not.

    ``model`` is None where it is gone already; its modules are not looked at again then.
    """
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
                "reason": _reason(one, entry, blind, capture, gradients_came, gone=model is None)
                if one.wanted
                else None,
            }
        )
    return rows


def _reason(
    one: Watched, entry: Entry | None, blind: Mapping[str, str], capture: Capture, gradients_came: bool, *, gone: bool
) -> str | None:
    """Say why a wanted module, or a kind of it, was not seen; None when all was."""
    module = one.ref()
    if gone:
        return None if one.call_count else "never called"
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
        return (
            "no gradient: not used by what was differentiated"
            if gradients_came
            else "no gradient: no backward pass was run"
        )
    return None
