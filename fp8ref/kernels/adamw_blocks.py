"""A step of AdamW with moments in e4m3fn, of which blocks of elements share scales (spec O-2 to
O-10, O-14, O-15).

Scales need the amax of a new moment before its codes: a program holds its blocks in registers
between the two. Results are written in place of what was read, and nothing is written by a step
that is not finite.
"""

from typing import Any

import numpy as np
import triton
import triton.language as tl

from fp8ref.kernels.adamw import averages, changed, zero_below
from fp8ref.kernels.casts import codes_of, magnitude
from fp8ref.kernels.jit import Launch, Numbers

__all__ = ["NUMBERS", "step"]

NUMBERS = 14
"""The length of the numbers of a step, float32: ``adamw.NUMBERS``; 1 if the step is finite, else 0;
scale_inv of the old master and the scale of the new one, where it is float16."""

ROWS = 16
"""Blocks of a program: of 128 elements, 16 elements a thread."""


@triton.jit
def _power(x, exponent):
    square = x * x
    low = tl.where(exponent == 1.0, x, tl.sqrt_rn(x))
    return tl.where(exponent == 4.0, square * square, tl.where(exponent == 2.0, square, low))


@triton.jit
def _root_of_power(y, exponent):
    root = tl.sqrt_rn(y)
    low = tl.where(exponent == 1.0, y, y * y)
    return tl.where(exponent == 4.0, tl.sqrt_rn(root), tl.where(exponent == 2.0, root, low))


@triton.jit
def _signed(x, sign):
    """x, of magnitudes, with the signs of other numbers."""
    return tl.where(sign.to(tl.int32, bitcast=True) < 0, -x, x)


@triton.jit
def _read(
    codes_ptr, inverse_ptr, exponent_ptr, center_ptr, at, here, groups, within,
    EXPANDED: tl.constexpr, ROOT: tl.constexpr, LERP: tl.constexpr
):  # fmt: skip
    """A moment as a step reads it (O-4)."""
    codes = tl.load(codes_ptr + at, mask=here, other=0)
    x = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    x = x * tl.load(inverse_ptr + groups, mask=within, other=1.0)
    if EXPANDED:
        exponent = tl.load(exponent_ptr + groups, mask=within, other=1.0)
        center = tl.load(center_ptr + groups, mask=within, other=1.0)
        x = _signed(_root_of_power(tl.abs(x), exponent) * center, x)
    if ROOT:
        x = x * x
    least: tl.constexpr = 7.888609052210118e-31 if LERP else 2.350988701644575e-38
    return zero_below(x, least)


@triton.jit
def _store(
    x, codes_ptr, inverse_ptr, exponent_ptr, center_ptr, at, here, groups, within,
    FLOOR: tl.constexpr, DIVIDE: tl.constexpr, EXPANDED: tl.constexpr, KEEP: tl.constexpr
):  # fmt: skip
    """Store a moment, or its root (O-7, O-8, O-10). FLOOR: the bits of the least amax."""
    bits = magnitude(x)
    amax = tl.maximum(tl.max(bits, 1), FLOOR)[:, None]
    top = amax.to(tl.float32, bitcast=True)
    one, most = tl.full(top.shape, 1.0, tl.float32), tl.full(top.shape, 448.0, tl.float32)
    if EXPANDED:
        smallest = tl.min(tl.where(bits == 0, 0x7F800000, bits), 1)[:, None]
        bottom = tl.minimum(tl.maximum(smallest, FLOOR), amax).to(tl.float32, bitcast=True)
        center = tl.sqrt_rn(top) * tl.sqrt_rn(bottom)
        ratio = tl.div_rn(top, bottom)
        low = tl.where(ratio <= 100352.0, 1.0, 0.5)
        low = tl.where(ratio <= 316.7838439941406, 2.0, low)
        exponent = tl.where(ratio <= 17.79842185974121, 4.0, low)
        inverse = tl.div_rn(_power(tl.div_rn(top, center), exponent), most)
        tl.store(exponent_ptr + groups, exponent, mask=within)
        tl.store(center_ptr + groups, center, mask=within)
        spread, power = tl.broadcast_to(center, x.shape), tl.broadcast_to(exponent, x.shape)
        x = _signed(_power(tl.div_rn(tl.abs(x), spread), power), x)
    elif DIVIDE:
        inverse = tl.div_rn(top, most)
    else:
        scale = tl.div_rn(most, top)
        inverse = tl.div_rn(one, scale)
    scaled = tl.div_rn(x, tl.broadcast_to(inverse, x.shape)) if DIVIDE else x * scale
    codes = codes_of(scaled, False)
    if KEEP:
        codes = tl.where((bits != 0) & ((codes & 0x7F) == 0), codes | 1, codes)
    tl.store(inverse_ptr + groups, inverse, mask=within)
    tl.store(codes_ptr + at, codes, mask=here)


