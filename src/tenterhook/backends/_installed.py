"""Rows of ``th.installed_hooks`` that are made alike for every framework: whose a callback is, its name and its line."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from tenterhook.backends import InstalledHook

__all__ = ["callbacks_on", "function_name", "is_ours", "record", "users_function"]


def record(path: str, kind: str, hook: Any, note: str = "") -> InstalledHook:
    """Describe one hook; with a ``note`` it is one that will not be called.

    Args:
        path: where it is.
        kind: which of the framework's tables it is in.
        hook: what stands in that table.
        note: why it is dead.
    """
    ours = is_ours(hook)
    site = _site_of(hook) if ours else None
    function = site.fn if site is not None else getattr(hook, "hook", hook) if ours else hook
    name = "(recording)" if is_ours(function) else function_name(function)
    alive = not note
    if site is not None:
        if not site.live:
            alive, note = False, "removed; stays until checkpointing has repeated its edits"
        elif not note and site.kind != kind:
            note = f"for {site.kind}"
    return InstalledHook(
        path, kind, name, _source_of(function), "tenterhook" if ours else _package_of(function), alive, note, hook,
    )  # fmt: skip


def callbacks_on(function: Any) -> list[Any]:
    """List the callbacks on a function that tenterhook wraps, or the function that somebody put in the place of a method."""
    patch = getattr(function, "_self_wrapper", None)
    return [function] if patch is None or not is_ours(patch) else [*patch.before, *patch.after]


def is_ours(hook: Any) -> bool:
    """Whether a callback was written here, and not by a user or by somebody else's package."""
    hook = _innermost(hook)
    return any(_package(getattr(one, "__module__", None)) == "tenterhook" for one in (type(hook), hook))


def _site_of(hook: Any) -> Any:
    """Find the record of the user's callback behind a hook of ours; None for a recording's."""
    hook = getattr(hook, "__wrapped__", hook)  # what keeps a hook of ours out of the user's modes
    parts: list[Any] = [hook, *(getattr(hook, name, None) for name in ("before", "after", "failed", "fn", "hook"))]
    parts += [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    for part in parts:
        for one in (part, getattr(part, "__self__", None)):
            if (site := getattr(one, "site", None)) is not None:
                return site
    return None


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def users_function(hook: Any) -> Any:
    """Return the user's callback behind a hook of ours; None where there is none."""
    site = _site_of(hook)
    return None if site is None else site.fn


def function_name(function: Any) -> str:
    """Return a callback's name for tables and messages."""
    if isinstance(function, functools.partial):
        return f"partial({function_name(function.func)})"
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _source_of(function: Any) -> str | None:
    function = _innermost(function)
    if not hasattr(function, "__code__") and not inspect.ismethod(function):
        function = getattr(function, "__wrapped__", None) or type(function).__call__
    code = getattr(function, "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _package_of(function: Any) -> str:
    function = _innermost(function)
    return _package(getattr(function, "__module__", None) or type(function).__module__) or "other"


def _package(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""
