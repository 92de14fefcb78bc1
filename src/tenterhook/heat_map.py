"""Numbers as a map of shades: rows down, positions across, as text and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

__all__ = ["svg_map", "text_map"]

_SHADES = " ░▒▓█"
_CELL, _LETTER = 22, 7.3  # pixels


def text_map(names: Sequence[str], shades: np.ndarray, notes: Sequence[str]) -> list[str]:
    """Draw one character for each number.

    Args:
        names: of the rows.
        shades: from 0 (blank) to 1 (full), NaN where there is nothing, shape (rows, positions).
        notes: what is said at the end of each row.
    """
    width, count = max(map(len, names)), shades.shape[1]
    lines = []
    if count > 10:
        lines.append(
            f"{'':{width}}  " + "".join(str(number // 10 % 10) if number % 10 == 0 else " " for number in range(count))
        )
    lines.append(f"{'':{width}}  " + "".join(str(number % 10) for number in range(count)))
    for name, row, note in zip(names, shades, notes, strict=True):
        cells = "".join(_SHADES[round(float(value) * (len(_SHADES) - 1))] for value in _within(row))
        lines.append(f"{name:{width}}  {cells}  {note}")
    return lines


def svg_map(names: Sequence[str], shades: np.ndarray, values: np.ndarray, *, title: str) -> str:
    """Draw a square for each number; pointing at one shows its value.

    Args:
        names: of the rows.
        shades: from -1 (full, in the other colour) over 0 (blank) to 1 (full), NaN where there is nothing.
        values: what is shown of each square, of the same shape.
        title: the line below.
    """
    rows, count = shades.shape
    left, top = 16 + _LETTER * max(map(len, names)), 24
    width, height = max(left + count * _CELL + 8, 16 + _LETTER * len(title)), top + rows * _CELL + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}" '
        'font-family="monospace" font-size="12">',
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
    ]
    for number in range(count):
        lines.append(
            f'<text x="{left + (number + 0.5) * _CELL:.1f}" y="{top - 8}" text-anchor="middle">{number}</text>'
        )
    for row, name in enumerate(names):
        y = top + row * _CELL
        lines.append(f'<text x="8" y="{y + 15}">{escape(name)}</text>')
        for number in range(count):
            if np.isnan(shades[row, number]):
                continue
            lines.append(
                f'<rect x="{left + number * _CELL:.1f}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" '
                f'fill="{_colour(float(shades[row, number]))}"><title>{values[row, number]:.4g}</title></rect>'
            )
    lines += [f'<text x="8" y="{height - 10}">{escape(title)}</text>', "</svg>", ""]
    return "\n".join(lines)


def _within(row: np.ndarray) -> np.ndarray:
    return np.clip(np.nan_to_num(row), 0, 1)


def _colour(shade: float) -> str:
    """From a light grey to blue, or for what is below nothing to red."""
    nothing, full = (238, 240, 243), (20, 92, 180) if shade > 0 else (190, 50, 40)
    part = min(abs(shade), 1.0)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(nothing, full, strict=True))