@triton.jit
def _step(
    p_ptr, g_ptr, numbers_ptr, m_ptr, m_inverse_ptr, m_exponent_ptr, m_center_ptr,
    v_ptr, v_inverse_ptr, v_exponent_ptr, v_center_ptr, new_p_ptr, new_m_ptr,
    new_m_inverse_ptr, new_m_exponent_ptr, new_m_center_ptr, new_v_ptr, new_v_inverse_ptr,
    new_v_exponent_ptr, new_v_center_ptr, amax_ptr, BLOCKS, SIZE: tl.constexpr,
    ROWS: tl.constexpr, LERP: tl.constexpr, BOUNDED: tl.constexpr, FLOOR: tl.constexpr,
    DIVIDE: tl.constexpr, ROOT: tl.constexpr, KEEP: tl.constexpr, EXPANDED: tl.constexpr
):  # fmt: skip
    groups = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    within = groups < BLOCKS
    at = groups.to(tl.int64) * SIZE + tl.arange(0, SIZE)[None, :]
    here = tl.broadcast_to(within, at.shape)
    m = _read(
        m_ptr, m_inverse_ptr, m_exponent_ptr, m_center_ptr, at, here, groups, within,
        EXPANDED, False, LERP
    )  # fmt: skip
    v = _read(
        v_ptr, v_inverse_ptr, v_exponent_ptr, v_center_ptr, at, here, groups, within,
        EXPANDED, ROOT, LERP
    )  # fmt: skip
    p = tl.load(p_ptr + at, mask=here, other=0.0).to(tl.float32)
    if p_ptr.dtype.element_ty == tl.float16:  # a master
        p = zero_below(p * tl.load(numbers_ptr + 12), 2.350988701644575e-38)
    g = tl.load(g_ptr + at, mask=here, other=0.0).to(tl.float32)
    m, v = averages(g, m, v, numbers_ptr, LERP)
    root = tl.sqrt_rn(v)
    p = changed(p, m, root, numbers_ptr, BOUNDED)
    if p_ptr.dtype.element_ty == tl.float16:
        p = p * tl.load(numbers_ptr + 13)
        p = tl.where(p > 65504.0, 65504.0, tl.where(p < -65504.0, -65504.0, p))
    stored = p.to(p_ptr.dtype.element_ty)
    if p_ptr.dtype.element_ty == tl.float16:
        tl.store(
            amax_ptr + groups, tl.max(magnitude(stored.to(tl.float32)), 1)[:, None], mask=within
        )
    within = groups < BLOCKS * tl.load(numbers_ptr + 11).to(tl.int32)  # of a finite step
    here = tl.broadcast_to(within, at.shape)
    tl.store(new_p_ptr + at, stored, mask=here)
    _store(
        m, new_m_ptr, new_m_inverse_ptr, new_m_exponent_ptr, new_m_center_ptr, at, here,
        groups, within, FLOOR, DIVIDE, EXPANDED, False
    )  # fmt: skip
    _store(
        root if ROOT else v, new_v_ptr, new_v_inverse_ptr, new_v_exponent_ptr,
        new_v_center_ptr, at, here, groups, within, FLOOR, DIVIDE, EXPANDED, KEEP
    )  # fmt: skip


def step(count: int, layout: Any) -> Launch:
    """p, g, the numbers, and of m and v codes, scale_inv, exponents and centers -> all but g and
    the numbers, and the amax of each block of a master's codes, int32 [count].

    Without an expansion exponents and centers are neither read nor written.

    p        float32, or the codes of a float16 master; else amaxes are not written.
    g        float32, float16 or bfloat16. codes are uint8.
    count    of the blocks; the last may not be shorter.
    layout   a ``spec.states.layouts.Layout``: moments in e4m3fn by exact amaxes, alike but for root
             and keep, which v has; scaling multiply or divide.
    Order:   spec O-2 to O-8, O-10 and O-15; each operation rounded to float32.
    """
    moment = layout.v
    numbers: Numbers = {
        "BLOCKS": count,
        "SIZE": moment.block,
        "ROWS": ROWS,
        "LERP": layout.average == "lerp",
        "BOUNDED": layout.bounded,
        "FLOOR": int(np.float32(moment.floor).view(np.int32)),
        "DIVIDE": moment.scaling == "divide",
        "ROOT": moment.root,
        "KEEP": moment.keep,
        "EXPANDED": moment.expansion,
    }
    return Launch(_step, (-(-count // ROWS),), numbers, warps=4)
