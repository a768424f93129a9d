"""amax and scaled casts of float32 bits under a coarser grid of scales: twins of ``scaling``.

Row r of the matrix takes row group[r] of the scales, and within it every ``width`` elements one
scale: width 1 is a scale for each column. Tensorwise, rowwise along either axis, and every block
are such grids; ``scale_grid.grid_of`` makes them.
"""

import functools
from collections.abc import Callable

import numpy as np

from fp8ref.formats import Format
from fp8ref.sim.kernels.bits import AT_A_TIME, as_bits, as_float, fetch_ahead, prefer_wide_vectors
from fp8ref.sim.kernels.cast import layout, nearest_even, u32
from fp8ref.sim.kernels.compiled import compiled


@compiled
def amax(bits, group, width, out):
    """out[g, c] = the maximum of |x|'s bits over its group, out zero before; width above 1.
    Magnitudes order as their bits do, NaN on top."""
    for r in range(bits.shape[0]):
        for c in range(out.shape[1]):
            largest, end = out[group[r], c], c * width + width
            for begin in range(c * width, end, AT_A_TIME):
                part = bits[r, begin : begin + AT_A_TIME if begin + AT_A_TIME < end else end]
                fetch_ahead(bits, r * bits.shape[1] + begin, part.size)
                for i in range(part.size):
                    magnitude = u32(part[i] & u32(0x7FFFFFFF))
                    largest = magnitude if magnitude > largest else largest
            out[group[r], c] = largest


@compiled
def amax_of_columns(bits, group, width, out):
    """``amax`` of width 1."""
    for r in range(bits.shape[0]):
        for begin in range(0, bits.shape[1], AT_A_TIME):
            part = bits[r, begin : begin + AT_A_TIME]
            largest = out[group[r], begin : begin + AT_A_TIME]
            fetch_ahead(bits, r * bits.shape[1] + begin, part.size)
            for i in range(part.size):
                magnitude = u32(part[i] & u32(0x7FFFFFFF))
                largest[i] = magnitude if magnitude > largest[i] else largest[i]


@functools.lru_cache(maxsize=64)
def encoder(fmt: Format, columns: bool) -> Callable:
    """encode(bits uint32 [R, C], group int64 [R], width, scale float32 [G, ceil(C / width)], out
    uint8 [R, C]): RN32(x * scale), saturated, rounded to nearest even; width is 1 if ``columns``,
    else above."""
    to = layout(fmt, "nearest_even", True)
    if columns:

        @compiled
        def encode(bits, group, width, scale, out):
            prefer_wide_vectors()
            for r in range(bits.shape[0]):
                for begin in range(0, bits.shape[1], AT_A_TIME):
                    some = slice(begin, begin + AT_A_TIME)
                    part, s, coded = bits[r, some], scale[group[r], some], out[r, some]
                    fetch_ahead(bits, r * bits.shape[1] + begin, part.size)
                    for i in range(part.size):
                        coded[i] = np.uint8(
                            nearest_even(as_bits(np.float32(as_float(part[i]) * s[i])), to)
                        )
    else:

        @compiled
        def encode(bits, group, width, scale, out):
            prefer_wide_vectors()
            for r in range(bits.shape[0]):
                for c in range(scale.shape[1]):
                    s, end = scale[group[r], c], c * width + width
                    for begin in range(c * width, end, AT_A_TIME):
                        stop = begin + AT_A_TIME if begin + AT_A_TIME < end else end
                        part, coded = bits[r, begin:stop], out[r, begin:stop]
                        fetch_ahead(bits, r * bits.shape[1] + begin, part.size)
                        for i in range(part.size):
                            coded[i] = np.uint8(
                                nearest_even(as_bits(np.float32(as_float(part[i]) * s)), to)
                            )

    return encode
