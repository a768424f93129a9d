"""GEMM kernels: float32 sums in order (spec G-3), and the bfloat16 epilogue (G-4, G-5, G-14).

Twins of ``accumulate.f32_plain`` and ``gemm.finish_plain``; ``chains`` has tensor cores' chains.
"""

import functools
from collections.abc import Callable

import numpy as np
from numba import njit

from fp8ref.sim.kernels.bits import as_bits, as_float
from fp8ref.sim.kernels.compiled import compiled

u32, f32 = np.uint32, np.float32


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
    return (
        value
        if u32(bits & u32(0x7FFFFFFF)) > u32(0x7F800000)
        else as_float(u32(up & u32(0xFFFF0000)))
    )


@functools.cache
def finisher(order: str, round_first: bool) -> Callable:
    """finish(acc, row_scales, column_scales, out, begin, end): the epilogue to bfloat16, without a
    bias, of the rows begin to end of acc float32 [M, N]; row_scales [M] and column_scales [N],
    scale_inv.

    order        acc times the "product" of both scales; or times that of "rows" first, then the
                 other; or of "columns" first.
    round_first  acc is rounded first.
    """
    product, rows = order == "product", order == "rows"

    @compiled
    def finish(acc, row_scales, column_scales, out, begin, end):
        for i in range(begin, end):
            scale = row_scales[i]
            for j in range(out.shape[1]):
                value = _rounded(acc[i, j]) if round_first else acc[i, j]
                other = column_scales[j]
                if product:
                    value *= f32(scale * other)
                elif rows:
                    value = f32(f32(value * scale) * other)
                else:
                    value = f32(f32(value * other) * scale)
                out[i, j] = _rounded(value)

    return finish
