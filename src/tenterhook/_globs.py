"""Patterns of paths: ``*`` is one level or part of it, ``**`` any number of levels."""

from __future__ import annotations

import functools
import re

from tenterhook.errors import SelectionError

__all__ = ["GLOB_SIGNS", "class_end", "glob_pattern"]

GLOB_SIGNS = frozenset("*?[")
"""The signs that make a text a pattern."""


@functools.lru_cache(maxsize=512)
def glob_pattern(glob: str, shown: str = "") -> re.Pattern[str]:
    """Return the regular expression that a path pattern stands for, to be used with ``fullmatch``.

    Args:
        glob: The pattern.
        shown: Text that the pattern is part of, for messages.

    Raises:
        SelectionError: A ``[`` is not closed, or ``**`` is only part of a level.
    """
    levels = _levels(glob, shown or glob)
    levels = [level for at, level in enumerate(levels) if level != "**" or at == 0 or levels[at - 1] != "**"]
    if levels == ["**"]:
        return re.compile(r".*", re.DOTALL)
    pattern = ""
    for at, level in enumerate(levels):
        last = at == len(levels) - 1
        if level != "**":
            pattern += _level_pattern(level) + ("" if last else r"\.")
        else:
            pattern += r"[^.]+(?:\.[^.]+)*" if last else r"(?:[^.]+\.)*"
    return re.compile(pattern)


def _levels(glob: str, shown: str) -> list[str]:
    """Split a pattern at its dots, but not within brackets."""
    levels = [""]
    position = 0
    while position < len(glob):
        sign = glob[position]
        if sign == "[":
            end = class_end(glob, position)
            if end < 0:
                raise SelectionError(
                    f"cannot read selection {shown!r} at position {shown.find(glob) + position}: the '[' is not "
                    f"closed; for example 'h.[0-3].mlp'"
                )
            levels[-1] += glob[position : end + 1]
            position = end
        elif sign == ".":
            levels.append("")
        else:
            levels[-1] += sign
        position += 1
    for level in levels:
        if level != "**" and "**" in level:
            raise SelectionError(
                f"cannot read selection {shown!r}: '**' is any number of whole levels and stands alone between dots, "
                f"for example '**.attn'; part of one level is '*'"
            )
    return levels


def _level_pattern(level: str) -> str:
    if level == "*":
        return "[^.]+"
    pattern = ""
    position = 0
    while position < len(level):
        sign = level[position]
        if sign == "*":
            pattern += "[^.]*"
        elif sign == "?":
            pattern += "[^.]"
        elif sign == "[":
            end = class_end(level, position)
            pattern += _class_pattern(level[position + 1 : end])
            position = end
        else:
            pattern += re.escape(sign)
        position += 1
    return pattern


def _class_pattern(inner: str) -> str:
    negated = inner.startswith("!")
    members = inner[1:] if negated else inner
    singles = ""
    position = 0
    while position < len(members):
        low = members[position]
        if members[position + 1 : position + 2] == "-" and position + 2 < len(members):
            high = members[position + 2]
            singles += f"{re.escape(low)}-{re.escape(high)}" if low <= high else ""
            position += 3
        else:
            singles += re.escape(low)
            position += 1
    if negated:
        return f"[^.{singles}]"
    return rf"(?:(?!\.)[{singles}])" if singles else r"(?!)"


def class_end(text: str, position: int) -> int:
    """Return where the class in brackets that starts at a position ends; -1 if none starts there or none ends."""
    if text[position] != "[":
        return -1
    # A bracket in first place is a member of the class.
    return text.find("]", position + (3 if text[position + 1 : position + 2] == "!" else 2))
