"""The gradient of a rotary embedding, or of heads that are not rotated, with its cast (spec M-3).

Attention returns gradients of q, k and v as [B, T, H, D], of any strides but along D. The linear
that made them takes its gradient as [B T, H D]. Each program has rows of one head, both halves.
"""

import triton
import triton.language as tl

from fp8ref.kernels import casts
from fp8ref.kernels.casts import codes_of, magnitude
from fp8ref.kernels.jit import Launch, Numbers

__all__ = ["cast"]

ROWS = 64
"""Tokens of a tile, which is as wide as a head."""


@triton.jit
def _store_half(x, scale, q_ptr, t_ptr, rows, columns, M, N, E5M2: tl.constexpr):
    """Cast a half [rows, columns] of a head and store its codes in both orders."""
    codes = codes_of(x * scale, E5M2)
    inside = rows[:, None] < M
    tl.store(q_ptr + rows[:, None].to(tl.int64) * N + columns[None, :], codes, mask=inside)
    at = columns[:, None].to(tl.int64) * M + rows[None, :]
    tl.store(t_ptr + at, tl.trans(codes), mask=rows[None, :] < M)


@triton.jit
def _cast(
    g_ptr,
    cos_ptr,
    sin_ptr,
    scale_ptr,
    q_ptr,
    t_ptr,
    amax_ptr,
    stride_b,
    stride_t,
    stride_h,
    M,
    N,
    T,
    BM: tl.constexpr,
    HALF: tl.constexpr,
    E5M2: tl.constexpr,
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    half = tl.arange(0, HALF)
    token = rows % T
    lines = (rows // T).to(tl.int64) * stride_b + token * stride_t + tl.program_id(1) * stride_h
    inside = (rows < M)[:, None]
    at = g_ptr + lines[:, None] + half[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if cos_ptr is not None:
        at = token[:, None] * (2 * HALF) + half[None, :]
        cos1, cos2 = tl.load(cos_ptr + at), tl.load(cos_ptr + at + HALF)
        sin1, sin2 = tl.load(sin_ptr + at), tl.load(sin_ptr + at + HALF)
        rotated = first * cos1 + second * sin2
        second = (second * cos2 - first * sin1).to(g_ptr.dtype.element_ty).to(tl.float32)
        first = rotated.to(g_ptr.dtype.element_ty).to(tl.float32)
    if q_ptr is not None:
        scale = tl.load(scale_ptr)
        columns = tl.program_id(1) * (2 * HALF) + half
        _store_half(first, scale, q_ptr, t_ptr, rows, columns, M, N, E5M2)
        _store_half(second, scale, q_ptr, t_ptr, rows, columns + HALF, M, N, E5M2)
    largest = tl.maximum(magnitude(first), magnitude(second))
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(amax_ptr + place, tl.max(tl.max(largest, 1), 0))


def cast(
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    *,
    e5m2: bool,
    rotates: bool,
    cast: bool = True,
) -> Launch:
    """The gradient [B, T, H, D], cos and sin float32 [T, D] if it was rotated, and a scale () ->
    codes [B T, H D], codes [H D, B T], and partial amaxes.

    strides  of B, T and H; D is contiguous, and a power of two.
    cast     False: no scale -> partial amaxes alone.
    Order:   first half g1 cos1 + g2 sin2, second g2 cos2 - g1 sin1, each product and sum rounded to
             float32, the result to g's dtype; RN32(. * scale); cast.
    """
    batch, tokens, heads, width = shape
    numbers: Numbers = dict(zip(("stride_b", "stride_t", "stride_h"), strides, strict=True))
    numbers |= {"M": batch * tokens, "N": heads * width, "T": tokens}
    numbers |= {"BM": ROWS, "HALF": width // 2, "E5M2": e5m2}
    pointers = casts.absent(
        cos_ptr=rotates, sin_ptr=rotates, scale_ptr=cast, q_ptr=cast, t_ptr=cast
    )
    return Launch(_cast, (-(-batch * tokens // ROWS), heads), numbers | pointers)
