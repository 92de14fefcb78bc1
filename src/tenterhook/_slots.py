"""The spelling of slots: where in a nested value something is."""

from __future__ import annotations

import json
import re

from tenterhook.errors import SelectionError

__all__ = ["IDENTIFIER", "SLOT_STEP", "STRING", "attribute_step", "index_step", "key_step", "malformed", "split_slot"]

STRING = r'"(?:[^"\\]|\\.)*"'
"""A JSON string, for regular expressions."""

IDENTIFIER = re.compile(r"[^\W\d]\w*")
SLOT_STEP = re.compile(rf"\.[^\W\d]\w*|\[(?:-?\d+|\?\d+|{STRING})\]")

_INDEX_STEPS = tuple(f"[{index}]" for index in range(256))


def index_step(index: int) -> str:
    """Return the step of a slot into a sequence, or to an int key: ``[3]``."""
    return _INDEX_STEPS[index] if 0 <= index < len(_INDEX_STEPS) else f"[{index}]"


def attribute_step(name: str) -> str:
    """Return the step of a slot to a field or attribute: ``.name``, or ``["a b"]`` where that is no identifier."""
    return f".{name}" if IDENTIFIER.fullmatch(name) else key_step(name)


def key_step(key: object, position: int = 0) -> str:
    """Return the step of a slot to a key of a mapping: ``["key"]``, ``[3]``, or ``[?position]`` for any other key."""
    if isinstance(key, str):
        return f"[{json.dumps(str(key), ensure_ascii=False)}]"
    if isinstance(key, int) and not isinstance(key, bool):
        return index_step(int(key))
    return f"[?{position}]"


def split_slot(slot: str) -> tuple[str, ...]:
    """Split a slot into its steps; their concatenation is the slot.

    >>> split_slot('mask["a"][0].b')
    ('mask', '["a"]', '[0]', '.b')

    Raises:
        SelectionError: The slot is malformed.
    """
    steps: list[str] = []
    position = 0
    if (found := IDENTIFIER.match(slot)) is not None:
        steps.append(found[0])
        position = found.end()
    while (found := SLOT_STEP.match(slot, position)) is not None:
        steps.append(found[0])
        position = found.end()
    if position != len(slot):
        reason = 'expected a step of a slot: [0], .name or ["key"]'
        raise malformed("slot", slot, position, reason, "[1][0]")
    return tuple(steps)


def malformed(what: str, text: str, position: int, reason: str, example: str) -> SelectionError:
    """Return the error for a text that cannot be read."""
    return SelectionError(f"cannot read {what} {text!r} at position {position}: {reason}; for example {example!r}")
