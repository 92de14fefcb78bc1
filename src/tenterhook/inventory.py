"""The modules of a session: which are watched, and afterwards what was seen of them and why the rest was not."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tenterhook.backends import FUSED_OFF, Backend
from tenterhook.calls import Watched
from tenterhook.capture import Capture
from tenterhook.errors import SelectionError
from tenterhook.gradient_capture import NO_INPUT
from tenterhook.reasons import NO_GRADIENT_HERE, NO_GRADIENT_YET, WeightUse, replaced, why_never_called
from tenterhook.recording.manifest import Model
from tenterhook.recording.schema import MODULES
from tenterhook.recording.source import table_of_rows
from tenterhook.selection import Entry, Selection, resolve

__all__ = [
    "lenient_matches",
    "list_added",
    "model_manifest",
    "model_name",
    "modules_rows",
    "table_of",
    "watch_model",
    "with_fused",
]


def model_name(backend: Backend, model: Any) -> str:
    """Return the name of a model: its class, below all wrappers, so that recordings with and without them compare."""
    root = backend.entries(model)[0]
    return root.type_names[0] if root.type_names else type(root.module).__name__


def watch_model(
    backend: Backend,
    model: Any,
    name: str,
    select: Selection,
    tensors: Selection | bool,
    *,
    lenient: bool = False,
    matched: set[str] | None = None,
    keep_fused: bool = False,
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
        keep_fused: leave modules without hooks that the framework runs fused then.

    Raises:
        SelectionError: a selection matches nothing.
    """
    entries = backend.entries(model)
    chosen = {
        entry.path
        for entry in (
            lenient_matches(select, entries, matched) if lenient else resolve(select, entries, require_callable=True)
        )
    }
    keep: set[str] = set()
    if tensors is True:
        keep = chosen
    elif tensors is not False and tensors is not None:
        keep = {entry.path for entry in resolve(tensors, entries, require_callable=True)}
    closed = backend.fused(model) if keep_fused else ()
    sizes: dict[str, int] = {}
    for parameter in backend.parameters(model):
        sizes[parameter.path] = sizes.get(parameter.path, 0) + backend.numel(parameter.parameter)
    watched = []
    for entry in entries:
        one = Watched(name, entry, wanted=entry.path in chosen, keep=entry.path in keep)
        one.closed = entry.path in closed
        one.entry_parameters = sizes.get(entry.path, 0)
        watched.append(one)
    return watched


def lenient_matches(select: Any, entries: Sequence[Entry], matched: set[str] | None = None) -> list[Entry]:
    """Resolve a list of patterns one by one, leaving out those that match nothing here; the others are added to ``matched``."""
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


_ELSEWHERE = "called, on no step that is recorded"
_ADDED = "added to the model during the session, without hooks: begin the session after it"
_sources: weakref.WeakKeyDictionary[type, str | None] = weakref.WeakKeyDictionary()


def _source(module: Any) -> str | None:
    """Return file and line of a module's class; looked up once a class, since that parses the whole file."""
    kind = type(module)
    if kind not in _sources:
        try:
            _sources[kind] = f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
        except (OSError, TypeError):  # classes typed into a prompt have no source
            _sources[kind] = None
    return _sources[kind]


def model_manifest(model: Any, name: str, watched: Sequence[Watched]) -> Model:
    """Describe one model for the manifest."""
    root = watched[0].ref()
    kind = type(model if root is None else root)
    return Model(
        name=name,
        type=f"{kind.__module__}.{kind.__qualname__}",
        parameters=sum(one.entry_parameters for one in watched),
        modules=len(watched),
    )


