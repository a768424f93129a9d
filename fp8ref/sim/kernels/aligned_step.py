"""A step of a tensor core with any accumulator (spec G-10), for attention's kernels: every product is aligned and
cut off by itself. ``chains`` is faster, from an accumulator of 0."""

import numpy as np
from numba import njit

from fp8ref.sim.kernels.bits import as_bits, as_float, truncate

u32, i32, i8, f32 = np.uint32, np.int32, np.int8, np.float32
NO_EXPONENT = -64
"""The exponent of a zero.

Its sum with any other exponent is below that of every product of two numbers, and -64 - 64 is still
an int8.
"""

GROUP = 4
"""Products of one pass over the lanes."""


@njit(nogil=True, inline="always", error_model="numpy")
def exponents(values, emin, out):
    """max(floor(log2|v|), emin); NO_EXPONENT of a zero."""
    for i in range(values.size):
        # The exponent field, unbiased; subnormals of the format count as emin (G-10).
        magnitude = u32(as_bits(values[i]) & u32(0x7FFFFFFF))
        exponent = max(i32(i32(magnitude >> u32(23)) - i32(127)), i32(emin))
        out[i] = i8(exponent if magnitude > u32(0) else i32(NO_EXPONENT))


@njit(nogil=True, inline="always", error_model="numpy")
def _align(acc, exponent, unit, sums, fraction_bits):
    """unit = 2^(fraction_bits - exponent), and sums = the accumulator cut off to multiples of 1 /
    unit."""
    places = i32(127 + fraction_bits)
    for j in range(acc.size):
        # The power of two from its exponent field.
        unit[j] = as_float(u32(u32(i32(places - i32(exponent[j]))) << u32(23)))
        sums[j] = truncate(f32(acc[j] * unit[j]))


@njit(nogil=True, inline="always", error_model="numpy")
def _add(a, b, k, unit, sums):
    """sums += the aligned products k to k + 4."""
    a0, a1, a2, a3 = a[k], a[k + 1], a[k + 2], a[k + 3]
    b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
    for j in range(sums.size):
        s = unit[j]
        x = i32(truncate(f32(f32(a0 * b0[j]) * s)) + truncate(f32(f32(a1 * b1[j]) * s)))
        y = i32(truncate(f32(f32(a2 * b2[j]) * s)) + truncate(f32(f32(a3 * b3[j]) * s)))
        sums[j] = i32(sums[j] + i32(x + y))


@njit(nogil=True, inline="always", error_model="numpy")
def narrow_step(a, b, acc, exponent, unit, sums, fraction_bits, output_bits):
    """Sum and cut off a step whose sum fits an int32 and a float32."""
    mask = u32(u32(0xFFFFFFFF) << u32(23 - output_bits))
    _align(acc, exponent, unit, sums, fraction_bits)
    for k in range(0, a.size, GROUP):
        _add(a, b, k, unit, sums)
    for j in range(acc.size):
        # Both steps are exact: a sum below 2^24, and a power of two. Then clearing bits cuts off.
        total = f32(f32(sums[j]) / unit[j])
        acc[j] = as_float(u32(as_bits(total) & mask))


@njit(nogil=True, inline="always", error_model="numpy")
def wide_step(a, b, acc, exponent, unit, sums, wide, fraction_bits, output_bits):
    """Sum and cut off a step whose sum needs a float64; an int32 holds four products."""
    mask = ~((np.uint64(1) << np.uint64(52 - output_bits)) - np.uint64(1))
    _align(acc, exponent, unit, sums, fraction_bits)
    for j in range(acc.size):
        wide[j] = np.float64(sums[j])
        sums[j] = i32(0)
    for k in range(0, a.size, GROUP):
        _add(a, b, k, unit, sums)
        for j in range(acc.size):
            wide[j] += np.float64(sums[j])
            sums[j] = i32(0)
    for j in range(acc.size):
        # Exact: unit is a power of two. Then clearing bits cuts off after output_bits.
        wide[j] = wide[j] / np.float64(unit[j])
    bits = wide.view(np.uint64)
    for j in range(acc.size):
        bits[j] &= mask
        acc[j] = f32(wide[j])
