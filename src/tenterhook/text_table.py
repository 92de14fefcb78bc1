"""Rows of words as a table of plain text."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["text_table"]


def text_table(rows: Iterable[tuple[str, ...]]) -> str:
    """Set rows in columns, two blanks between them and none at the end of a line; the first row is the heading."""
    table = list(rows)
    widths = [max(len(row[index]) for row in table) for index in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )
