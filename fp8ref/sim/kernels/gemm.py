"""GEMM kernels: tensor-core chains (spec G-10 to G-12), float32 sums in order (G-3), the
bfloat16 epilogue (G-4, G-5, G-14).

The twins of ``accumulate.chains_plain``, ``accumulate.f32_plain`` and ``gemm.finish_plain``. In the
first, the columns of the result are a vector's lanes, and operands are finite.
"""

import numpy as np
from numba import njit

from fp8ref.sim.kernels.bits import as_bits, as_float, truncate
from fp8ref.sim.kernels.compiled import compiled

u32, i32, i8, f32 = np.uint32, np.int32, np.int8, np.float32
NO_EXPONENT = -64
"""The exponent of a zero.

Its sum with any other exponent is below that of every product of two numbers, and -64 - 64 is still
an int8.
"""

COLUMNS = 512
"""Columns of a tile: long enough for the lanes, and 80 KiB of b for the cache."""

_GROUP = 4  # products of one pass over the lanes
CHAIN_END, SPLIT_END = 1, 2
TILE = 32
"""Rows and columns that are read one way and written the other."""


@compiled
def chains(a, emin_a, b, emin_b, ends, out, begin, end, width, fraction_bits, output_bits):
    """Fills the columns begin to end of out [M, N] with the chains of a [M, K] and b [N, K] through
    a unit of these three numbers.

    a and b are float32 values of FP8 numbers whose formats have these emin; width is a multiple of
    4. ends uint8 [K / width] says what follows step i: CHAIN_END adds the accumulator to the
    split's sum and clears it, SPLIT_END adds that sum to out and clears it.

    A chain from 0 stays a multiple of 2^(-28 - fraction_bits), -28 the smallest exponent of a
    product, and below 2^32 K: float32 neither underflows nor overflows.
    """
    m, n = a.shape[0], end - begin
    acc, part = np.zeros((m, n), np.float32), np.zeros((m, n), np.float32)
    ea, bk, eb = np.empty(width, np.int8), np.empty((width, n), np.float32), np.empty((width, n), np.int8)
    exponent, unit = np.empty(n, np.int8), np.empty(n, np.float32)
    sums, wide = np.empty(n, np.int32), np.empty(n, np.float64)
    # Products lie below 2^(fraction_bits + 2) units and the accumulator below 2^(fraction_bits +
    # 1); a sum below 2^24 is a float32.
    narrow = (width << (fraction_bits + 2)) + (1 << (fraction_bits + 1)) <= 1 << 24
    out[:, begin:end] = f32(0)
    for block in range(ends.size):
        k = block * width
        for j in range(n):
            for x in range(width):
                bk[x, j] = b[begin + j, k + x]
        _exponents(bk.reshape(-1), emin_b, eb.reshape(-1))
        for i in range(m):
            row = a[i, k : k + width]
            _exponents(row, emin_a, ea)
            _largest(ea, eb, acc[i], exponent)
            if narrow:
                _narrow(row, bk, acc[i], exponent, unit, sums, fraction_bits, output_bits)
            else:
                _wide(row, bk, acc[i], exponent, unit, sums, wide, fraction_bits, output_bits)
        # A chain ends here: its sum joins the part's. A part ends too: its sum joins the result's.
        if ends[block]:
            for i in range(m):
                chain, total, result = acc[i], part[i], out[i, begin:end]
                for j in range(n):
                    total[j] += chain[j]
                    chain[j] = f32(0)
                if ends[block] & SPLIT_END:
                    for j in range(n):
                        result[j] += total[j]
                        total[j] = f32(0)


@njit(nogil=True, inline="always", error_model="numpy")
def _exponents(values, emin, out):
    """max(floor(log2|v|), emin); NO_EXPONENT of a zero."""
    for i in range(values.size):
        # The exponent field, unbiased; subnormals of the format count as emin (G-10).
        magnitude = u32(as_bits(values[i]) & u32(0x7FFFFFFF))
        exponent = max(i32(i32(magnitude >> u32(23)) - i32(127)), i32(emin))
        out[i] = i8(exponent if magnitude > u32(0) else i32(NO_EXPONENT))


