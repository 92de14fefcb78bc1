"""A model and its modules as they were at some time, none of them kept alive."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from tenterhook.backends import Backend, ParameterEntry
from tenterhook.errors import HookError
from tenterhook.selection import Entry

__all__ = ["ModelRef"]


class ModelRef:
    """A model, and which modules it had when it was given.

    Args:
        backend: its framework.
        model: the model.

    Attributes:
        name: its class.
    """

    def __init__(self, backend: Backend, model: Any) -> None:
        entries = backend.entries(model)
        self.name = type(entries[0].module).__name__
        self._backend = backend
        self._given: weakref.ref[Any] = weakref.ref(model)
        self._weak: list[tuple[Entry, weakref.ref[Any]]] = [
            (replace(entry, module=None), weakref.ref(entry.module)) for entry in entries
        ]

    @property
    def refs(self) -> list[weakref.ref[Any]]:
        """Weak references to the modules, the root first."""
        return [ref for _, ref in self._weak]

    def entries(self) -> list[Entry]:
        """Return the modules of that time that are still there, the root first; empty where the model is gone."""
        if self._weak[0][1]() is None:
            return []
        return [replace(entry, module=module) for entry, ref in self._weak if (module := ref()) is not None]

    def parameters(self) -> list[ParameterEntry]:
        """Return the parameters that the model has now; empty where it is gone."""
        root = self._weak[0][1]()
        return [] if root is None else self._backend.parameters(root)

    def get(self, what: str) -> Any:
        """Return the model.

        Args:
            what: what it is needed for, as a plural: ``"edits"``.

        Raises:
            HookError: it is gone.
        """
        root = self._weak[0][1]()
        if root is None:
            raise HookError(f"the {self.name} that these {what} are for is gone\n  keep a reference to the model")
        given = self._given()
        return root if given is None else given  # a wrapper may be gone, and the model inside go on
