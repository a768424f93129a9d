"""A tensor core's chains that go on from an accumulator (A-9, G-10), as ``chain_plain``.

As ``chains``, with the accumulators of a tile of columns taken from the result first. A step
(``steps``) holds for accumulators that such a chain from 0 can have, and for those that no product
can be next to: ``apart`` says which the others are, and ``go_on`` sees to them.
"""

import numpy as np

from fp8ref.formats import Format
from fp8ref.sim.kernels.bits import as_bits, prefer_wide_vectors
from fp8ref.sim.kernels.chains.chains import Rows, columns, tiles
from fp8ref.sim.kernels.chains.loops import RESULT
from fp8ref.sim.kernels.chains.steps import MOST_UNITS, zero_and_bias
from fp8ref.sim.kernels.compiled import compiled

u32, i32, u8, f32 = np.uint32, np.int32, np.uint8, np.float32

SMALLEST_PRODUCT = -28
"""The exponent of the smallest product of two FP8 numbers."""

LARGEST = f32(2.0**64)
"""From it on an accumulator is cut off as if there were no products: those are below 2^32, and its
unit 2^(64 - 25) at least.
"""


def pack(a: np.ndarray, fmt: Format, width: int, fraction_bits: int, output_bits: int) -> Rows:
    """``chains.pack`` of finite values a [M, K] of a format."""
    double = (width << (fraction_bits + 2)) + (1 << (fraction_bits + 1)) >= MOST_UNITS
    m, steps = len(a), a.shape[1] // width
    numbers = np.empty((steps, m, width), np.float64 if double else f32)
    exponents, signs = np.empty(numbers.shape, u32), np.empty((steps, m), u32)
    lay_out_rows(
        np.ascontiguousarray(a, f32),
        i32(fmt.emin),
        i32(zero_and_bias(double)[0]),
        numbers,
        exponents,
        signs,
    )
    return Rows(numbers, exponents, signs, (width, fraction_bits, output_bits))


def go_on(acc: np.ndarray, a: Rows, b: np.ndarray, fmt: Format) -> None:
    """acc [M, N], contiguous, any finite float32, becomes the chain from it of a [M, K] and b [N,
    K], codes of finite numbers of a format. b may have more rows, which are left out.

    An accumulator below every unit of a chain from 0 stays, cut off by itself, while steps have no
    product; the first that has one cuts it off to 0. One above ``LARGEST`` is cut off by itself in
    every step.
    """
    (steps, m, _), n = a.numbers.shape, acc.shape[1]
    if acc.size == 0 or steps == 0:
        return
    _, fraction_bits, output_bits = a.unit
    smallest = f32(2.0 ** (SMALLEST_PRODUCT - fraction_bits))
    alone = None
    if apart(acc.reshape(-1), smallest, LARGEST):
        magnitudes = np.abs(acc)
        others = (magnitudes >= LARGEST) | ((magnitudes < smallest) & (magnitudes > 0))
        # Exact, as sums of ones: how many products a result has.
        left = (a.numbers != 0).swapaxes(0, 1).reshape(m, -1).astype(f32)
        # [M, K] x [N, K] -> [M, N]
        has_product = left @ ((b[:n] & u8(0x7F)) != 0).T.astype(f32) > 0
        mask = u32((0xFFFFFFFF << (23 - min(fraction_bits, output_bits))) & 0xFFFFFFFF)
        # Subnormals have exponent -126: they are cut off at a multiple of its unit, like bits.
        cut = (acc.view(u32) & mask).view(f32) + f32(0)  # -0 becomes +0
        alone = others & ((magnitudes >= LARGEST) | ~has_product)
        kept = cut[alone]
        acc[others] = 0
    ends = np.zeros(steps, u8)
    ends[-1] = RESULT
    columns(a, tiles(b), fmt, ends, acc, 0, n)
    if alone is not None:
        acc[alone] = kept


@compiled
def apart(acc, smallest, largest):
    """Whether any accumulator is from ``largest`` on, or below ``smallest`` and not 0."""
    prefer_wide_vectors()
    first, last, outside = u32(as_bits(smallest) - u32(1)), as_bits(largest), u32(0)
    for i in range(acc.size):
        magnitude = u32(as_bits(acc[i]) & u32(0x7FFFFFFF))
        # As integers, which have lanes; 0 - 1 is the largest.
        outside |= u32(u32(u32(magnitude - u32(1)) < first) | u32(magnitude >= last))
    return outside > u32(0)


@compiled
def lay_out_rows(values, emin, zero, numbers, exponents, signs):
    """Fill ``Rows`` from values [M, K]; exponents: max(floor(log2|v|), emin), or ``zero``."""
    steps, m, width = numbers.shape
    for s in range(steps):
        for i in range(m):
            row = values[i, s * width : (s + 1) * width]
            row_exponents = exponents[s, i]
            out = numbers[s, i]
            negative = u32(0)
            for k in range(width):
                bits = as_bits(row[k])
                out[k] = abs(row[k])
                exponent = max(i32(i32(u32(bits & u32(0x7FFFFFFF)) >> u32(23)) - i32(127)), emin)
                row_exponents[k] = u32(
                    u32(u8(exponent if u32(bits & u32(0x7FFFFFFF)) > u32(0) else zero))
                    * u32(0x01010101)
                )
                negative |= u32(u32(bits >> u32(31)) << u32(k))
            signs[s, i] = negative
