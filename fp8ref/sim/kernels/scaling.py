"""amax and scaled casts over a matrix of float32 bits whose scales form a coarser grid: twins of
``scaling``'s definitions.

Row r of the matrix takes row group[r] of the scales, and within it every ``width`` elements one
scale: width 1 is a scale for each column. Tensorwise, rowwise along either axis, and every block
are such grids; ``scale_grid.grid_of`` makes them.
"""

import functools
from collections.abc import Callable

import numpy as np

from fp8ref.formats import Format
from fp8ref.sim.kernels.bits import as_bits, as_float
from fp8ref.sim.kernels.cast import layout, nearest_even, u32
from fp8ref.sim.kernels.compiled import compiled


@compiled
def amax(bits, group, width, out):
    """out[g, c] = the maximum of |x|'s bits over its group, out zero before. Magnitudes order as
    their bits do, NaN on top."""
    for r in range(bits.shape[0]):
        row, line = bits[r], out[group[r]]
        if width == 1:
            for i in range(row.size):
                line[i] = max(line[i], u32(row[i] & u32(0x7FFFFFFF)))
        else:
            for c in range(line.size):
                part = row[c * width : (c + 1) * width]
                largest = line[c]
                for i in range(part.size):
                    largest = max(largest, u32(part[i] & u32(0x7FFFFFFF)))
                line[c] = largest


@functools.cache
def encoder(fmt: Format) -> Callable:
    """encode(bits uint32 [R, C], group int64 [R], width, scale float32 [G, ceil(C / width)], out
    uint8 [R, C]): RN32(x * scale), saturated, rounded to nearest even."""
    to = layout(fmt, "nearest_even", True)

    @compiled
    def encode(bits, group, width, scale, out):
        for r in range(bits.shape[0]):
            row, codes, scales = bits[r], out[r], scale[group[r]]
            if width == 1:
                for i in range(row.size):
                    codes[i] = np.uint8(nearest_even(as_bits(np.float32(as_float(row[i]) * scales[i])), to))
            else:
                for c in range(scales.size):
                    part, coded, s = row[c * width : (c + 1) * width], codes[c * width : (c + 1) * width], scales[c]
                    for i in range(part.size):
                        coded[i] = np.uint8(nearest_even(as_bits(np.float32(as_float(part[i]) * s)), to))

    return encode