@njit(nogil=True, inline="always", error_model="numpy")
def _largest(ea, eb, acc, exponent):
    """exponent[j] = the largest of the products ea + eb[:, j] and of acc[j]; 0 counts as 2^-64,
    which no sum of a chain reaches."""
    n = acc.size
    for j in range(n):
        exponent[j] = i8(max(i32(i32(as_bits(acc[j]) >> u32(23) & u32(0xFF)) - i32(127)), i32(NO_EXPONENT)))
    for k in range(0, ea.size, _GROUP):
        e0, e1, e2, e3 = ea[k], ea[k + 1], ea[k + 2], ea[k + 3]
        b0, b1, b2, b3 = eb[k], eb[k + 1], eb[k + 2], eb[k + 3]
        for j in range(n):
            first = max(i8(e0 + b0[j]), i8(e1 + b1[j]))
            last = max(i8(e2 + b2[j]), i8(e3 + b3[j]))
            exponent[j] = max(exponent[j], max(first, last))


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
def _narrow(a, b, acc, exponent, unit, sums, fraction_bits, output_bits):
    """Sum and cut off a step whose sum fits an int32 and a float32."""
    mask = u32(u32(0xFFFFFFFF) << u32(23 - output_bits))
    _align(acc, exponent, unit, sums, fraction_bits)
    for k in range(0, a.size, _GROUP):
        _add(a, b, k, unit, sums)
    for j in range(acc.size):
        # Both steps are exact: a sum below 2^24, and a power of two. Then clearing bits cuts off.
        total = f32(f32(sums[j]) / unit[j])
        acc[j] = as_float(u32(as_bits(total) & mask))


@njit(nogil=True, inline="always", error_model="numpy")
def _wide(a, b, acc, exponent, unit, sums, wide, fraction_bits, output_bits):
    """Sum and cut off a step whose sum needs a float64; an int32 holds four products."""
    mask = ~((np.uint64(1) << np.uint64(52 - output_bits)) - np.uint64(1))
    _align(acc, exponent, unit, sums, fraction_bits)
    for j in range(acc.size):
        wide[j] = np.float64(sums[j])
        sums[j] = i32(0)
    for k in range(0, a.size, _GROUP):
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


@compiled
def in_order(a, b, out, begin, end):
    """out[i] = RN32(... RN32(RN32(a_i0 * b_0) + a_i1 * b_1) ...), k ascending from +0, for the rows
    begin to end: a [M, K], b [K, N]."""
    for i in range(begin, end):
        row = out[i]
        row[:] = f32(0)
        for k in range(a.shape[1]):
            x, line = a[i, k], b[k]
            for j in range(row.size):
                row[j] += f32(x * line[j])


@njit(nogil=True, inline="always", error_model="numpy")
def _rounded(value):
    """To the nearest bfloat16, ties to even; a NaN as it is."""
    bits = as_bits(value)
    up = u32(u32(bits + u32(0x7FFF)) + u32(u32(bits >> u32(16)) & u32(1)))
    return value if u32(bits & u32(0x7FFFFFFF)) > u32(0x7F800000) else as_float(u32(up & u32(0xFFFF0000)))


@compiled
def finish_bfloat16(acc, turned, scale_a, scale_b, product, round_first, out, begin, end):
    """The epilogue to bfloat16, without a bias: fills the rows begin to end of out [M, N].

    acc         float32 [M, N], or with ``turned`` [N, M]; scale_a [M] and scale_b [N], scale_inv of
                rows and of columns.
    product     acc times the product of both scales; else acc times its row's, then times its
                column's.
    round_first acc is rounded first; product is then True.
    """
    n = out.shape[1]
    # A turned accumulator is read along its rows and written along its columns, a tile at a time.
    tile = np.empty((TILE, TILE + 1), np.float32)  # a row longer, so that a column of it does not fall into one set of the cache
    for first in range(begin, end, TILE):
        rows = min(TILE, end - first)
        for left in range(0, n, TILE):
            columns = min(TILE, n - left)
            if turned:
                for j in range(columns):
                    line = acc[left + j, first : first + rows]
                    for i in range(rows):
                        tile[i, j] = line[i]
            for i in range(rows):
                line = tile[i, :columns] if turned else acc[first + i, left : left + columns]
                _finish_line(
                    line, scale_a[first + i], scale_b[left : left + columns], product, round_first, out[first + i, left : left + columns]
                )


@njit(nogil=True, inline="always", error_model="numpy")
def _finish_line(line, of_row, of_columns, product, round_first, out):
    if round_first:
        for j in range(line.size):
            out[j] = _rounded(f32(_rounded(line[j]) * f32(of_row * of_columns[j])))
    elif product:
        for j in range(line.size):
            out[j] = _rounded(f32(line[j] * f32(of_row * of_columns[j])))
    else:
        for j in range(line.size):
            out[j] = _rounded(f32(f32(line[j] * of_row) * of_columns[j]))
