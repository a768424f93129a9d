"""Rotary embedding, and its gradient with its cast (spec M-3).

Attention returns gradients of q and k as [B, T, H, D], of any strides but along D. The linear
that made them takes its gradient as [B T, H D]. Each program has rows of one head.
"""

import triton
import triton.language as tl

from fp8ref.kernels import casts
from fp8ref.kernels.casts import (
    store_amax,
    store_amax_lines,
    store_cast,
    store_cast_lines,
    store_lines,
    store_tile,
)
from fp8ref.kernels.jit import Launch, Numbers

__all__ = ["amax", "amax_lines", "cast", "cast_lines", "lines", "rotate"]

ROWS = 64
"""Tokens of a tile, which is as wide as a head."""

FORMS = ("halves", "rounded halves", "pairs")
"""What rotates: a head's halves, or pairs of neighbors. "rounded halves" rounds both products to
the tensor's dtype before it adds them, as transformers does."""

_ROUNDED, _PAIRS = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _load(ptr, lines, mask, columns):
    at = ptr + lines[:, None] + columns[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _product(x, table, like_ptr, FORM: tl.constexpr):
    product = x * table
    if FORM == _ROUNDED:
        product = product.to(like_ptr.dtype.element_ty).to(tl.float32)
    return product


@triton.jit
def _turned(
    x_ptr, cos_ptr, sin_ptr, SB, ST, SH, M, T, BACK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """This program's rows of one head, rotated, or (BACK) the gradient of that; rounded.
    SB, ST, SH: strides of sequences, tokens and heads."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    token = rows % T
    lines = (rows // T).to(tl.int64) * SB + token.to(tl.int64) * ST
    lines += tl.program_id(1).to(tl.int64) * SH
    columns, table, inside = tl.arange(0, BN), token * BN, (rows < M)[:, None]
    x = _load(x_ptr, lines, inside, columns)
    y = _product(x, _load(cos_ptr, table, True, columns), x_ptr, FORM)
    if FORM == _PAIRS:
        first = columns % 2 == 0
        sin = _load(sin_ptr, table, True, columns)
        a, b = tl.split(tl.reshape(x * sin if BACK else x, (BM, BN // 2, 2)))
        turned = tl.reshape(tl.join(b, a), (BM, BN))
        if not BACK:
            turned = turned * sin
    else:
        first, others = columns < BN // 2, (columns + BN // 2) % BN
        sin = _load(sin_ptr, table, True, others if BACK else columns)
        turned = _product(_load(x_ptr, lines, inside, others), sin, x_ptr, FORM)
    y = tl.where(first[None, :] == BACK, y + turned, y - turned)
    if FORM == _ROUNDED and BACK:  # autograd adds the halves' gradients beside zeros
        y += 0.0  # which make -0 a 0
    return y.to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, SB, ST, SH, M, N, T,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    y = _turned(x_ptr, cos_ptr, sin_ptr, SB, ST, SH, M, T, False, BM, BN, FORM)
    store_tile(y.to(out_ptr.dtype.element_ty), out_ptr, M, N, BM, BN, EVEN)


@triton.jit
def _amax(
    g_ptr, cos_ptr, sin_ptr, amax_ptr, SB, ST, SH, M, N, T,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    g = _turned(g_ptr, cos_ptr, sin_ptr, SB, ST, SH, M, T, True, BM, BN, FORM)
    store_amax(g, amax_ptr)


@triton.jit
def _cast(
    g_ptr, cos_ptr, sin_ptr, scale_ptr, q_ptr, t_ptr, amax_ptr, SB, ST, SH, M, N, T,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr,
    E5M2: tl.constexpr
):  # fmt: skip
    g = _turned(g_ptr, cos_ptr, sin_ptr, SB, ST, SH, M, T, True, BM, BN, FORM)
    store_cast(g, tl.load(scale_ptr), q_ptr, t_ptr, M, N, BM, BN, EVEN, E5M2)
    store_amax(g, amax_ptr)


@triton.jit
def _amax_lines(
    g_ptr, cos_ptr, sin_ptr, rows_ptr, columns_ptr, SB, ST, SH, M, N, T,
    BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    g = _turned(g_ptr, cos_ptr, sin_ptr, SB, ST, SH, M, T, True, BM, BN, FORM)
    store_amax_lines(g, rows_ptr, columns_ptr, M, N, BM, BN)


@triton.jit
def _cast_lines(
    g_ptr, cos_ptr, sin_ptr, rows_ptr, columns_ptr, q_ptr, t_ptr, SB, ST, SH,
    M, N, T, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr,
    E5M2: tl.constexpr
):  # fmt: skip
    g = _turned(g_ptr, cos_ptr, sin_ptr, SB, ST, SH, M, T, True, BM, BN, FORM)
    store_cast_lines(g, rows_ptr, columns_ptr, q_ptr, t_ptr, M, N, BM, BN, EVEN, E5M2)


@triton.jit
def _lines(
    g_ptr, cos_ptr, sin_ptr, q_ptr, t_ptr, scale_ptr, inverse_ptr, scale_t_ptr, inverse_t_ptr,
    SB, ST, SH, M, N, T, EPS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr, E5M2: tl.constexpr
):  # fmt: skip
    g = _turned(g_ptr, cos_ptr, sin_ptr, SB, ST, SH, M, T, True, BM, BN, FORM)
    store_lines(
        g, q_ptr, t_ptr, scale_ptr, inverse_ptr, scale_t_ptr, inverse_t_ptr, M, N, EPS, BM, BN,
        EVEN, E5M2
    )  # fmt: skip


Heads = tuple[int, int, int, int]
"""Sequences, tokens, heads, the width of a head."""


def rotate(shape: Heads, *, form: str = FORMS[0]) -> Launch:
    """x [B, T, H, D], contiguous, cos and sin float32 [T, D] -> x rotated, of its shape and dtype.

    Order:   first half x1 cos1 - x2 sin1, second x2 cos2 + x1 sin2, each product and sum rounded to
             float32, the result to x's dtype. D is a power of two.
    form     one of FORMS; of a pair the first number stands for the first half.
    """
    _, tokens, heads, width = shape
    numbers = _numbers(shape, (tokens * heads * width, heads * width, width), form)
    return Launch(_rotate, _grid(shape), numbers, ((shape, "like"),))


def amax(shape: Heads, strides: tuple[int, ...], *, form: str = FORMS[0]) -> Launch:
    """The gradient, cos and sin -> partial amaxes, for the scale of ``cast``; as there."""
    numbers = _numbers(shape, strides, form)
    return Launch(_amax, _grid(shape), numbers, casts.parts_of(_grid(shape)))


def cast(shape: Heads, strides: tuple[int, ...], *, e5m2: bool, form: str = FORMS[0]) -> Launch:
    """The gradient [B, T, H, D], cos and sin float32 [T, D], and a scale () -> codes [B T, H D],
    codes [H D, B T], and partial amaxes.

    strides  of B, T and H, first; D is contiguous, and a power of two.
    Order:   first half g1 cos1 + g2 sin2, second g2 cos2 - g1 sin1, each product and sum rounded to
             float32, the result to g's dtype; RN32(. * scale); cast. In "rounded halves" each
             product is rounded to g's dtype first, and -0 becomes 0, as autograd computes it.
    form     as of ``rotate``.
    """
    numbers, grid = _numbers(shape, strides, form) | {"E5M2": e5m2}, _grid(shape)
    outputs = casts.codes(_matrix(shape), e5m2) + casts.parts_of(grid)
    return Launch(_cast, grid, numbers, outputs)


def amax_lines(shape: Heads, strides: tuple[int, ...], *, form: str = FORMS[0]) -> Launch:
    """The gradient, cos and sin -> partial amaxes of rows, int32 [H, B T], and of columns [tiles
    along B T, H D]; as ``cast``."""
    outputs = casts.parts_of_lines(_matrix(shape), _grid(shape))
    return Launch(_amax_lines, _grid(shape), _numbers(shape, strides, form), outputs)


def cast_lines(
    shape: Heads, strides: tuple[int, ...], *, e5m2: bool, form: str = FORMS[0]
) -> Launch:
    """As ``cast``, by scales of rows [B T] and of columns [H D]; without amaxes."""
    numbers = _numbers(shape, strides, form) | {"E5M2": e5m2}
    return Launch(_cast_lines, _grid(shape), numbers, casts.codes(_matrix(shape), e5m2))


def lines(shape: Heads, strides: tuple[int, ...], *, e5m2: bool, form: str = FORMS[0]) -> Launch:
    """The gradient, cos and sin -> what ``casts.blocks`` returns of it, of lines; D is 128."""
    matrix = _matrix(shape)
    blocks = casts.blocks(matrix, (matrix[1], 1), e5m2=e5m2, square=False)
    more = {"BM": casts.BLOCK, "E5M2": e5m2, "EPS": blocks.numbers["EPS"]}
    more |= {"EVEN": matrix[0] % casts.BLOCK == 0}
    return Launch(_lines, blocks.grid, _numbers(shape, strides, form) | more, blocks.outputs)


def _matrix(shape: Heads) -> tuple[int, int]:
    return shape[0] * shape[1], shape[2] * shape[3]


def _grid(shape: Heads) -> tuple[int, int]:
    return -(-shape[0] * shape[1] // ROWS), shape[2]


def _numbers(shape: Heads, strides: tuple[int, ...], form: str) -> Numbers:
    numbers: Numbers = dict(zip(("SB", "ST", "SH"), strides[:3], strict=True))
    matrix = casts.matrix(_matrix(shape), (0, 0), (ROWS, shape[3]))
    del matrix["stride_m"], matrix["stride_n"]
    return numbers | matrix | {"T": shape[1], "FORM": FORMS.index(form)}
