"""Why hooks did not fire, as far as anything tells: the commonest question about hooks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tenterhook.backends import Backend, ParameterEntry
from tenterhook.gathering import Gathering
from tenterhook.handles import HookSite
from tenterhook.selection import Entry

__all__ = [
    "NO_GRADIENT_HERE",
    "NO_GRADIENT_YET",
    "ON_CALLS",
    "SiteReasons",
    "WeightUse",
    "raised",
    "replaced",
    "why_never_called",
]

ON_CALLS = frozenset({
    "forward_pre", "forward", "backward_pre", "backward",
    "input", "output", "grad_input", "grad_output", "skip", "stop",
})  # fmt: skip
"""The kinds of hooks that sit on a module's calls."""

NO_GRADIENT_YET = "no gradient: no backward pass reached it"
MIDWAY = "put on in the middle of a call of its module, which was not called since"
NO_GRADIENT_HERE = "no gradient: not used by what was differentiated"


_RAISED = "its call raised "
_WAS_CALLED = (_RAISED, "no gradient: ")


def raised(error: BaseException) -> str:
    """Say that a call did not come to its end."""
    return f"{_RAISED}{type(error).__name__}"


class WeightUse:
    """Finds modules whose weights got a gradient while the module itself was not called.

    ``F.linear(x, layer.weight)`` and ``layer.forward(x)`` go past all hooks, but leave gradients on the parameters. Looked
    at are the gradients that a parameter holds when asked, so :meth:`look` has to be called before they are cleared.

    Args:
        backend: the model's framework.
        model: the model, which is not held on to.
    """

    def __init__(self, backend: Backend, model: Any) -> None:
        self._backend = backend
        parameters = backend.parameters(model)
        self._before = self._marks(parameters)
        self._used: set[str] = set()
        self._shared: dict[str, set[str]] = {}
        for entry in parameters:
            owners = {entry.path, *(alias.rpartition(".")[0] for alias in entry.aliases)}
            for owner in owners if len(owners) > 1 else ():
                self._shared.setdefault(owner, set()).update(owners - {owner})

    def _marks(self, parameters: list[ParameterEntry]) -> dict[str, tuple[str, object]]:
        return self._backend.unseen(self._all_marks)(parameters)  # not kept: it would hold itself

    def _all_marks(self, parameters: list[ParameterEntry]) -> dict[str, tuple[str, object]]:
        return {entry.name: (entry.path, self._mark(getattr(entry.parameter, "grad", None))) for entry in parameters}

    def _mark(self, gradient: Any) -> object:
        return None if gradient is None else (id(gradient), self._backend.version(gradient))

    def look(self, model: Any) -> None:
        """Look for gradients that have come since the session began."""
        for name, (path, mark) in self._marks(self._backend.parameters(model)).items():
            if mark is not None and mark != self._before.get(name, (path, None))[1]:
                self._used.add(path)

    def why(self, path: str, called: Collection[str]) -> str | None:
        """Say how the weights of a module that was not called were used; None where nothing tells that they were."""
        shared = self._shared.get(path, set())
        calling = sorted(other for other in shared if other in called)
        if calling:
            return f"never called: its weights are also those of '{calling[0]}', which was"
        if path in self._used or not shared.isdisjoint(self._used):
            return "never called, though its weights got a gradient: used directly, by .forward, or before the session"
        return None


def why_never_called(path: str, called: Collection[str], blind: Mapping[str, str], weights: WeightUse | None) -> str:
    """Say why hooks on a module have not fired, as far as anything tells.

    Args:
        path: the module.
        called: paths of modules of which it is known that they were called.
        blind: what the backend knows of modules that run without being called.
        weights: tells whose weights were used.
    """
    if path in blind:
        return blind[path]
    used = weights.why(path, called) if weights is not None else None
    if used is not None:
        return used
    if any(other != path and (not path or other.startswith(f"{path}.")) for other in called):
        return "never called itself, only modules inside it: through .forward, another method, or a slice of it"
    return "never called"


def replaced(path: str, module: Any, entry: Entry | None) -> str | None:
    """Say that another module stands where a hooked one was, or none; None where it is still there.

    Args:
        path: where it was.
        module: the hooked module, None where it is gone.
        entry: what is at its path now.
    """
    name = path or "(root)"
    if entry is None:
        return f"module at '{name}' is no longer part of the model"
    if entry.module is not module:
        return f"module at '{name}' is no longer the one hooked: it was replaced"
    return None


class SiteReasons:
    """The reasons of one hook set's sites, from one look at the model.

    Args:
        backend: the model's framework.
        entries: the modules as they were when the hooks were put on, the root first; empty where the model is gone.
        sites: all places with a hook.
        weights: tells whose weights were used.
        gathering: tells whether gradients came.
    """

    def __init__(
        self,
        backend: Backend,
        entries: Sequence[Entry],
        sites: Sequence[HookSite],
        weights: WeightUse,
        gathering: Gathering,
    ) -> None:
        self._gone = not entries
        root = None if self._gone else entries[0].module
        if root is not None:
            weights.look(root)
        self._hooked = {entry.path: entry.module for entry in entries}
        self._now = {} if root is None else {entry.path: entry for entry in backend.entries(root)}
        self._blind = {} if root is None else backend.blind_spots(root)
        self._called = {
            site.path
            for site in sites
            if site.kind in ON_CALLS
            and (site.fired or site.calls or site.midway or (site.reason or "").startswith(_WAS_CALLED))
        }
        hooks_parameters = root is not None and any(site.parameter is not None for site in sites)
        self._parameters = {one.name: one.parameter for one in backend.parameters(root)} if hooks_parameters else None
        self._weights = weights
        self._passes = gathering.passes

    def why(self, site: HookSite) -> str:
        """Say why a hook has not fired, or does no more; empty where nothing is wrong."""
        if site.reason or not site.live:
            return "" if site.fired else site.reason or "removed before it could fire"
        if self._gone and site.kind in ON_CALLS:
            return "" if site.fired else "the model is gone"
        if site.kind in ON_CALLS:
            elsewhere = replaced(site.path, self._hooked.get(site.path), self._now.get(site.path))
            if elsewhere is not None:
                return elsewhere
        if site.parameter is not None and self._parameters is not None:
            now, hooked = self._parameters.get(site.path), site.parameter()
            if hooked is None or not any(one is hooked for one in self._parameters.values()):  # pruning renames it
                what = "no longer there" if now is None else "no longer the one hooked: it was replaced"
                return f"parameter '{site.path}' is {what}"
        if not site.in_place:
            return "hooks were removed by somebody else"
        if site.fired:
            return ""
        if site.kind not in ON_CALLS:
            return site.unfired or NO_GRADIENT_YET
        if site.calls:
            return NO_GRADIENT_HERE if self._passes else NO_GRADIENT_YET
        if site.midway:
            return MIDWAY
        return why_never_called(site.path, self._called, self._blind, self._weights)
