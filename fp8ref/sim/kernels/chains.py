"""Chains of steps of a tensor core (spec G-10 to G-12): the twin of ``accumulate.chains_plain`` for finite operands.

``pack`` lays a out by steps. ``columns`` fills some columns of the result, tile by tile: for each step it
lays a tile of b out, and takes the step for all rows (``chain_steps``).
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from fp8ref.sim.kernels.bits import as_bits
from fp8ref.sim.kernels.chain_steps import LANES, MOST_UNITS, TO_NEAREST, TOWARD_ZERO, set_rounding, step, zero_and_bias
from fp8ref.sim.kernels.compiled import compiled

u32, i32, u8, f32 = np.uint32, np.int32, np.uint8, np.float32

CHAIN_END, SPLIT_END = 1, 2
"""What follows a step: the accumulator joins the part's sum and is cleared; that sum joins the result, and is cleared."""


class Rows(NamedTuple):
    """a [M, K] by steps of a unit.

    numbers   float32 [steps, M, width], or float64 if sums of a step need it; exponents uint8 alike.
    signs     uint32 [steps, M]: bit k is the sign of number k.
    unit      width, fraction_bits and output_bits.
    """

    numbers: np.ndarray
    exponents: np.ndarray
    signs: np.ndarray
    unit: tuple[int, int, int]


def pack(a: np.ndarray, emin: int, width: int, fraction_bits: int, output_bits: int) -> Rows:
    """Rows of float32 values a [M, K] of a format with this emin; K is a multiple of the width."""
    # Products lie below 2^(F + 2) units and the accumulator below 2^(F + 1).
    double = (width << (fraction_bits + 2)) + (1 << (fraction_bits + 1)) >= MOST_UNITS
    a = np.ascontiguousarray(a.reshape(len(a), a.shape[1] // width, width).swapaxes(0, 1))
    bits = np.packbits(np.signbit(a), axis=-1, bitorder="little")  # [steps, M, bytes]
    signs = bits.view(f"<u{bits.shape[-1]}")[..., 0].astype(u32)
    exponents = np.empty(a.shape, u8)
    exponents_of(a.reshape(-1), emin, zero_and_bias(double)[0], exponents.reshape(-1))
    return Rows(a.astype(np.float64) if double else a, exponents, signs, (width, fraction_bits, output_bits))


def padded(b: np.ndarray) -> np.ndarray:
    """b [N, K] with rows of zeros up to a multiple of LANES."""
    return np.ascontiguousarray(np.pad(b, ((0, -len(b) % LANES), (0, 0))) if len(b) % LANES else b)


def columns(a: Rows, b: np.ndarray, emin: int, ends: np.ndarray, out: np.ndarray, begin: int, end: int) -> None:
    """Fill the columns begin to end of out [M, N], begin a multiple of LANES, with the chains of a and b [N, K].

    b       as ``padded`` returns it, float32 values of a format with this emin.
    ends    uint8 [steps]: what follows each step, CHAIN_END and SPLIT_END.

    A chain from 0 stays a multiple of 2^(-28 - F), -28 the smallest exponent of a product, and below 2^32 K: float32 neither
    underflows nor overflows.
    """
    (_, m, width), n, kind = a.numbers.shape, out.shape[1], a.numbers.dtype
    tile, parts, of_b = aligned(width * LANES, f32), aligned(2 * width * LANES, kind), aligned(width // 4 * LANES, u32)
    acc, part = aligned(m * LANES, f32), aligned(m * LANES, f32)
    flat = (x.reshape(-1) for x in (a.numbers, a.exponents, a.signs, b))
    zero, bias = zero_and_bias(kind == np.float64)
    chains(*flat, emin, zero, bias, ends, tile, parts, of_b, acc, part, out.reshape(-1), begin, end, m, n, *a.unit)


def aligned(size: int, dtype: Any) -> np.ndarray:
    """A flat array that begins at a line of the cache, so that no vector lies in two."""
    length = size * np.dtype(dtype).itemsize
    raw = np.empty(length + 64, u8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + length].view(dtype)


@njit(nogil=True, inline="always", error_model="numpy")
def _exponent(value, emin, zero):
    """max(floor(log2|v|), emin); ``zero`` of a zero."""
    magnitude = u32(as_bits(value) & u32(0x7FFFFFFF))
    exponent = max(i32(i32(magnitude >> u32(23)) - i32(127)), i32(emin))
    return exponent if magnitude > u32(0) else i32(zero)


@compiled
def exponents_of(values, emin, zero, out):
    """The exponents of float32 values, as bytes."""
    for i in range(values.size):
        out[i] = u8(_exponent(values[i], emin, zero))


@compiled
def chains(
    a, of_a, signs, b, emin, zero, bias, ends, tile, parts, of_b, acc, part, out, begin, end, m, n, width, fraction_bits, output_bits
):
    """``columns``, of flat arrays: these of ``Rows``, b, and room for a tile [width, LANES] of b, its parts and exponents, and the
    accumulators and sums [M, LANES]."""
    k = ends.size * width
    for first in range(begin, end, LANES):
        lanes = min(LANES, n - first)
        for i in range(m * LANES):
            acc[i] = f32(0)
            part[i] = f32(0)
        for i in range(m):
            for j in range(lanes):
                out[i * n + first + j] = f32(0)
        for s in range(ends.size):
            for j in range(LANES):
                for x in range(width):
                    tile[x * LANES + j] = b[(first + j) * k + s * width + x]
            for x in range(width):
                for j in range(LANES):
                    value = tile[x * LANES + j]
                    parts[x * 2 * LANES + j] = max(value, f32(0))
                    parts[(x * 2 + 1) * LANES + j] = min(value, f32(0))
            for x in range(0, width, 4):
                for j in range(LANES):
                    four = u32(0)
                    for y in range(4):
                        byte = u32(i32(bias) + _exponent(tile[(x + y) * LANES + j], emin, zero))
                        four = u32(four | u32(byte << u32(8 * y)))
                    of_b[x // 4 * LANES + j] = four
            set_rounding(i32(TOWARD_ZERO))
            step(a, of_a, signs, parts, of_b, acc, s, m, width, i32(fraction_bits), i32(output_bits))
            set_rounding(i32(TO_NEAREST))
            if ends[s]:
                for i in range(m * LANES):
                    part[i] += acc[i]
                    acc[i] = f32(0)
                if ends[s] & SPLIT_END:
                    for i in range(m):
                        for j in range(lanes):
                            out[i * n + first + j] += part[i * LANES + j]
                    for i in range(m * LANES):
                        part[i] = f32(0)
