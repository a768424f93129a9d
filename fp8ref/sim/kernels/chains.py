"""Chains of steps of a tensor core (spec G-10 to G-12), from codes: the twin of ``accumulate.chains_plain`` for finite operands.

``pack`` decodes a and lays it out by steps. ``columns`` fills some columns of the result, tile by tile: it decodes a tile of b once,
for as many steps as the cache holds, and takes these steps for some rows after others (``chain_steps``).
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from fp8ref.formats import Format
from fp8ref.sim.kernels.bits import prefer_small_code
from fp8ref.sim.kernels.chain_steps import MOST_UNITS, TO_NEAREST, TOWARD_ZERO, set_rounding, step, zero_and_bias
from fp8ref.sim.kernels.chain_tiles import lay_out
from fp8ref.sim.kernels.chain_vectors import LANES
from fp8ref.sim.kernels.compiled import compiled

u32, i32, u8, f32 = np.uint32, np.int32, np.uint8, np.float32

CHAIN_END, SPLIT_END = 1, 2
"""What follows a step: the accumulator joins the part's sum and is cleared; that sum joins the result, and is cleared."""

STEPS, ROWS = 8, 256
"""Steps whose tiles of b are laid out together, and rows that take them before others do: all that they touch lies in the second
cache. Other numbers from 1 to 32 and 64 to 1,024 are at most a tenth slower."""


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


def pack(a: np.ndarray, fmt: Format, width: int, fraction_bits: int, output_bits: int) -> Rows:
    """Rows of codes a [M, K] of finite numbers of a format; K is a multiple of the width."""
    # Products lie below 2^(F + 2) units and the accumulator below 2^(F + 1).
    double = (width << (fraction_bits + 2)) + (1 << (fraction_bits + 1)) >= MOST_UNITS
    a = np.ascontiguousarray(a.reshape(len(a), a.shape[1] // width, width).swapaxes(0, 1))
    bits = np.packbits(a >= 128, axis=-1, bitorder="little")  # [steps, M, bytes]
    signs = bits.view(f"<u{bits.shape[-1]}")[..., 0].astype(u32)
    numbers, exponents = np.empty(a.shape, np.float64 if double else f32), np.empty(a.shape, u8)
    look_up(a.reshape(-1), *tables(fmt, zero_and_bias(double)[0]), numbers.reshape(-1), exponents.reshape(-1))
    return Rows(numbers, exponents, signs, (width, fraction_bits, output_bits))


@functools.cache
def tables(fmt: Format, zero: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each code: its number, float32, and its exponent, a byte: max(floor(log2|v|), emin), ``zero`` of a zero. Codes of no number
    have any."""
    code = np.arange(256)
    field = (code & 0x7F) >> fmt.mantissa_bits
    count = (code & 0x7F) - ((np.maximum(field, 1) - 1) << fmt.mantissa_bits)  # in units of the exponent's last place
    exponent = np.maximum(field, 1) - fmt.bias
    number = np.where(code > 127, -1.0, 1.0) * np.ldexp(count, exponent - fmt.mantissa_bits)
    return number.astype(f32), np.where(count, exponent, zero).astype(np.int8).view(u8)


def padded(b: np.ndarray) -> np.ndarray:
    """b [N, K] with rows of zeros up to a multiple of LANES."""
    return np.ascontiguousarray(np.pad(b, ((0, -len(b) % LANES), (0, 0))) if len(b) % LANES else b)


def columns(a: Rows, b: np.ndarray, fmt: Format, ends: np.ndarray, out: np.ndarray, begin: int, end: int) -> None:
    """Add to the columns begin to end of out [M, N], begin a multiple of LANES, the chains of a and b [N, K].

    b       as ``padded`` returns it, codes of finite numbers of a format.
    ends    uint8 [steps]: what follows each step, CHAIN_END and SPLIT_END.

    A chain from 0 stays a multiple of 2^(-28 - F), -28 the smallest exponent of a product, and below 2^32 K: float32 neither
    underflows nor overflows.
    """
    (_, m, width), n, kind = a.numbers.shape, out.shape[1], a.numbers.dtype
    most = max(1, min(STEPS * f32().itemsize // kind.itemsize, len(ends)))
    room, parts = aligned((1 + most) * (width // 4) * LANES, u32), aligned(most * 2 * width * LANES, kind)
    acc = aligned(2 * m * LANES, f32)
    acc[:] = 0
    zero, of_one = zero_and_bias(kind == np.float64)
    sizes = np.array([begin, end, m, n, most, *a.unit, fmt.mantissa_bits, fmt.bias, of_one + zero, of_one], np.int64)
    flat = (x.reshape(-1) for x in (a.numbers, a.exponents, a.signs, b.view(u32)))
    chains(*flat, ends, room, parts, acc, out.reshape(-1), sizes)


def aligned(size: int, dtype: Any) -> np.ndarray:
    """A flat array that begins at a line of the cache, so that no vector lies in two."""
    length = size * np.dtype(dtype).itemsize
    raw = np.empty(length + 64, u8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + length].view(dtype)


@compiled
def look_up(codes, number_of, exponent_of, numbers, exponents):
    """The numbers of codes, and their exponents, by tables of all codes."""
    for i in range(codes.size):
        numbers[i] = number_of[codes[i]]
        exponents[i] = exponent_of[codes[i]]


@compiled
def chains(a, of_a, signs, b, ends, room, parts, acc, out, sizes):
    """``columns``, of flat arrays: these of ``Rows``, words of four codes of b, and room: for the words of a step of a tile of b
    [width / 4, LANES] and the exponents of ``most`` steps alike, for these steps' parts, and for the accumulators and the parts' sums
    [2, M, LANES]. ``sizes`` are as ``columns`` gives them: few arguments are compiled faster than many."""
    prefer_small_code()
    begin, end, m, n, most, width = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
    fraction_bits, output_bits, mantissa_bits, bias, zero, of_one = sizes[6], sizes[7], sizes[8], sizes[9], sizes[10], sizes[11]
    of_step, sums = width // 4, m * LANES
    k = ends.size * of_step
    for first in range(begin, end, LANES):  # the last step of a tile leaves accumulators and sums zero for the next
        lanes = min(LANES, n - first)
        for start in range(0, ends.size, most):
            stop = min(start + most, ends.size)
            for s in range(start, stop):
                for j in range(LANES):
                    at = (first + j) * k + s * of_step
                    for x in range(of_step):
                        room[x * LANES + j] = b[at + x]
                lay_out(room, parts, s - start, width, i32(mantissa_bits), i32(bias), i32(zero), i32(of_one))
            for row in range(0, m, ROWS):
                rows = min(ROWS, m - row)
                for s in range(start, stop):
                    set_rounding(i32(TOWARD_ZERO))
                    step(a, of_a, signs, parts, room, acc, s * m + row, s - start, row, rows, width, i32(fraction_bits), i32(output_bits))
                    set_rounding(i32(TO_NEAREST))
                    if ends[s]:
                        for i in range(row * LANES, (row + rows) * LANES):
                            acc[sums + i] += acc[i]
                            acc[i] = f32(0)
                        if ends[s] & SPLIT_END:
                            for i in range(row, row + rows):
                                for j in range(lanes):
                                    out[i * n + first + j] += acc[sums + i * LANES + j]
                                    acc[sums + i * LANES + j] = f32(0)
