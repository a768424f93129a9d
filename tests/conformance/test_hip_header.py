"""HIP's casts on the host, transcribed, against the simulator: every bfloat16 and float16 input,
and numbers next to them.

ROCm/clr, hipamd/include/hip/amd_detail/amd_hip_fp8.h: cast_to_f8<float, is_fnuz> (commit 00387053),
without stochastic rounding.
"""

import ml_dtypes
import numpy as np
import pytest

from fp8ref.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ
from fp8ref.sim.quantize import cast

BITS = np.arange(1 << 16, dtype=np.uint16)
FNUZ = (E4M3FNUZ, E5M2FNUZ)
formats = pytest.mark.parametrize("fmt", [E4M3FN, E5M2, *FNUZ], ids=str)


def hip(x, fmt, *, clip):
    """The codes of float32 numbers of at least 2^-40 times the format's smallest normal number, or
    zero: below, the header shifts 64 bits by 64 or more, which C++ leaves undefined."""
    bits, fnuz, wm, we = (
        x.view(np.uint32).astype(np.int64),
        fmt in FNUZ,
        fmt.mantissa_bits,
        fmt.exponent_bits,
    )
    exponent, mantissa, sign = (bits >> 23) & 0xFF, bits & 0x7FFFFF, (bits >> 31) << 7
    if fnuz:
        infinity, nan = (sign + 0x7F if clip else 0x80 + 0 * sign), 0x80 + 0 * sign
    else:
        infinity, nan = (
            sign + {(4, True): 0x7E, (4, False): 0x7F, (5, True): 0x7B, (5, False): 0x7C}[we, clip],
            sign + 0x7F,
        )
    largest = int(np.float32(fmt.max).view(np.uint32))
    bias = (1 << (we - 1)) - 1 + fnuz
    least = 1 - bias
    actual = np.where(exponent == 0, -126, exponent - 127)
    down = np.where(exponent == 0, least - actual, np.maximum(least - actual, 0))
    mantissa = mantissa + np.where(exponent == 0, 0, 1 << 23)
    safe = np.minimum(down, 40)
    midpoint = (mantissa & ((1 << (23 - wm + safe)) - 1)) == 1 << (22 - wm + safe)
    mantissa = mantissa >> safe
    code = actual + down + bias - np.where(mantissa & (1 << 23), 0, 1)
    odd = (mantissa & (1 << (23 - wm))) != 0
    mantissa = mantissa + (
        np.where(midpoint & ~odd, mantissa - 1, mantissa) & ((1 << (23 - wm)) - 1)
    )
    promoted = (code == 0) & ((mantissa & (1 << 23)) != 0)
    carried = (code != 0) & ((mantissa & (1 << 24)) != 0)
    code, mantissa = (
        code + promoted + carried,
        np.where(carried, mantissa >> 1, mantissa) >> (23 - wm),
    )
    found = sign | code << wm | mantissa & ((1 << wm) - 1)
    found = np.where((code == 0) & (mantissa == 0), 0 if fnuz else sign, found)
    found = np.where(bits == 0, 0, np.where((bits & 0x7FFFFFFF) > largest, infinity, found))
    special = nan if fnuz or we == 4 else np.where(bits & 0x7FFFFF, nan, sign + 0x7C)
    return np.where(exponent == 0xFF, special, found).astype(np.uint8)


@pytest.fixture(scope="module")
def numbers():
    """Every bfloat16 and float16 number, and their neighbors in float32."""
    some = np.concatenate(
        [BITS.view(ml_dtypes.bfloat16).astype(np.float32), BITS.view(np.float16).astype(np.float32)]
    )
    near = some[np.isfinite(some)].view(np.int32)[:, None] + np.array([-1, 0, 1])
    near = near[np.abs(near) != 0x80000000].astype(np.int32).view(np.float32)
    return np.concatenate([some, near[~np.isnan(near)]])


@formats
def test_saturating_casts_are_the_simulators_but_at_infinities(fmt, numbers):  # C-2, C-3, C-5, C-6
    """An infinity becomes NaN, in e5m2 the infinity, though the cast saturates; a NaN keeps its
    sign where the format has two.
    """
    x = numbers[(np.abs(numbers) >= 2.0 ** (fmt.emin - 40)) | (numbers == 0) | np.isnan(numbers)]
    found, expected = cast.canonical_nans(hip(x, fmt, clip=True), fmt), cast.encode(x, fmt)
    differs = found != expected
    np.testing.assert_array_equal(differs, np.isinf(x))
    assert set(found[differs]) == ({0x7C, 0xFC} if fmt == E5M2 else {fmt.nan_code})


@formats
def test_casts_that_do_not_saturate_overflow_above_max_already(fmt, numbers):  # C-4
    """C-4 rounds first, so that numbers up to the tie above max become max; the header gives all
    above max the code of an overflow.
    """
    x = numbers[(np.abs(numbers) >= 2.0 ** (fmt.emin - 40)) | (numbers == 0) | np.isnan(numbers)]
    found, expected = (
        cast.canonical_nans(hip(x, fmt, clip=False), fmt),
        cast.encode(x, fmt, saturate=False),
    )
    # of the spacing at max
    half = fmt.smallest_subnormal * 2.0 ** ((fmt.max_code >> fmt.mantissa_bits) - 2)
    above = (np.abs(x) > fmt.max) & (
        (np.abs(x) < fmt.max + half) | ((np.abs(x) == fmt.max + half) & (fmt.max_code % 2 == 0))
    )
    np.testing.assert_array_equal(found != expected, above)
    assert above.sum() > 100
