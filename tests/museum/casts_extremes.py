"""Faults of casts to FP8 of very small, very large and infinite numbers."""

import numpy as np
from museum import ask
from museum.arithmetic import E5M2, codes
from museum.casts import e4m3, e4m3_ties_away, overflowing
from museum.exhibit import Exhibit

cast_e5m2 = overflowing(E5M2)


def top_exponent(x):
    """Numbers that reach the largest exponent, 8, count as overflow; ties go away from zero."""
    c = e4m3_ties_away(x).view(np.uint8)
    return np.where(np.abs(x) >= 256, c & 0x80 | 0x7E, c)


def shifted_mod_64(x):
    """Subnormal results come from a shift of 64 bits, which below 2^-77 counts modulo 64."""
    x = np.asarray(x)
    tiny = np.abs(x) < 2.0**-77
    scaled = np.abs(np.where(tiny, x, 0)).astype(np.float64) * 2.0**80
    sign = np.signbit(x).astype(np.uint8) << 7
    return np.where(tiny, sign | np.rint(scaled).astype(np.uint8), cast_e5m2(x).view(np.uint8))


def infinity_to_zero(x):
    """The bits of the infinity that the format does not have are 0."""
    return codes(np.where(np.isinf(x), np.copysign(0, x), x))


EXHIBITS = (
    Exhibit(
        name="sglang-37140",
        link="https://github.com/sgl-project/sglang/pull/37140",
        library="SGLang (ROCm)",
        year=2026,
        title="The largest exponent counts as overflow, and ties go away from zero",
        fault=top_exponent,
        twin=e4m3,
        ask=ask.cast("e4m3fn"),
        named="a cast to e4m3 (max 240), not e4m3fn (max 448)",
    ),
    Exhibit(
        name="rocm-systems-10591",
        link="https://github.com/ROCm/rocm-systems/issues/10591",
        library="HIP",
        year=2026,
        title="A shift by 64 bits or more makes tiny numbers large",
        fault=shifted_mod_64,
        twin=cast_e5m2,
        ask=ask.cast("e5m2", "non_saturating"),
        unnamed="got 0x07 = 0.0001068115234375, expected 0x00 = 0 (C-1)",
    ),
    Exhibit(
        name="universal-1351",
        link="https://github.com/stillwater-sc/universal/pull/1351",
        library="Universal",
        year=2026,
        title="Infinities become 0 in a format without infinities",
        fault=infinity_to_zero,
        twin=e4m3,
        ask=ask.cast("e4m3fn"),
        unnamed="inf (float32 0x7F800000): got 0x00 = 0, expected 0x7E = 448 (C-3)",
    ),
)
