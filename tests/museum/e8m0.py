"""Faults of casts to e8m0, and of the scales of MX blocks: powers of two."""

import numpy as np
from museum import ask
from museum.arithmetic import F, bf16, bits, e8m0_up, number
from museum.exhibit import Exhibit


def magnitude(x):
    """The exponent's field and the fraction's bits of |x|."""
    u = bits(x) & 0x7FFFFFFF
    return (u >> 23).astype(np.int64), u & 0x7FFFFF


def finished(x, code):
    """Codes up to 254; 255 of NaN."""
    return np.where(np.isnan(x), 255, np.clip(code, 0, 254)).astype(np.uint8)


def nearest(x, *, ties_up=False):
    """The nearest power of two; of two the one with the even code, or the upper one."""
    u = bits(x) & 0x7FFFFFFF
    up = 1 if ties_up else u >> 23 & 1
    return finished(x, (u + 0x3FFFFF + up) >> 23)


def down(x):
    """The power of two at or below."""
    return finished(x, magnitude(x)[0])


def biased_by_125(scale):
    """Two is subtracted from the exponent that is stored."""
    return finished(scale, magnitude(scale)[0] - 2)


def narrow_mask(x):
    """Rounding up looks at 22 of 23 fraction bits: 0x4FFFFF for 0x7FFFFF."""
    exponent, fraction = magnitude(x)
    return finished(x, exponent + ((fraction & 0x4FFFFF) != 0))


def zero_as_nan(x):
    """Zero and what lies below 2^-127 is NaN."""
    return np.where(np.abs(x) < 2.0**-127, 255, down(x)).astype(np.uint8)


def carried_into_nan(x):
    """Rounding up has no bound: above 2^127 is code 255."""
    exponent, fraction = magnitude(x)
    up = (fraction > 0) & (exponent < 255) & ~((exponent == 0) & (fraction <= 0x400000))
    return np.where(np.isnan(x), 255, exponent + up).astype(np.uint8)


def one_ulp(scale):
    """'Rounded up' by one unit in the last place of the power of two below."""
    return down(number((bits(scale) & 0x7F800000) + 1))


def truncated_log(scale):
    """log2 is cut toward zero: up below 1, down above."""
    with np.errstate(all="ignore"):
        log = np.trunc(np.log2(np.asarray(scale, np.float64)))
    return finished(scale, 127 + np.nan_to_num(log, posinf=127, neginf=-127).astype(int))


def of_nearest_quotient(amax, largest):
    """The nearest power of amax / max, ties up: the block's largest may be above max."""
    return nearest(np.asarray(amax, F) / F(largest), ties_up=True)


def of_quotient_up(amax, largest):
    return e8m0_up(np.asarray(amax, F) / F(largest))


def of_rounded_log(amax):
    """The logarithm of amax / 448, rounded to nearest."""
    with np.errstate(all="ignore"):
        log = np.rint(np.log2(np.asarray(amax, F) / F(448)))
    return finished(amax, 127 + np.nan_to_num(log, posinf=127, neginf=-127).astype(int))


def of_exponents(amax, *, through=lambda x: x):
    """The exponent of amax less that of e4m3's largest number, 8."""
    return finished(amax, magnitude(through(amax))[0] - 8)


COMPRESSED = "https://github.com/vllm-project/compressed-tensors/"

EXHIBITS = (
    Exhibit(
        name="aiter-3212",
        link="https://github.com/ROCm/aiter/pull/3212",
        library="aiter",
        year=2026,
        title="The MX scale goes to the nearest power of two",
        fault=lambda amax: of_nearest_quotient(amax, 6),
        twin=lambda amax: of_quotient_up(amax, 6),
        ask=ask.scales("te_mxfp8", fmt="e2m1fn", made="e8m0"),
        unnamed="expected  0x7D (0.25)",
    ),
    Exhibit(
        name="rmlx-463",
        link="https://github.com/Pushkinist/rMLX/issues/463",
        library="rMLX",
        year=2026,
        title="MXFP8 scales are rounded to the nearest exponent after dividing by 448",
        fault=of_rounded_log,
        twin=lambda amax: of_quotient_up(amax, 448),
        ask=ask.scales("te_mxfp8", made="e8m0"),
        unnamed="expected  0x77 (0.00390625)",
    ),
    Exhibit(
        name="ao-4725",
        link="https://github.com/pytorch/ao/pull/4725",
        library="torchao",
        year=2026,
        title="amax goes through bfloat16 before its exponent is taken",
        fault=lambda amax: of_exponents(amax, through=bf16),
        twin=of_exponents,
        ask=ask.scales("mx_floor", made="e8m0"),
        unnamed="expected  0x87 (256)",
    ),
)