def table_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Build the table of modules from its rows."""
    return table_of_rows(rows, MODULES)


def modules_rows(
    backend: Backend,
    model: Any,
    watched: Sequence[Watched],
    capture: Capture,
    weights: WeightUse | None = None,
    *,
    blind: Mapping[str, str] | None = None,
    added: Sequence[Watched] = (),
) -> list[dict[str, Any]]:
    """List the rows of the table of modules: what was seen of each, and the reason where something was not.

    Args:
        backend: the model's framework.
        model: the outermost module; None where it is gone already: its modules are not looked at again then.
        watched: its modules.
        capture: what has recorded them.
        weights: tells whose weights were used.
        blind: what the backend knew at the start of modules that run without being called.
        added: modules that came during the session, which have no hooks.
    """
    blind = backend.blind_spots(model) if model is not None else blind or {}
    present = {entry.path: entry for entry in backend.entries(model)} if model is not None else {}
    if weights is not None and model is not None:
        weights.look(model)
        _count_lazy(backend, model, watched)
    seen = _Seen(
        {one.path for one in watched if one.call_count},
        blind,
        weights,
        any(one.gradient_count for one in watched),
        capture.raised,
        capture.stopped,
    )
    rows = []
    for one in [*watched, *added]:
        entry = present.get(one.path)
        reason = _ADDED if one in added else _reason(one, entry, seen, capture, gone=model is None)
        rows.append(
            {
                "model": one.model,
                "path": one.path,
                "raw_path": one.raw_path or one.path,
                "type": one.type,
                "aliases": list(one.aliases),
                "parameters": one.entry_parameters,
                "source": _source(one.ref()) if one.ref() is not None else None,
                "selected": one.wanted and (one if entry is None else entry).callable,
                "calls": one.recorded_count,
                "reason": reason if one.wanted else None,
            }
        )
    return rows


def list_added(backend: Backend, model: Any, name: str, select: Selection, watched: Sequence[Watched]) -> list[Watched]:
    """List the modules that have come to a model since a session began; nothing puts hooks on them."""
    paths = {path for one in watched for path in (one.path, *one.aliases)}
    modules = {id(one.ref()) for one in watched}
    entries = backend.entries(model)
    new = [entry for entry in entries if entry.path not in paths and id(entry.module) not in modules]
    if not new:
        return []
    try:
        chosen = {entry.path for entry in resolve(select, entries, require_callable=True)}
    except SelectionError:  # what was selected is gone
        chosen = set()
    return [Watched(name, entry, wanted=entry.path in chosen, keep=False) for entry in new]


def with_fused(
    told: Sequence[str], watched: Sequence[Watched], fused: Collection[str], *, evaluated: bool
) -> list[str]:
    """Add to what is said of a session that modules left the fused path, where they have.

    Args:
        told: what is said anyway.
        watched: the modules of a model.
        fused: paths of those that the framework can run fused.
        evaluated: whether they were seen in evaluation; of calls without gradients it is taken for granted.
    """
    ran = [one for one in watched if one.wanted and one.path in fused and one.call_count]
    if FUSED_OFF in told or not ran:
        return list(told)
    no_grad = any(one.no_gradient[why] for one in ran for why in ("grad mode off", "inference mode"))
    return [FUSED_OFF, *told] if evaluated or no_grad else list(told)


def _count_lazy(backend: Backend, model: Any, watched: Sequence[Watched]) -> None:
    """Count the parameters that got their shapes at the first call."""
    by_path = {one.path: one for one in watched if not one.entry_parameters}
    for entry in backend.parameters(model):
        if entry.path in by_path:
            by_path[entry.path].entry_parameters += backend.numel(entry.parameter)


@dataclass(frozen=True)
class _Seen:
    """What is known of a whole model when reasons are asked for."""

    called: Collection[str]
    blind: Mapping[str, str]
    weights: WeightUse | None
    gradients_came: bool
    raised: str | None
    stopped: str | None  # why recording ended before the session did


def _reason(one: Watched, entry: Entry | None, seen: _Seen, capture: Capture, *, gone: bool) -> str | None:
    """Say why a wanted module, or a kind of it, was not seen; None when all was."""
    elsewhere = None if gone else replaced(one.path, one.ref(), entry)
    if elsewhere is not None:
        return elsewhere
    if not (one if entry is None else entry).callable:
        return "container: its items are called, never it"
    if one.call_count == 0:
        if one.closed:
            return "left closed by fused='keep': a hook on it would end the fused path"
        if one.lost and not gone:
            return "hooks were removed by somebody else"
        if seen.stopped and one.path not in seen.blind:
            return f"not called before the recording stopped: {seen.stopped}"
        return why_never_called(one.path, seen.called, seen.blind, seen.weights)
    if one.recorded_count == 0:
        return _ELSEWHERE
    kinds = capture.options.kinds
    if ("grad_output" in kinds or "grad_input" in kinds) and one.gradient_count == 0:
        if one.no_gradient:
            return f"no gradient: {one.no_gradient.most_common(1)[0][0]}"
        if seen.stopped:
            return f"no gradient before the recording stopped: {seen.stopped}"
        if seen.gradients_came:
            return NO_GRADIENT_HERE
        return f"no gradient: {seen.raised} was raised before a backward pass" if seen.raised else NO_GRADIENT_YET
    if (unseen := capture.outputs_unseen.get((one.model, one.path))) is not None:
        return unseen
    if "grad_input" in kinds and one.no_gradient[NO_INPUT] >= one.recorded_count:
        return f"no gradient of its inputs: {NO_INPUT}"
    if "update" in kinds and one.entry_parameters and not capture.tracker.step:
        return "no update: no step has ended, which an optimizer's step, the next forward or rec.step() does"
    if one.ungraded:
        reasons = dict.fromkeys(one.ungraded.values())
        return f"no gradient of {', '.join(one.ungraded)}: {'; '.join(reasons)}"
    return None
