"""The 64-bit mixing function and the digest of bytes, in NumPy.

The native kernel computes the same numbers; this module is their definition. Neither is cryptographic: they guard against
chance, not against an opponent.
"""

from __future__ import annotations

import numpy as np

__all__ = ["GOLDEN", "PAGE_BYTES", "SEED", "digest_cells", "finish_digest", "mix64"]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio, odd: the step of SplitMix64's Weyl sequence."""

SEED = np.uint64(0x243F6A8885A308D3)
"""The first 64 bits of pi's fraction: keeps the digest's keys apart from the sketch's."""

_LOW = np.uint64(0xFFFFFFFF)
_LANES = 8  # 64-bit words in a stripe
_STRIPES = 32  # stripes in a page
_PAGES_AT_ONCE = 512  # 1 MiB: bounds the memory of a digest

PAGE_BYTES = 8 * _LANES * _STRIPES
"""Bytes in a page, whose words are summed before they are mixed."""


def mix64(z: np.ndarray) -> np.ndarray:
    """Mix 64-bit words (the finaliser of SplitMix64; Steele, Lea & Flood 2014): a bijection, element by element.

    Args:
        z: uint64, any shape, at least one dimension.

    Returns:
        uint64, the same shape.
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _weyl(start: int, count: int) -> np.ndarray:
    return np.arange(start + 1, start + count + 1, dtype=np.uint64) * GOLDEN


_KEYS = mix64(_weyl(0, _STRIPES * _LANES) + SEED).reshape(_STRIPES, _LANES)


def digest_cells(data: np.ndarray, first_page: int = 0) -> int:
    """Add up the mixed cells of bytes: what a digest is made of by :func:`finish_digest`.

    Equal bytes give equal digests, different ones differ but for a chance near 2**-64. The bytes are read as little-endian
    64-bit words, eight to a stripe, 32 stripes to a page, the last stripe padded with zeros. Each word is XORed with a key of
    its place in the page and its 32-bit halves multiplied; products are summed per page and lane, and each word is added to the
    sum of the neighbouring lane, so that no product by zero can hide it. The page sums are mixed with their place and added up.

    Args:
        data: uint8, one dimension, contiguous; of whole pages, but for the end of what is digested.
        first_page: how many pages come before.

    Returns:
        The sum, not reduced modulo 2**64; those of consecutive parts add up to that of the whole.
    """
    total = 0
    for start in range(0, len(data), PAGE_BYTES * _PAGES_AT_ONCE):
        part = data[start : start + PAGE_BYTES * _PAGES_AT_ONCE]
        stripes = -(-len(part) // (8 * _LANES))
        pages = -(-stripes // _STRIPES)
        padded = np.zeros(pages * PAGE_BYTES, np.uint8)
        padded[: len(part)] = part
        words = padded.view("<u8").astype(np.uint64, copy=False).reshape(pages, _STRIPES, _LANES)
        keyed = words ^ _KEYS
        products = (keyed & _LOW) * (keyed >> np.uint64(32))
        products.reshape(-1, _LANES)[stripes:] = 0  # stripes that hold no data take no part
        sums = (products + words[..., [1, 0, 3, 2, 5, 4, 7, 6]]).sum(axis=1, dtype=np.uint64).reshape(-1)
        total += int(mix64(sums + _weyl((first_page + start // PAGE_BYTES) * _LANES, len(sums))).sum(dtype=np.uint64))
    return total


def finish_digest(size: int, cells: int) -> int:
    """Turn the sum of the mixed cells of all pages, modulo 2**64, and the length in bytes into the digest."""
    final = (size * int(GOLDEN) + int(SEED) + cells) % 2**64
    return int(mix64(np.array([final], np.uint64))[0])
