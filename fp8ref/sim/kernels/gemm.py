"""GEMM kernels: float32 sums in order (spec G-3), and the bfloat16 epilogue (G-4, G-5, G-14).

The twins of ``accumulate.f32_plain`` and ``gemm.finish_plain``. Chains of a tensor core are in ``chains``.
"""

import numpy as np
from numba import njit

from fp8ref.sim.kernels.bits import as_bits, as_float
from fp8ref.sim.kernels.compiled import compiled

u32, f32 = np.uint32, np.float32
TILE = 32
"""Rows and columns that are read one way and written the other."""


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
