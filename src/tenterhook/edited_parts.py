"""Which parts of a module's arguments or output an edit is meant for."""

from __future__ import annotations

from typing import Any

from tenterhook.backends import Backend
from tenterhook.edit_rules import EVERY, Rule
from tenterhook.edit_values import EditValue
from tenterhook.errors import EditError, SelectionError
from tenterhook.values import argument_leaves, get_slot, leaves

__all__ = ["EditedParts"]

Parts = list[tuple[str, Any]]
"""Slots and what is there."""


class EditedParts:
    """Finds the parts that one rule is meant for.

    Args:
        backend: the framework.
        rule: the rule.
        where: what it is and where, for messages.
    """

    def __init__(self, backend: Backend, rule: Rule, where: str) -> None:
        self._backend = backend
        self._rule = rule
        self._where = where

    def of_output(self, output: Any) -> Parts:
        """Return the parts of an output: for a function all of it, for an edit value its only tensor, unless a slot is named.

        Raises:
            EditError: there is nothing at the slot, or no single tensor.
        """
        slot = self._rule.slot
        if slot is None and not isinstance(self._rule.value, EditValue):
            return [("", output)]
        every = leaves(output, self._backend.tensor_types)
        if slot == EVERY:
            return every
        if slot is not None:
            return [(slot, self._at(output, slot))]
        return [self._only(every)]

    def of_input(self, bound: dict[str, Any]) -> Parts:
        """Return the parts of bound arguments: the only one that holds tensors, unless a slot is named.

        Raises:
            EditError: no such argument, or there are several.
        """
        slot, types = self._rule.slot, self._backend.tensor_types
        if slot == EVERY:
            return argument_leaves(bound, types)
        if slot is not None:
            return [(slot, self._argument(bound, slot))]
        if isinstance(self._rule.value, EditValue):
            return [self._only(argument_leaves(bound, types))]
        holding = [(name, value) for name, value in bound.items() if leaves(value, types)]
        return [self._only(holding or list(bound.items()))]

    def passed_on(self, bound: dict[str, Any]) -> tuple[str, Any]:
        """Return what a module that is left out passes on: its first argument, unless a slot is named.

        Raises:
            EditError: no such argument, or none at all.
        """
        if self._rule.slot is not None:
            return self._rule.slot, self._argument(bound, self._rule.slot)
        if not bound:
            raise EditError(
                f"{self._where}: it was called without arguments, so nothing can be passed on\n  give a function"
            )
        return next(iter(bound.items()))

    def of_gradients(self, every: Parts) -> Parts:
        """Return those tensors, of all, whose gradients are meant.

        Raises:
            EditError: there is none.
        """
        found = [(slot, tensor) for slot, tensor in every if self._rule.takes(slot)]
        if not found:
            raise self._no_tensor([slot for slot, _ in every])
        return found

    def _argument(self, bound: dict[str, Any], slot: str) -> Any:
        slot = slot.removeprefix(".")
        for name in sorted(bound, key=len, reverse=True):
            if slot == name or (slot.startswith(name) and slot[len(name)] in ".["):
                return self._at(bound[name], slot[len(name) :])
        raise EditError(f"{self._where}: no argument {slot!r} in this call\n  it has {', '.join(bound) or 'none'}")

    def _at(self, value: Any, slot: str) -> Any:
        try:
            return get_slot(value, slot)
        except SelectionError as error:
            raise EditError(f"{self._where}: {error}") from None

    def _only(self, parts: Parts) -> tuple[str, Any]:
        backend = self._backend
        if len(parts) > 1 and all(isinstance(part, backend.tensor_types) for _, part in parts):
            real = [(slot, part) for slot, part in parts if "float" in backend.summary(part)[1]]
            parts = real or parts
        if len(parts) == 1:
            return parts[0]
        if not parts:
            raise self._no_tensor([])
        slots = ", ".join(repr(slot) for slot, _ in parts)
        raise EditError(
            f"{self._where}: there are {len(parts)} tensors here: {slots}\n"
            f"  choose one: slot={parts[0][0]!r}; or all of them, each by itself: slot='{EVERY}'"
        )

    def _no_tensor(self, slots: list[str]) -> EditError:
        wanted = f" at slot {self._rule.slot!r}" if self._rule.slot else ""
        return EditError(
            f"{self._where}: there is no tensor{wanted}\n  the tensors here are {', '.join(map(repr, slots)) or 'none'}"
        )
