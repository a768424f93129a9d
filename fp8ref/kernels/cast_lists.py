"""Casts of a list of matrices, of one dtype, in both orders by one launch (spec S-2 to S-5).

Up to PARTS programs read a matrix, tile by tile. Codes, amaxes and scales are those of ``casts``.

    x             numbers: a pointer to those of any matrix.
    table         int32 [10, 2 * matrices], the bits of int64, which JAX lacks: M, N, strides; from
                  the pointers to x, q, t, given and amaxes the distance to a matrix's, in elements;
                  how many amaxes it has.
    given         float32: scales, or guesses of them.
    amaxes        int32: partial amaxes, of a launch [matrices, programs].
    q, t          uint8: codes of each matrix [M, N], and transposed [N, M].
    scale(_inv)   float32 [matrices, 4]: each four times, so that 16 bytes lie between.
    wide          all matrices are contiguous, and sides and distances are multiples of UNIT: a
                  thread reads and writes 16 bytes at a time.
"""

from collections.abc import Sequence

import triton
import triton.language as tl

from fp8ref.kernels import casts
from fp8ref.kernels.jit import Launch, Numbers

__all__ = ["UNIT", "amax", "cast"]

UNIT = 16
"""What sides and distances of wide matrices are multiples of, in elements."""


@triton.jit
def _field(table_ptr, FIELD: tl.constexpr, UNIT: tl.constexpr):
    """A number of this program's matrix, int64, that a compiler sees to be a multiple of UNIT."""
    at = FIELD * tl.num_programs(1) + tl.program_id(1)
    return tl.load(table_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + at) // UNIT * UNIT


@triton.jit
def _read(
    x_ptr, table_ptr, q_ptr, t_ptr, scale, BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
    CASTS: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    M, N = _field(table_ptr, 0, UNIT).to(tl.int32), _field(table_ptr, 1, UNIT).to(tl.int32)
    stride_m, stride_n = N, 1
    if UNIT == 1:
        stride_m = _field(table_ptr, 2, 1).to(tl.int32)
        stride_n = _field(table_ptr, 3, 1).to(tl.int32)
    x_ptr += _field(table_ptr, 4, UNIT)
    q_ptr += _field(table_ptr, 5, UNIT)
    t_ptr += _field(table_ptr, 6, UNIT)
    return casts.read_tiles(
        x_ptr, q_ptr, t_ptr, scale, stride_m, stride_n, M, N, tl.num_programs(0), BM, BN, False,
        CASTS, E5M2
    )  # fmt: skip


@triton.jit
def _amax_list(
    x_ptr, table_ptr, amax_ptr, BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    amax = _read(x_ptr, table_ptr, x_ptr, x_ptr, 1.0, BM, BN, UNIT, False, False)
    tl.store(amax_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), amax)


@triton.jit
def _cast_list(
    x_ptr, table_ptr, given_ptr, amax_ptr, q_ptr, t_ptr, scale_ptr, inverse_ptr,
    SIZE: tl.constexpr, EPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
    E5M2: tl.constexpr, POWER: tl.constexpr, GIVEN: tl.constexpr, BY_AMAX: tl.constexpr
):  # fmt: skip
    given_ptr += _field(table_ptr, 7, 1)
    if BY_AMAX:
        count = _field(table_ptr, 9, 1).to(tl.int32)
        bits = casts.load_amax(amax_ptr + _field(table_ptr, 8, 1), count, SIZE)
        scale = casts.scale_of(bits, E5M2, EPS, POWER)
        reads = not GIVEN or scale != tl.load(given_ptr)  # a NaN counts as another scale
    else:
        scale, reads = tl.load(given_ptr), True
    if tl.program_id(0) == 0:
        at, four = 4 * tl.program_id(1) + tl.arange(0, 4), tl.full((4,), scale, tl.float32)
        casts.store_scales(four, scale_ptr, inverse_ptr, at, at >= 0)
    if reads:
        amax = _read(x_ptr, table_ptr, q_ptr, t_ptr, scale, BM, BN, UNIT, True, E5M2)
        if not BY_AMAX:
            at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            tl.store(amax_ptr + at, amax)


def amax(shapes: Sequence[casts.Shape], *, wide: bool) -> Launch:
    """x and table -> amaxes."""
    numbers: Numbers = {"BM": casts.ROWS, "BN": casts.COLUMNS, "UNIT": UNIT if wide else 1}
    return Launch(_amax_list, (max(map(casts.parts, shapes)), len(shapes)), numbers)


def cast(
    shapes: Sequence[casts.Shape],
    *,
    wide: bool,
    e5m2: bool,
    power: bool = False,
    given: bool = True,
    by_amax: bool = False,
) -> Launch:
    """x, table and given -> amaxes, q, t, scale and scale_inv.

    by_amax   amaxes is an input: by policy torchao (S-3), or by torchao_pow2 (S-4) if ``power``.
              given: codes are written only where the scale is not the given one.
    """
    observe = amax(shapes, wide=wide)
    numbers = observe.numbers | {"SIZE": casts.LOADED, "EPS": casts.EPS, "E5M2": e5m2}
    numbers |= {"POWER": power, "GIVEN": given, "BY_AMAX": by_amax}
    return Launch(_cast_list, observe.grid, numbers)
