"""The statistics, sketch and digest of one part of a tensor, as MindSpore operations that never wait for a device.

As :mod:`tenterhook.backends._torch_measuring`: what would be a branch is a mask, and what is a division or a root is left to
:mod:`tenterhook.stats.parts`. Only operations that MindSpore documents for Ascend, GPU and CPU are used, and none in place.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mindspore
import numpy as np
from mindspore import ops

from tenterhook.stats import GROUP_DIGEST, GROUP_SKETCH, SKETCH_SIZE
from tenterhook.stats.parcels import COUNTS_BYTES, SUMS, aligned
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

__all__ = ["copied_bytes", "flat", "part_record"]

_EXPONENT = {  # integers of the same size, the bits of the exponent, the powers of two that have a normal inverse
    mindspore.float32: (mindspore.int32, 0x7F800000, 2.0**-126, 2.0**126),
    mindspore.float64: (mindspore.int64, 0x7FF0000000000000, 2.0**-1000, 2.0**1000),
}
_WHOLE = {1: mindspore.uint8, 2: mindspore.int16, 4: mindspore.int32, 8: mindspore.int64}
_WIDTH = {mindspore.int32: 32, mindspore.int64: 64}
_EXACT_IN_FLOAT32 = frozenset(
    {
        mindspore.bool_,
        mindspore.int8,
        mindspore.uint8,
        mindspore.int16,
        mindspore.uint16,
        mindspore.float16,
        mindspore.bfloat16,
    }
)
_HALVES = {mindspore.complex64: mindspore.float32, mindspore.complex128: mindspore.float64}

_Tensor = mindspore.Tensor


def flat(tensor: _Tensor) -> _Tensor:
    """Give a contiguous tensor of one dimension; a view where that is possible."""
    if not tensor.shape:
        # MindSpore 2.10 ends the process where a view of what an operation gave without dimensions is viewed as bytes
        whole = _WHOLE.get(tensor.itemsize, tensor.dtype)  # stacked is not every dtype on a CPU
        return ops.stack([tensor.view(whole)]).view(tensor.dtype)
    return (tensor if tensor.is_contiguous() else tensor.contiguous()).view((-1,))


def copied_bytes(tensor: _Tensor) -> _Tensor:
    """Copy the bytes of a tensor that has some, and zeros behind them up to the place of what is next in a parcel."""
    data = flat(tensor).view(mindspore.uint8)
    size = data.shape[0]
    behind = aligned(size) - size
    # concatenation copies in every case, whatever the dtype; copy() of a float divides by one
    return ops.cat((data, _zeros()[:behind])) if behind else ops.cat((data[: size // 2], data[size // 2 :]))


def part_record(part: _Tensor, start: int, groups: int, real: Any) -> _Tensor:
    """Measure one part of a tensor.

    Args:
        part: at most ``PART_SIZE`` elements, contiguous, of one dimension, of a supported dtype.
        start: how many elements of the tensor come before; a multiple of ``PART_SIZE``.
        groups: bits of ``RowBuffer.groups``: what is wanted.
        real: float64 or float32: what sums are carried in.

    Returns:
        Its record, uint8, laid out as :mod:`tenterhook.stats.parcels` reads it.
    """
    complex_ = part.dtype in _HALVES
    values = _values(part, real)
    finite = ops.isfinite(values) if complex_ or part.is_floating_point() else None
    clean = values if finite is None else ops.where(finite, values, ops.zeros_like(values))
    counts, sums, scaled = _statistics(values, clean, finite, _zero_count(part, values), real)
    if groups & GROUP_DIGEST:
        counts[PART_COUNTS.index("cells")] = _digest_cells(part, start * part.itemsize // PAGE_BYTES)
    numbers = ops.stack(sums)
    if groups & GROUP_SKETCH:
        at = start
        if complex_:
            halves = part.view(_HALVES[part.dtype])
            clean = ops.where(ops.isfinite(halves), halves, ops.zeros_like(halves))
            scaled, at = clean.astype(real) / sums[PART_SUMS.index("scale")], 2 * start
        buckets = _sketch(scaled, at, real)
    else:
        buckets = ops.zeros((SKETCH_SIZE,), real)
    whole = ops.stack(counts).view(mindspore.uint8)
    real_bytes = ops.cat((numbers, buckets)).view(mindspore.uint8)
    gap, rest = COUNTS_BYTES - 8 * len(PART_COUNTS), aligned(SUMS * numbers.itemsize) - SUMS * numbers.itemsize
    pieces = (whole, _zeros()[:gap], real_bytes, _zeros()[:rest])
    return ops.cat([piece for piece in pieces if piece.shape[0]])


@lru_cache(maxsize=1)
def _zeros() -> _Tensor:
    return _Tensor(np.zeros(PAGE_BYTES, np.uint8))


def _values(part: _Tensor, real: Any) -> _Tensor:
    """Give the numbers to measure, as float32 where that holds them exactly, else as ``real``."""
    if part.dtype in _HALVES:
        halves = part.view(_HALVES[part.dtype]).view((-1, 2)).astype(real)
        infinite = (
            ops.amax(ops.isinf(halves).astype(mindspore.int32), 1) > 0
        )  # also beside a NaN, as C99's hypot has it
        scale = _scale(ops.amax(ops.abs(halves), 1))
        length = ops.sqrt(ops.sum(ops.square(halves / scale.view((-1, 1))), 1)) * scale
        return ops.where(infinite, ops.full_like(length, float("inf")), length)
    if part.dtype in (mindspore.float32, real):
        return part
    return part.astype(mindspore.float32 if part.dtype in _EXACT_IN_FLOAT32 else real)


def _ordered(values: _Tensor) -> _Tensor:
    """Give whole numbers that are ordered as the values are; the inverse is :func:`_unordered`."""
    return _turned(values.view(_EXPONENT[values.dtype][0]))


def _unordered(numbers: _Tensor, dtype: Any) -> _Tensor:
    return _turned(numbers).view(dtype)


def _turned(bits: _Tensor) -> _Tensor:
    width = _WIDTH[bits.dtype]
    return bits ^ (ops.bitwise_right_shift(bits, width - 1) & (2 ** (width - 1) - 1))


def _zero_count(part: _Tensor, values: _Tensor) -> _Tensor:
    if part.dtype in _HALVES:
        halves = part.view(_HALVES[part.dtype])
        return _count(ops.amax(_magnitude_bits(halves).view((-1, 2)), 1) == 0)
    return _count(_magnitude_bits(values) == 0)


def _magnitude_bits(values: _Tensor) -> _Tensor:
    integer = _EXPONENT[values.dtype][0]
    return values.view(integer) & (2 ** (_WIDTH[integer] - 1) - 1)


def _scale(magnitudes: _Tensor) -> _Tensor:
    """Give the power of two just below each magnitude, or the nearest one that has a normal inverse."""
    integer, exponent, *_ = _EXPONENT[magnitudes.dtype]
    least, most = _limits(magnitudes.dtype)
    bits = magnitudes.view(integer) & exponent
    return ops.maximum(ops.minimum(bits.view(magnitudes.dtype), most), least)


@lru_cache(maxsize=2)
def _limits(dtype: Any) -> tuple[_Tensor, _Tensor]:
    *_, least, most = _EXPONENT[dtype]
    return _Tensor(least, dtype), _Tensor(most, dtype)  # a number of Python's would come as float32


def _count(mask: _Tensor) -> _Tensor:
    return ops.sum(mask.astype(mindspore.int64))


def _statistics(
    values: _Tensor, clean: _Tensor, finite: _Tensor | None, zeros: _Tensor, real: Any
) -> tuple[list[_Tensor], list[_Tensor], _Tensor]:
    """Return the counts and the sums, without dimensions, and the values divided by the scale.

    ``clean`` is ``values`` with 0 for what is not ``finite``. Values are compared as whole numbers, since some of the threads
    of MindSpore's CPU, and some devices, take subnormal numbers for zeros.
    """
    none = ops.zeros_like(zeros)
    if finite is None:
        low, high = ops.amin(values), ops.amax(values)
        n, infinite = none + values.shape[0], [none, none, none]
    else:
        ordered = _ordered(values)
        infinity = ops.full_like(ordered, 2 ** (_WIDTH[ordered.dtype] - 1) - 1)
        low = _unordered(ops.amin(ops.where(finite, ordered, infinity)), values.dtype)
        high = _unordered(ops.amax(ops.where(finite, ordered, -infinity)), values.dtype)
        n = _count(finite)
        infinite = [_count(ops.isnan(values)), _count(values == float("inf")), _count(values == float("-inf"))]
    scale = _scale(ops.maximum(-low, high))
    scaled = clean / scale  # exact: no square over- or underflows; the CPU's product takes subnormal numbers for zeros
    shift = (ops.sum(scaled.astype(real)) / n.astype(real)).astype(values.dtype)
    apart = scaled - shift
    if finite is not None:
        apart = ops.where(finite, apart, ops.zeros_like(apart))
    sums = [low, high, scale, shift, ops.sum(apart.astype(real)), ops.sum(ops.square(apart).astype(real))]
    return [n, *infinite, zeros, none], [figure.astype(real) for figure in sums], scaled


# --- the sketch ------------------------------------------------------------------------------------------------------
def _shifted(words: _Tensor, by: int) -> _Tensor:
    return ops.bitwise_right_shift(words, by) & ((1 << (64 - by)) - 1)  # signed integers shift their sign in


def _sum64(words: _Tensor, *dim: int) -> _Tensor:
    """Add up words modulo 2**64; kernels that carry sums of integers in float64, as that of the CPU does, would round them."""
    low, high = words & LOW_HALF, _shifted(words, 32)
    return ops.sum(low, *dim) + ops.sum(high, *dim) * 2**32


def _weyl(start: int, count: int) -> _Tensor:
    return ops.arange(start + 1, start + count + 1, 1, dtype=mindspore.int64) * SIGNED_GOLDEN


def _projection(block: int, blocks: int) -> tuple[_Tensor, _Tensor]:
    """Return the sign of each element, float32, and which element goes into each bucket, int32; both (blocks, 64)."""
    lanes = ops.arange(0, SKETCH_SIZE, 1, dtype=mindspore.int64).view((1, SKETCH_SIZE))
    bits = mix64(_weyl(block, blocks), _shifted).view((blocks, 1))
    signs = 1 - 2 * (ops.bitwise_right_shift(bits, lanes) & 1)
    return signs.astype(mindspore.float32), (lanes ^ _shifted(bits * ROTATION, 58)).astype(mindspore.int32)


@lru_cache(maxsize=1)
def _first_projection() -> tuple[_Tensor, _Tensor]:
    """Keep the projection of a tensor's first part: 8 MiB, and most tensors need no other."""
    return _projection(0, PART_SIZE // SKETCH_SIZE)


def _sketch(values: _Tensor, start: int, real: Any) -> _Tensor:
    block, blocks = start // SKETCH_SIZE, -(-values.shape[0] // SKETCH_SIZE)
    behind = blocks * SKETCH_SIZE - values.shape[0]
    if behind:
        values = ops.cat((values, ops.zeros((behind,), values.dtype)))
    if block == 0 and blocks <= PART_SIZE // SKETCH_SIZE:
        signs, sources = _first_projection()
        signs, sources = signs[:blocks], sources[:blocks]
    else:
        signs, sources = _projection(block, blocks)
    signed = values.view((blocks, SKETCH_SIZE)) * signs.astype(values.dtype)
    return ops.sum(ops.gather_elements(signed, 1, sources).astype(real), 0)


# --- the digest ------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def _keys() -> _Tensor:
    return mix64(_weyl(0, STRIPES * LANES) + SIGNED_SEED, _shifted).view((STRIPES, LANES))


def _digest_cells(part: _Tensor, first_page: int) -> _Tensor:
    """Return the sum of the mixed cells of the part's pages, modulo 2**64."""
    data = part.view(mindspore.uint8)
    size = data.shape[0]
    stripes = -(-size // STRIPE_BYTES)
    pages = -(-stripes // STRIPES)
    if pages * PAGE_BYTES != size:
        data = ops.cat((data, _zeros()[: pages * PAGE_BYTES - size]))
    elif data.storage_offset() % 8:
        data = ops.cat((data[: size // 2], data[size // 2 :]))
    words = data.view(mindspore.int64).view((pages, STRIPES, LANES))
    keyed = words ^ _keys()
    products = (keyed & LOW_HALF) * _shifted(keyed, 32)
    empty = pages * STRIPES - stripes
    if empty:  # stripes that hold no data take no part
        filled = products.view((-1, LANES))[:stripes]
        products = ops.cat((filled, ops.zeros((empty, LANES), mindspore.int64))).view(words.shape)
    neighbours = ops.flip(_sum64(words, 1).view((pages, LANES // 2, 2)), (2,)).view((pages, LANES))
    cells = (_sum64(products, 1) + neighbours).view((-1,))
    return _sum64(mix64(cells + _weyl(first_page * LANES, pages * LANES), _shifted))
