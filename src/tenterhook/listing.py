"""What is on a model and in it, as lists that print as tables: ``th.installed_hooks``, ``th.select``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenterhook.backends import InstalledHook, find_backend
from tenterhook.selection import Selection, resolve
from tenterhook.text_table import text_table

__all__ = ["InstalledHooks", "SelectedModule", "SelectedModules", "installed_hooks", "select"]


class InstalledHooks(list[InstalledHook]):
    """The hooks on a model; a list whose text is a table."""

    def __str__(self) -> str:
        if not self:
            return "no hooks"
        rows = [("path", "kind", "function", "at", "owner", "")]
        for hook in self:
            state = "" if hook.alive else "dead"
            rows.append((
                hook.path or "(root)", hook.kind, hook.function, _short(hook.source), hook.owner,
                ": ".join(word for word in (state, hook.note) if word),
            ))  # fmt: skip
        return text_table(rows)

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class SelectedModule:
    """A module that a selection matches.

    Attributes:
        path: its path, ``""`` for the root.
        type: its class.
        parameters: number of elements of its own parameters, those of the modules inside it not counted.
        aliases: its other paths.
        module: the module itself.
    """

    path: str
    type: str
    parameters: int
    aliases: tuple[str, ...] = ()
    module: Any = field(default=None, repr=False, compare=False)


class SelectedModules(list[SelectedModule]):
    """The modules that a selection matches, in the model's order; a list whose text is a table."""

    @property
    def paths(self) -> list[str]:
        """Their paths."""
        return [one.path for one in self]

    def __str__(self) -> str:
        rows = [("path", "type", "parameters", "")]
        rows += [
            (
                one.path or "(root)",
                one.type,
                f"{one.parameters:,}",
                f"also {', '.join(one.aliases)}" if one.aliases else "",
            )
            for one in self
        ]
        return text_table(rows)

    def __repr__(self) -> str:
        return str(self)


def installed_hooks(model: Any) -> InstalledHooks:
    """List all hooks that are on ``model`` now, ours and others', with those of the whole process at the end.

    Raises:
        HookError: ``model`` is no module.
    """
    return InstalledHooks(find_backend(model).installed_hooks(model))


def select(model: Any, selection: Selection = None) -> SelectedModules:
    """List what a selection matches in ``model``, without hooking anything.

    Args:
        model: a torch ``Module`` or MindSpore ``Cell``.
        selection: see :mod:`tenterhook.selection`; all modules by default.

    Raises:
        HookError: ``model`` is no module.
        SelectionError: the selection is malformed or matches nothing; the message lists the nearest names.
    """
    backend = find_backend(model)
    parameters = backend.parameters(model)
    sizes: dict[str, int] = {}
    for one in parameters:
        sizes[one.path] = sizes.get(one.path, 0) + backend.numel(one.parameter)
    chosen = resolve(selection, backend.entries(model), parameters=[one.name for one in parameters])
    return SelectedModules(
        SelectedModule(entry.path, type(entry.module).__name__, sizes.get(entry.path, 0), entry.aliases, entry.module)
        for entry in chosen
    )


def _short(source: str | None) -> str:
    """Write a source line with the last two parts of its file's path."""
    if source is None:
        return ""
    return "/".join(Path(source).parts[-2:])
