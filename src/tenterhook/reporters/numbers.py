"""How numbers are written, everywhere the same: three significant digits, in as few characters as can be."""

from __future__ import annotations

import math

__all__ = ["count", "number", "plural", "shape", "share", "size", "span"]


def number(value: float | None) -> str:
    """Write a number with three significant digits: ``0.812``, ``-1.4``, ``9.7e+04``, ``nan``; ``-`` for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(float(value))
    if value == 0:
        return "0"
    magnitude = abs(value)
    if 1e-3 <= magnitude < 9995:
        digits = max(0, 2 - math.floor(math.log10(magnitude)))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent):+03d}"


def count(value: int) -> str:
    """Write a count: ``9,876``, ``1.23 M``."""
    for limit, unit in ((1e9, "G"), (1e6, "M")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:,}"


def plural(value: int, noun: str) -> str:
    """Write a count with its noun: ``1 step``, ``12 steps``."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def share(value: float) -> str:
    """Write a share as what it adds: ``+1.8 %``. Its blank does not break."""
    return f"{100 * value:+.1f}\N{NO-BREAK SPACE}%"


def size(value: int) -> str:
    """Write a number of bytes: ``512 B``, ``31.4 MB``."""
    amount = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


def span(seconds: float) -> str:
    """Write a duration: ``0.42 s``, ``12m41s``, ``3h05m``."""
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def shape(sizes: tuple[int, ...] | list[int] | None) -> str:
    """Write a shape: ``64x3x28x28``; ``scalar`` for none, ``-`` where it is not known."""
    if sizes is None:
        return "-"
    return "x".join(map(str, sizes)) or "scalar"
