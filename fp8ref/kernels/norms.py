"""RMSNorm of rows, h * rsqrt(mean(h^2) + eps) * weight, with its cast (spec M-3).

The first launch reads h, adds a residual if there is one, and returns each row's factor and the
amax of its rounded result; the second computes that result again, rounded once to h's dtype in
registers, and casts it. Where the scale is known before, one launch does both. h is [M, N],
contiguous; weight is [N]. A row's sum is in no stated order.
"""

import triton
import triton.language as tl

from fp8ref.kernels import casts
from fp8ref.kernels.casts import (
    Shape,
    codes_of,
    load_lines,
    load_tile,
    magnitude,
    store_amax,
    store_amax_lines,
    store_cast,
    store_cast_lines,
    store_lines,
)
from fp8ref.kernels.jit import Launch

__all__ = ["amax_lines", "cast", "cast_lines", "lines", "statistics", "statistics_and_cast"]

ROWS, COLUMNS, WARPS = 32, 256, 16
"""Of a program of ``statistics_and_cast``: rows, whose transposed codes fill a sector; columns that
it reads at a time; warps, so many that a processor runs one: a cache then holds all their rows."""


@triton.jit
def _normed(h, factor, weight, like_ptr, TWICE: tl.constexpr):
    """h * factor * weight, rounded to what a pointer points to; TWICE: h * factor is too."""
    normed = h * factor
    if TWICE:
        normed = normed.to(like_ptr.dtype.element_ty).to(tl.float32)
    return (normed * weight).to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _factor(squares, N, eps):
    """Of rows by the sums of their squares."""
    mean = tl.div_rn(squares, N * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _load_row(x_ptr, N: tl.constexpr, BN: tl.constexpr):
    """This program's row, float32; zeros behind it."""
    at, inside = tl.arange(0, BN), tl.arange(0, BN) < N
    first = x_ptr + tl.program_id(0).to(tl.int64) * N
    return tl.load(first + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_statistics(
    h, h_ptr, weight_ptr, factor_ptr, amax_ptr, eps, N: tl.constexpr,
    BN: tl.constexpr, TWICE: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, BN)
    factor = _factor(tl.sum(h * h, 0), N, eps)
    weight = tl.load(weight_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(factor_ptr + tl.program_id(0), factor)
    largest = tl.max(magnitude(_normed(h, factor, weight, h_ptr, TWICE)), 0)
    tl.store(amax_ptr + tl.program_id(0), largest)


@triton.jit
def _statistics(
    h_ptr, weight_ptr, factor_ptr, amax_ptr, eps, N: tl.constexpr, BN: tl.constexpr,
    TWICE: tl.constexpr
):  # fmt: skip
    h = _load_row(h_ptr, N, BN)
    _store_statistics(h, h_ptr, weight_ptr, factor_ptr, amax_ptr, eps, N, BN, TWICE)


@triton.jit
def _statistics_of_sum(
    h_ptr, residual_ptr, weight_ptr, sum_ptr, factor_ptr, amax_ptr, eps,
    N: tl.constexpr, BN: tl.constexpr, TWICE: tl.constexpr
):  # fmt: skip
    h = (_load_row(h_ptr, N, BN) + _load_row(residual_ptr, N, BN)).to(h_ptr.dtype.element_ty)
    at = tl.arange(0, BN)
    tl.store(sum_ptr + tl.program_id(0).to(tl.int64) * N + at, h, mask=at < N)
    h = h.to(tl.float32)
    _store_statistics(h, h_ptr, weight_ptr, factor_ptr, amax_ptr, eps, N, BN, TWICE)


@triton.jit
def _tile(
    h_ptr, factor_ptr, weight_ptr, stride_m, stride_n, M, N, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, TWICE: tl.constexpr
):  # fmt: skip
    """This program's tile of the norm."""
    h = load_tile(h_ptr, stride_m, stride_n, M, N, BM, BN, EVEN)
    factor = load_lines(factor_ptr, 0, M, BM)[:, None]
    weight = load_lines(weight_ptr, 1, N, BN).to(tl.float32)[None, :]
    return _normed(h, factor, weight, h_ptr, TWICE)


@triton.jit
def _amax_lines(
    h_ptr, factor_ptr, weight_ptr, rows_ptr, columns_ptr, stride_m, stride_n, M, N,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TWICE: tl.constexpr
):  # fmt: skip
    y = _tile(h_ptr, factor_ptr, weight_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE)
    store_amax_lines(y, rows_ptr, columns_ptr, M, N, BM, BN)


@triton.jit
def _cast_lines(
    h_ptr, factor_ptr, weight_ptr, rows_ptr, columns_ptr, q_ptr, t_ptr, stride_m, stride_n, M, N,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, TWICE: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    y = _tile(h_ptr, factor_ptr, weight_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE)
    store_cast_lines(y, rows_ptr, columns_ptr, q_ptr, t_ptr, M, N, BM, BN, EVEN, E5M2)


@triton.jit
def _lines(
    h_ptr, factor_ptr, weight_ptr, q_ptr, t_ptr, scale_ptr, inverse_ptr, scale_t_ptr, inverse_t_ptr,
    stride_m, stride_n, M, N, EPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, TWICE: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    y = _tile(h_ptr, factor_ptr, weight_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE)
    store_lines(
        y, q_ptr, t_ptr, scale_ptr, inverse_ptr, scale_t_ptr, inverse_t_ptr, M, N, EPS, BM, BN,
        EVEN, E5M2
    )  # fmt: skip


@triton.jit
def _cast(
    h_ptr, factor_ptr, weight_ptr, scale_ptr, q_ptr, t_ptr, amax_ptr, stride_m,
    stride_n, M, N, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    TWICE: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    y = _tile(h_ptr, factor_ptr, weight_ptr, stride_m, stride_n, M, N, BM, BN, EVEN, TWICE)
    store_cast(y, tl.load(scale_ptr), q_ptr, t_ptr, M, N, BM, BN, EVEN, E5M2)
    store_amax(y, amax_ptr)


@triton.jit
def _statistics_and_cast_of_sum(
    h_ptr, residual_ptr, weight_ptr, scale_ptr, sum_ptr, factor_ptr, q_ptr, t_ptr, amax_ptr, eps,
    M, N, BM: tl.constexpr, BN: tl.constexpr, TWICE: tl.constexpr, E5M2: tl.constexpr,
    ADDS: tl.constexpr
):  # fmt: skip
    """Of this program's rows. sum_ptr is h_ptr if nothing is added."""
    row, chunk = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM), tl.arange(0, BN)
    rows, squares = row[:, None], tl.zeros((BM, BN), tl.float32)
    for start in range(0, N, BN):
        columns = (start + chunk)[None, :]
        at, mask = rows * N + columns, (rows < M) & (columns < N)
        h = tl.load(h_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if ADDS:
            total = h + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
            total = total.to(h_ptr.dtype.element_ty)
            tl.store(sum_ptr + at, total, mask=mask)
            h = total.to(tl.float32)
        squares += h * h
    factor = _factor(tl.sum(squares, 1), N, eps)
    tl.store(factor_ptr + row, factor, mask=row < M)
    tl.debug_barrier()  # other threads may have stored what a thread reads
    scale, largest = tl.load(scale_ptr), tl.zeros((BM, BN), tl.int32)
    for start in range(0, N, BN):
        # the last columns first, which a cache still has
        columns = (tl.cdiv(N, BN) * BN - BN - start + chunk)[None, :]
        at, mask = rows * N + columns, (rows < M) & (columns < N)
        h = tl.load(sum_ptr + at, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
        y = tl.where(mask, _normed(h, factor[:, None], weight, h_ptr, TWICE), 0.0)
        largest = tl.maximum(largest, magnitude(y))
        codes = codes_of(y * scale, E5M2)
        tl.store(q_ptr + at, codes, mask=mask)
        turned = t_ptr + tl.trans(columns) * M + tl.trans(rows)
        tl.store(turned, tl.trans(codes), mask=tl.trans(mask))
    tl.store(amax_ptr + tl.program_id(0), tl.max(tl.max(largest, 1), 0))


@triton.jit
def _statistics_and_cast(
    h_ptr, weight_ptr, scale_ptr, factor_ptr, q_ptr, t_ptr, amax_ptr, eps, M, N,
    BM: tl.constexpr, BN: tl.constexpr, TWICE: tl.constexpr, E5M2: tl.constexpr, ADDS: tl.constexpr
):  # fmt: skip
    _statistics_and_cast_of_sum(
        h_ptr, h_ptr, weight_ptr, scale_ptr, h_ptr, factor_ptr, q_ptr, t_ptr, amax_ptr, eps, M, N,
        BM, BN, TWICE, E5M2, ADDS
    )  # fmt: skip


def statistics(shape: Shape, *, eps: float, residual: bool = False, twice: bool = False) -> Launch:
    """h, the residual if there is one, and weight -> h + residual if so, factors float32 [M], and
    the amax of each row of the norm, int32 [M].

    Order:    the sum rounded to h's dtype; factor = RN32(1 / RN32(sqrt(mean(h^2) + eps))).
    """
    numbers = {"eps": eps, "N": shape[1], "BN": triton.next_power_of_2(shape[1]), "TWICE": twice}
    rows = shape[:1]
    outputs = ((rows, "float32"), (rows, "int32"))
    if residual:
        return Launch(_statistics_of_sum, rows, numbers, ((shape, "like"), *outputs))
    return Launch(_statistics, rows, numbers, outputs)


def cast(shape: Shape, *, e5m2: bool, twice: bool = False) -> Launch:
    """h, factors, weight and a scale () -> codes of the norm [M, N], codes [N, M], and its partial
    amaxes.

    Order:    RN32(RN32(h * factor) * weight), rounded to h's dtype; RN32(. * scale); cast.
    twice     whether RN32(h * factor) is rounded to h's dtype too, as in transformers.
    """
    numbers = casts.matrix(shape, (shape[1], 1)) | {"E5M2": e5m2, "TWICE": twice}
    grid = casts.tiles(*shape)
    outputs = (*casts.codes(shape, e5m2), *casts.parts_of(grid))
    return Launch(_cast, grid, numbers, outputs)


def statistics_and_cast(
    shape: Shape, *, eps: float, e5m2: bool, residual: bool = False, twice: bool = False
) -> Launch:
    """h, the residual if there is one, weight and a scale () -> h + residual if so, factors, and
    what ``cast`` returns: ``statistics``, then ``cast``, with h read from memory once."""
    numbers = {"eps": eps, "M": shape[0], "N": shape[1], "BM": ROWS, "BN": COLUMNS}
    numbers |= {"TWICE": twice, "E5M2": e5m2, "ADDS": residual}
    kernel = _statistics_and_cast_of_sum if residual else _statistics_and_cast
    grid = (triton.cdiv(shape[0], ROWS),)
    outputs = ((shape[:1], "float32"), *casts.codes(shape, e5m2), *casts.parts_of(grid))
    return Launch(kernel, grid, numbers, ((shape, "like"),) * residual + outputs, WARPS)


def amax_lines(shape: Shape, *, twice: bool = False) -> Launch:
    """h, factors and weight -> what ``casts.amax_lines`` returns of the norm."""
    grid, numbers = casts.tiles(*shape), casts.matrix(shape, (shape[1], 1)) | {"TWICE": twice}
    return Launch(_amax_lines, grid, numbers, casts.parts_of_lines(shape, grid))


def cast_lines(shape: Shape, *, e5m2: bool, twice: bool = False) -> Launch:
    """h, factors, weight, and scales of rows [M] and columns [N] -> codes of the norm by rows
    [M, N], and by columns [N, M]."""
    numbers = casts.matrix(shape, (shape[1], 1)) | {"E5M2": e5m2, "TWICE": twice}
    return Launch(_cast_lines, casts.tiles(*shape), numbers, casts.codes(shape, e5m2))


def lines(shape: Shape, *, e5m2: bool, twice: bool = False) -> Launch:
    """h, factors and weight -> what ``casts.blocks`` returns of the norm, of lines."""
    blocks = casts.blocks(shape, (shape[1], 1), e5m2=e5m2, square=False)
    return Launch(_lines, blocks.grid, blocks.numbers | {"TWICE": twice}, blocks.outputs)
