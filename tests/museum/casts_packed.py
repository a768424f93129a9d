"""Faults of casts to FP4, and of casts that pack two numbers."""

import numpy as np
from museum import ask
from museum.arithmetic import F, bf16, saturated
from museum.casts import e2m1, e4m3
from museum.exhibit import Exhibit


def counted(x, bounds):
    """The code of e2m1 is the number of bounds that |x| reaches."""
    magnitude = np.abs(np.asarray(x, F))
    code = sum((magnitude >= F(bound)).astype(np.uint8) for bound in bounds)
    return code | np.signbit(x).astype(np.uint8) << 3


def reaches_midpoints(x):
    """Each midpoint counts as reached, the even ones too."""
    return counted(x, (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5))


def reaches_numbers(x):
    """The numbers themselves are the bounds."""
    return counted(x, (0.5, 1, 1.5, 2, 3, 4, 6))


def by_bfloat16(x):
    """The instruction for a pair takes bfloat16."""
    return saturated(bf16(x))


def pairs(x):
    """Two numbers a byte, the first in the low half."""
    c = e2m1(x).view(np.uint8)
    c = c.reshape(*c.shape[:-1], -1, 2)
    return c[..., 0] | c[..., 1] << 4


def uncleared_pairs(x):
    """The byte still holds the bits of the pairs before."""
    return np.bitwise_or.accumulate(pairs(x), axis=-1)


EXHIBITS = (
    Exhibit(
        name="aiter-3992",
        link="https://github.com/ROCm/aiter/pull/3992",
        library="aiter",
        year=2026,
        title="Rounding to even rounds every midpoint of FP4 up",
        fault=reaches_midpoints,
        twin=e2m1,
        ask=ask.cast("e2m1fn", "ml_dtypes"),
        named="rounding: nearest_away",
    ),
    Exhibit(
        name="tilelang-1580",
        link="https://github.com/tile-ai/tilelang/pull/1580",
        library="TileLang",
        year=2025,
        title="Conversions to FP4 truncate",
        fault=reaches_numbers,
        twin=e2m1,
        ask=ask.cast("e2m1fn", "ml_dtypes"),
        named="rounding: toward_zero",
    ),
    Exhibit(
        name="flashinfer-4167",
        link="https://github.com/flashinfer-ai/flashinfer/pull/4167",
        library="FlashInfer",
        year=2026,
        title="A cast of pairs goes through bfloat16",
        fault=by_bfloat16,
        twin=e4m3,
        ask=ask.cast("e4m3fn"),
        named="float32 is rounded to bfloat16 first",
    ),
    Exhibit(
        name="bitsandbytes-1721",
        link="https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1721",
        library="bitsandbytes",
        year=2025,
        title="The byte of a pair is not cleared before the next pair",
        fault=uncleared_pairs,
        twin=pairs,
        ask=ask.cast("e2m1fn", "ml_dtypes"),
        unnamed="1 (float32 0x3F800000): got 0x03 = 1.5, expected 0x02 = 1 (F-1)",
    ),
)
