"""The 64-bit words of sketch and digest for devices, whose integers are signed.

What is written here works on the tensors of any framework that has ``^`` and ``*`` for them, modulo 2**64; a logical shift is
for the framework to give. The definitions are those of ``hashing`` and ``sketch``, in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tenterhook.stats.hashing import GOLDEN, SEED

__all__ = [
    "LANES",
    "LOW_HALF",
    "PAGE_BYTES",
    "ROTATION",
    "SIGNED_GOLDEN",
    "SIGNED_SEED",
    "STRIPES",
    "STRIPE_BYTES",
    "mix64",
    "signed",
]

LANES, STRIPES = 8, 32
"""64-bit words in a stripe of the digest, stripes in a page."""

STRIPE_BYTES, PAGE_BYTES = 8 * LANES, 8 * LANES * STRIPES
LOW_HALF = 0xFFFFFFFF

_T = TypeVar("_T")


def signed(word: int) -> int:
    """Return the number whose 64 bits, as a signed integer, are those of ``word``."""
    return (word & (2**64 - 1)) - (2**64 if word & (1 << 63) else 0)


ROTATION = signed(0xD6E8FEB86659FD93)
"""The factor of which the highest bits turn the lanes of a block of the sketch."""

SIGNED_GOLDEN, SIGNED_SEED = signed(int(GOLDEN)), signed(int(SEED))
_FIRST, _SECOND = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def mix64(words: _T, shifted: Callable[[_T, int], _T]) -> _T:
    """Mix words of 64 bits, element by element (``hashing.mix64``).

    Args:
        words: int64, any shape.
        shifted: ``shifted(words, by)`` shifts right and fills up with zeros.
    """
    words = (words ^ shifted(words, 30)) * _FIRST  # type: ignore[operator]
    words = (words ^ shifted(words, 27)) * _SECOND  # type: ignore[operator]
    return words ^ shifted(words, 31)  # type: ignore[operator]
