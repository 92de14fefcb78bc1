"""The statistics, sketch and digest of one part of a tensor, as torch operations that never wait for a device.

Nothing here asks for a value: what would be a branch is a mask, and what is a division or a root is left to
:mod:`tenterhook.stats.parts`, which gets the sums. The definitions are those of ``docs/statistics.md``.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from tenterhook.stats import GROUP_DIGEST, GROUP_SKETCH, SKETCH_SIZE
from tenterhook.stats.parts import PART_COUNTS, PART_SIZE, PART_SUMS
from tenterhook.stats.words import (
    LANES,
    LOW_HALF,
    PAGE_BYTES,
    ROTATION,
    SIGNED_GOLDEN,
    SIGNED_SEED,
    STRIPE_BYTES,
    STRIPES,
    mix64,
)

__all__ = ["real_dtype", "write_part"]

_EXPONENT = {  # integers of the same size, the bits of the exponent, the powers of two that have a normal inverse
    torch.float32: (torch.int32, 0x7F800000, 2.0**-126, 2.0**126),
    torch.float64: (torch.int64, 0x7FF0000000000000, 2.0**-1000, 2.0**1000),
}
_EXACT_IN_FLOAT32 = frozenset(
    {torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.float16, torch.bfloat16}
)


@lru_cache(maxsize=64)
def real_dtype(device: torch.device) -> torch.dtype:
    """Return what sums are carried in on a device: float64, or float32 where it has none (Apple's, some of Intel's)."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).add_(1)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def write_part(
    flat: torch.Tensor, start: int, offset: int, groups: int, *, counts: torch.Tensor, sums: torch.Tensor
) -> None:
    """Measure one part of a tensor into its record.

    Args:
        flat: at most ``PART_SIZE`` elements, contiguous, of a supported dtype.
        start: how many elements of the tensor come before; a multiple of ``PART_SIZE``.
        offset: flat index of the tensor's first element in the whole that it is a shard of, for the sketch.
        groups: bits of ``RowBuffer.groups``: what is wanted.
        counts: int64 (6,), on the device of ``flat``; gets the whole numbers in the order of ``PART_COUNTS``.
        sums: float64 or float32 (70,), on that device; gets the numbers in the order of ``PART_SUMS``, then the sketch.
    """
    real = sums.dtype
    values = _values(flat, real)
    finite = None if not (flat.is_floating_point() or flat.is_complex()) else torch.isfinite(values)
    clean = values if finite is None else torch.where(finite, values, 0.0)
    counted, summed, scaled = _statistics(values, clean, finite, real)
    if groups & GROUP_DIGEST:
        first = start * flat.element_size() // PAGE_BYTES
        counted[PART_COUNTS.index("cells")] = _digest_cells(flat, first)
    torch.stack(counted, out=counts[: len(PART_COUNTS)])
    torch.stack(summed, out=sums[: len(PART_SUMS)])
    if groups & GROUP_SKETCH:
        at = offset + start
        if flat.is_complex():
            halves = torch.view_as_real(flat).reshape(-1)
            halves = halves.float() if halves.dtype is torch.float16 else halves  # which holds neither scale nor sums
            scale = summed[PART_SUMS.index("scale")].to(halves.dtype)
            scaled, at = torch.where(torch.isfinite(halves), halves, 0.0) * scale.reciprocal(), 2 * at
        sums[len(PART_SUMS) :][:SKETCH_SIZE].copy_(_sketch(scaled, at, real))


def _values(flat: torch.Tensor, real: torch.dtype) -> torch.Tensor:
    """Give the numbers to measure, as float32 where that holds them exactly, else as ``real``."""
    if flat.is_complex():
        halves = torch.view_as_real(flat).to(real)
        one, other = halves[..., 0], halves[..., 1]
        infinite = torch.isinf(one) | torch.isinf(other)  # also beside a NaN, as C99's hypot has it
        return torch.where(infinite, torch.inf, torch.hypot(one, other))
    if flat.dtype in (torch.float32, real):
        return flat
    narrow = flat.dtype in _EXACT_IN_FLOAT32 or (flat.is_floating_point() and flat.element_size() == 1)
    return flat.to(torch.float32 if narrow else real)


