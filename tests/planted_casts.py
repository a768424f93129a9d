"""Casts that are wrong in one way each, for the kit to name."""

import numpy as np

from fp8ref.formats import BFLOAT16, E4M3FN, E4M3FNUZ, FLOAT16
from fp8ref.sim import cast


def saturating(x):
    return cast.encode(x, E4M3FN)


def ties_away(x):
    return cast.encode(x, E4M3FN, rounding="nearest_away")


def truncation(x):
    return cast.encode(x, E4M3FN, rounding="toward_zero")


def no_saturation(x):
    return cast.encode(x, E4M3FN, saturate=False)


def nan_for_infinity(x):
    return np.where(np.isinf(x), np.uint8(0x7F), cast.encode(x, E4M3FN))


def twice_by_bfloat16(x):
    return cast.encode(cast.round_to(x, BFLOAT16), E4M3FN)


def twice_by_float16(x):
    return cast.encode(cast.round_to(x, FLOAT16), E4M3FN)


def cut_to_bfloat16(x):
    return cast.encode(cast.round_to(x, BFLOAT16, rounding="toward_zero"), E4M3FN)


def flushes_subnormals(x):
    codes = cast.encode(x, E4M3FN)
    return np.where((codes & 0x7F) < 8, codes & 0x80, codes)


def flushes_inputs(x):
    return cast.encode(np.where(np.abs(x) < 2.0**-6, np.copysign(x.dtype.type(0), x), x), E4M3FN)


def loses_negative_zero(x):
    return cast.encode(x + x.dtype.type(0), E4M3FN)


def loses_negative_zeros(x):
    codes = cast.encode(x, E4M3FN)
    return np.where(codes == 0x80, np.uint8(0), codes)


def max_240(x):
    return cast.encode(np.clip(x, -240, 240), E4M3FN)


def fnuz(x):
    return cast.encode(x, E4M3FNUZ)


def up(x):
    down, away = cast.encode(x, E4M3FN, rounding="toward_zero"), _away(x)
    return np.where(np.signbit(x), down, away)


def _away(x):
    """Away from zero: the code above the truncated one, unless that is exact."""
    truncated = cast.encode(x, E4M3FN, rounding="toward_zero")
    exact = cast.decode(truncated, E4M3FN) == x
    return np.where(exact | ((truncated & 0x7F) >= 0x7E), truncated, truncated + 1).astype(np.uint8)


def nan_is_zero(x):
    return np.where(np.isnan(x), np.uint8(0), cast.encode(x, E4M3FN))


def nan_is_max(x):
    return np.where(np.isnan(x), np.uint8(0x7E), cast.encode(x, E4M3FN))


def doubles(x):
    return cast.encode(2 * x, E4M3FN)


def quadruples(x):
    return cast.encode(4 * x, E4M3FN)


def infinity_is_unsigned_nan(x):
    """NaNs keep their sign, infinities lose theirs."""
    codes = np.where(np.isnan(x) & np.signbit(x), np.uint8(0xFF), cast.encode(x, E4M3FN))
    return np.where(np.isinf(x), np.uint8(0x7F), codes)
