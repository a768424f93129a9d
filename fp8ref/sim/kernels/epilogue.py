"""From a GEMM's accumulator to bfloat16, by an epilogue without a bias (SEMANTICS G-4, G-5, G-14), in one pass."""

import numpy as np
from numba import njit

from fp8ref.sim.kernels.bits import as_bits, as_float, compiled

u32, f32 = np.uint32, np.float32
TILE = 32  # rows and columns that are read one way and written the other


@njit(nogil=True, inline="always", error_model="numpy")
def _rounded(value):
    """To the nearest bfloat16, ties to even; a NaN as it is."""
    bits = as_bits(value)
    up = u32(u32(bits + u32(0x7FFF)) + u32(u32(bits >> u32(16)) & u32(1)))
    return value if u32(bits & u32(0x7FFFFFFF)) > u32(0x7F800000) else as_float(u32(up & u32(0xFFFF0000)))


@compiled
def bfloat16(acc, turned, scale_a, scale_b, product, round_first, out, begin, end):
    """Fills the rows begin to end of out [M, N] from acc [M, N], or turned [N, M], float32, and scale_inv of rows [M] and columns [N].

    product: acc times the product of both, else acc times that of its row, then that of its column; round_first: acc is rounded before, and
    product is True.
    """
    n = out.shape[1]
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
                _finish(
                    line, scale_a[first + i], scale_b[left : left + columns], product, round_first, out[first + i, left : left + columns]
                )


@njit(nogil=True, inline="always", error_model="numpy")
def _finish(line, of_row, of_columns, product, round_first, out):
    if round_first:
        for j in range(line.size):
            out[j] = _rounded(f32(_rounded(line[j]) * f32(of_row * of_columns[j])))
    elif product:
        for j in range(line.size):
            out[j] = _rounded(f32(line[j] * f32(of_row * of_columns[j])))
    else:
        for j in range(line.size):
            out[j] = _rounded(f32(f32(line[j] * of_row) * of_columns[j]))
