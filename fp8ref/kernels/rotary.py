"""Rotary embedding, and its gradient with its cast (spec M-3).

Attention returns gradients of q and k as [B, T, H, D], of any strides but along D. The linear
that made them takes its gradient as [B T, H D]. Each program has rows of one head, both halves.
"""

import triton
import triton.language as tl

from fp8ref.kernels import casts
from fp8ref.kernels.casts import codes_of, magnitude, scale_of, store_scales
from fp8ref.kernels.jit import Launch, Numbers

__all__ = ["amax", "amax_lines", "cast", "cast_lines", "lines", "rotate"]

ROWS = 64
"""Tokens of a tile, which is as wide as a head."""


@triton.jit
def _rotate(x_ptr, cos_ptr, sin_ptr, out_ptr, M, N, T, BM: tl.constexpr, HALF: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    half = tl.arange(0, HALF)[None, :]
    inside = (rows < M)[:, None]
    at = rows[:, None].to(tl.int64) * N + tl.program_id(1) * (2 * HALF) + half
    first = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    table = (rows % T)[:, None] * (2 * HALF) + half
    cos1, cos2 = tl.load(cos_ptr + table), tl.load(cos_ptr + table + HALF)
    sin1, sin2 = tl.load(sin_ptr + table), tl.load(sin_ptr + table + HALF)
    kind = x_ptr.dtype.element_ty
    tl.store(out_ptr + at, (first * cos1 - second * sin1).to(kind), mask=inside)
    tl.store(out_ptr + at + HALF, (second * cos2 + first * sin2).to(kind), mask=inside)


@triton.jit
def _store_half(x, scale, scale_t, q_ptr, t_ptr, rows, columns, M, N, E5M2: tl.constexpr):
    """Cast a half [rows, columns] of a head by one scale, and transposed by another; store both."""
    codes, inside = codes_of(x * scale, E5M2), rows[:, None] < M
    tl.store(q_ptr + rows[:, None].to(tl.int64) * N + columns[None, :], codes, mask=inside)
    codes = codes_of(x * scale_t, E5M2)
    at = columns[:, None].to(tl.int64) * M + rows[None, :]
    tl.store(t_ptr + at, tl.trans(codes), mask=rows[None, :] < M)


@triton.jit
def _rotated(
    g_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, M, T, BM: tl.constexpr,
    HALF: tl.constexpr
):  # fmt: skip
    """This program's rows of one head, both halves, rotated back."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    half = tl.arange(0, HALF)[None, :]
    token = rows % T
    lines = (rows // T).to(tl.int64) * stride_b + token.to(tl.int64) * stride_t
    lines += tl.program_id(1).to(tl.int64) * stride_h
    inside = (rows < M)[:, None]
    at = g_ptr + lines[:, None] + half
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    at = token[:, None] * (2 * HALF) + half
    cos1, cos2 = tl.load(cos_ptr + at), tl.load(cos_ptr + at + HALF)
    sin1, sin2 = tl.load(sin_ptr + at), tl.load(sin_ptr + at + HALF)
    rotated = first * cos1 + second * sin2
    second = (second * cos2 - first * sin1).to(g_ptr.dtype.element_ty).to(tl.float32)
    return rotated.to(g_ptr.dtype.element_ty).to(tl.float32), second


@triton.jit
def _store_amax(first, second, amax_ptr):
    largest = tl.maximum(magnitude(first), magnitude(second))
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(amax_ptr + place, tl.max(tl.max(largest, 1), 0))


@triton.jit
def _amax(
    g_ptr, cos_ptr, sin_ptr, amax_ptr, stride_b, stride_t, stride_h, M, T,
    BM: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    first, second = _rotated(g_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, M, T, BM, HALF)
    _store_amax(first, second, amax_ptr)


@triton.jit
def _cast(
    g_ptr, cos_ptr, sin_ptr, scale_ptr, q_ptr, t_ptr, amax_ptr, stride_b, stride_t,
    stride_h, M, N, T, BM: tl.constexpr, HALF: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    first, second = _rotated(g_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, M, T, BM, HALF)
    scale = tl.load(scale_ptr)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * (2 * HALF) + tl.arange(0, HALF)
    _store_half(first, scale, scale, q_ptr, t_ptr, rows, columns, M, N, E5M2)
    _store_half(second, scale, scale, q_ptr, t_ptr, rows, columns + HALF, M, N, E5M2)
    _store_amax(first, second, amax_ptr)


@triton.jit
def _amax_lines(
    g_ptr, cos_ptr, sin_ptr, rows_ptr, columns_ptr, stride_b, stride_t, stride_h, M, N, T,
    BM: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    first, second = _rotated(g_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, M, T, BM, HALF)
    first, second = magnitude(first), magnitude(second)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    largest = tl.maximum(tl.max(first, 1), tl.max(second, 1))
    tl.store(rows_ptr + tl.program_id(1) * M + rows, largest, mask=rows < M)
    at = columns_ptr + tl.program_id(0) * N + tl.program_id(1) * (2 * HALF) + tl.arange(0, HALF)
    tl.store(at, tl.max(first, 0))
    tl.store(at + HALF, tl.max(second, 0))


@triton.jit
def _cast_lines(
    g_ptr, cos_ptr, sin_ptr, rows_ptr, columns_ptr, q_ptr, t_ptr, stride_b, stride_t, stride_h, M,
    N, T, BM: tl.constexpr, HALF: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    first, second = _rotated(g_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, M, T, BM, HALF)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * (2 * HALF) + tl.arange(0, HALF)
    scale = tl.load(rows_ptr + rows, mask=rows < M, other=0.0)[:, None]
    scale_t = tl.load(columns_ptr + columns)[None, :]
    _store_half(first, scale, scale_t, q_ptr, t_ptr, rows, columns, M, N, E5M2)
    scale_t = tl.load(columns_ptr + columns + HALF)[None, :]
    _store_half(second, scale, scale_t, q_ptr, t_ptr, rows, columns + HALF, M, N, E5M2)


@triton.jit
def _lines(
    g_ptr, cos_ptr, sin_ptr, q_ptr, t_ptr, scale_ptr, inverse_ptr, scale_t_ptr, inverse_t_ptr,
    stride_b, stride_t, stride_h, M, N, T, BM: tl.constexpr, HALF: tl.constexpr,
    E5M2: tl.constexpr, EPS: tl.constexpr
):  # fmt: skip
    first, second = _rotated(g_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, M, T, BM, HALF)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * (2 * HALF) + tl.arange(0, HALF)
    largest = tl.maximum(tl.max(magnitude(first), 1), tl.max(magnitude(second), 1))
    scale = scale_of(largest, E5M2, EPS)
    at = rows * tl.num_programs(1) + tl.program_id(1)
    store_scales(scale, scale_ptr, inverse_ptr, at, rows < M)
    at = tl.program_id(0) * N + columns
    scale_t = scale_of(tl.max(magnitude(first), 0), E5M2, EPS)
    store_scales(scale_t, scale_t_ptr, inverse_t_ptr, at, columns < N)
    _store_half(
        first, scale[:, None], scale_t[None, :], q_ptr, t_ptr, rows, columns, M, N, E5M2
    )  # fmt: skip
    scale_t = scale_of(tl.max(magnitude(second), 0), E5M2, EPS)
    store_scales(scale_t, scale_t_ptr, inverse_t_ptr, at + HALF, columns < N)
    _store_half(
        second, scale[:, None], scale_t[None, :], q_ptr, t_ptr, rows, columns + HALF, M, N, E5M2
    )  # fmt: skip


Heads = tuple[int, int, int, int]
"""Sequences, tokens, heads, the width of a head."""


def rotate(shape: Heads) -> Launch:
    """x [B, T, H, D], contiguous, cos and sin float32 [T, D] -> x rotated, of its shape and dtype.

    Order:   first half x1 cos1 - x2 sin1, second x2 cos2 + x1 sin2, each product and sum rounded to
             float32, the result to x's dtype. D is a power of two.
    """
    numbers = _numbers(shape, (0, 0, 0))
    numbers = {key: numbers[key] for key in ("M", "N", "T", "BM", "HALF")}
    return Launch(_rotate, _grid(shape), numbers, ((shape, "like"),))


def amax(shape: Heads, strides: tuple[int, ...]) -> Launch:
    """The gradient, cos and sin -> partial amaxes, for the scale of ``cast``; as there."""
    numbers = _numbers(shape, strides)
    del numbers["N"]
    return Launch(_amax, _grid(shape), numbers, casts.parts_of(_grid(shape)))


def cast(shape: Heads, strides: tuple[int, ...], *, e5m2: bool) -> Launch:
    """The gradient [B, T, H, D], cos and sin float32 [T, D], and a scale () -> codes [B T, H D],
    codes [H D, B T], and partial amaxes.

    strides  of B, T and H, first; D is contiguous, and a power of two.
    Order:   first half g1 cos1 + g2 sin2, second g2 cos2 - g1 sin1, each product and sum rounded to
             float32, the result to g's dtype; RN32(. * scale); cast.
    """
    numbers, grid = _numbers(shape, strides) | {"E5M2": e5m2}, _grid(shape)
    outputs = casts.codes(_matrix(shape), e5m2) + casts.parts_of(grid)
    return Launch(_cast, grid, numbers, outputs)


def amax_lines(shape: Heads, strides: tuple[int, ...]) -> Launch:
    """The gradient, cos and sin -> partial amaxes of rows, int32 [H, B T], and of columns [tiles
    along B T, H D]; as ``cast``."""
    grid, matrix = _grid(shape), _matrix(shape)
    outputs = ((grid[1], matrix[0]), "int32"), ((grid[0], matrix[1]), "int32")
    return Launch(_amax_lines, grid, _numbers(shape, strides), outputs)


def cast_lines(shape: Heads, strides: tuple[int, ...], *, e5m2: bool) -> Launch:
    """As ``cast``, by scales of rows [B T] and of columns [H D]; without amaxes."""
    numbers, outputs = _numbers(shape, strides) | {"E5M2": e5m2}, casts.codes(_matrix(shape), e5m2)
    return Launch(_cast_lines, _grid(shape), numbers, outputs)


def lines(shape: Heads, strides: tuple[int, ...], *, e5m2: bool) -> Launch:
    """The gradient, cos and sin -> what ``casts.blocks`` returns of it, of lines; D is 128."""
    matrix = _matrix(shape)
    blocks = casts.blocks(matrix, (matrix[1], 1), e5m2=e5m2, square=False)
    more = {"BM": casts.BLOCK, "E5M2": e5m2, "EPS": blocks.numbers["EPS"]}
    return Launch(_lines, blocks.grid, _numbers(shape, strides) | more, blocks.outputs)


def _matrix(shape: Heads) -> tuple[int, int]:
    return shape[0] * shape[1], shape[2] * shape[3]


def _grid(shape: Heads) -> tuple[int, int]:
    return -(-shape[0] * shape[1] // ROWS), shape[2]


def _numbers(shape: Heads, strides: tuple[int, ...]) -> Numbers:
    batch, tokens, heads, width = shape
    numbers: Numbers = dict(zip(("stride_b", "stride_t", "stride_h"), strides[:3], strict=True))
    numbers |= {"M": batch * tokens, "N": heads * width, "T": tokens}
    return numbers | {"BM": ROWS, "HALF": width // 2}