def _statistics(
    values: torch.Tensor, clean: torch.Tensor, finite: torch.Tensor | None, real: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Return the counts and the sums, without dimensions, and the values divided by the scale.

    ``clean`` is ``values`` with 0 for what is not ``finite``.
    """
    zeros = (values == 0).sum()
    none = torch.zeros_like(zeros)
    if finite is None:
        low, high = values.amin(), values.amax()
        n, infinite = none + values.numel(), [none, none, none]
    else:
        low = torch.where(finite, values, torch.inf).amin()
        high = torch.where(finite, values, -torch.inf).amax()
        n, infinite = (
            finite.sum(),
            [torch.isnan(values).sum(), (values == torch.inf).sum(), (values == -torch.inf).sum()],
        )
    integer, exponent, least, most = _EXPONENT[values.dtype]
    scale = (torch.maximum(-low, high).view(integer) & exponent).view(values.dtype).clamp(least, most)
    scaled = clean * scale.reciprocal()  # exact: no square over- or underflows
    shift = (scaled.sum(dtype=real) / n).to(values.dtype)
    apart = scaled - shift
    if finite is not None:
        apart = torch.where(finite, apart, 0.0)
    sums = [low, high, scale, shift, apart.sum(dtype=real), apart.square_().sum(dtype=real)]
    return [n, *infinite, zeros, none], [figure.to(real) for figure in sums], scaled


# --- the sketch ------------------------------------------------------------------------------------------------------
def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    return (words >> by) & ((1 << (64 - by)) - 1)  # signed integers shift their sign in


def _weyl(start: int, count: int, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    return numbers * SIGNED_GOLDEN


def _projection(block: int, blocks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sign of each element, int8, and which element goes into each bucket, int64; both (blocks, 64)."""
    lanes = torch.arange(SKETCH_SIZE, dtype=torch.int64, device=device)
    bits = mix64(_weyl(block, blocks, device), _shifted)[:, None]
    signs = 1 - 2 * ((bits >> lanes) & 1).to(torch.int8)
    return signs, lanes ^ _shifted(bits * ROTATION, 58)


@lru_cache(maxsize=16)
def _first_projection(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the projection of a tensor's first part: 9 MiB a device, and most tensors need no other."""
    with torch.inference_mode(mode=False):
        return _projection(0, PART_SIZE // SKETCH_SIZE, device)


def _sketch(values: torch.Tensor, start: int, real: torch.dtype) -> torch.Tensor:
    before, block = start % SKETCH_SIZE, start // SKETCH_SIZE
    blocks = -(-(before + values.numel()) // SKETCH_SIZE)
    if blocks * SKETCH_SIZE != values.numel():
        behind = blocks * SKETCH_SIZE - before - values.numel()
        values = torch.constant_pad_nd(values, [before, behind], 0)
    if block == 0 and blocks <= PART_SIZE // SKETCH_SIZE and not _is_fake(values):
        signs, sources = _first_projection(values.device)
        signs, sources = signs[:blocks], sources[:blocks]
    else:
        signs, sources = _projection(block, blocks, values.device)
    return (values.view(blocks, SKETCH_SIZE) * signs).gather(1, sources).sum(0, dtype=real)


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


# --- the digest ------------------------------------------------------------------------------------------------------
def _digest_cells(flat: torch.Tensor, first_page: int) -> torch.Tensor:
    """Return the sum of the mixed cells of the part's pages, modulo 2**64."""
    device = flat.device
    size = flat.numel() * flat.element_size()
    stripes = -(-size // STRIPE_BYTES)
    pages = -(-stripes // STRIPES)
    data = flat.view(torch.uint8)
    if pages * PAGE_BYTES != size:
        data = torch.constant_pad_nd(data, [0, pages * PAGE_BYTES - size], 0)
    elif data.storage_offset() % 8:
        data = data.clone()
    words = data.view(torch.int64).view(pages, STRIPES, LANES)
    keys = mix64(_weyl(0, STRIPES * LANES, device) + SIGNED_SEED, _shifted).view(STRIPES, LANES)
    keyed = words ^ keys
    products = (keyed & LOW_HALF).mul_(_shifted(keyed, 32))
    products.view(-1, LANES)[stripes:].zero_()  # stripes that hold no data take no part
    neighbours = words.sum(1).view(pages, LANES // 2, 2).flip(2).view(pages, LANES)
    cells = (products.sum(1) + neighbours).view(-1)
    return mix64(cells + _weyl(first_page * LANES, pages * LANES, device), _shifted).sum()
