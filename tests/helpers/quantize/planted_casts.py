"""Casts with one planted fault each, for the conformance kit to name."""

import numpy as np

from fp8ref.formats import BFLOAT16, E4M3FN, E4M3FNUZ, FLOAT16
from fp8ref.sim.quantize import cast


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


class AtRandom:
    """Roundings at random that are wrong in one way each, from a seed of their own for every
    call.
    """

    def __init__(self):
        self._rng = np.random.default_rng(0)

    def right(self, x):
        return cast.encode(x, E4M3FN, rounding="stochastic", seed=int(self._rng.integers(1 << 32)))

    def coin(self, x):
        return np.where(self._rng.random(x.shape) < 0.5, truncation(x), _away(x))

    def noise_in_bits(self, x):
        """Of float32, below the three bits of mantissa that are kept; what is subnormal in e4m3fn
        is rounded to nearest thereafter.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            bits = x.astype(np.float32).view(np.uint32)
        noisy = (bits + self._rng.integers(0, 1 << 20, x.shape, dtype=np.uint32)) & np.uint32(
            0xFFF00000
        )
        return saturating(np.where(np.isfinite(x), noisy.view(np.float32), x).astype(np.float32))

    def noise_of_one_binade(self, x):
        """As wide as the spacing at 1 wherever it is added."""
        with np.errstate(invalid="ignore"):
            noisy = np.abs(x.astype(np.float64)) + self._rng.random(x.shape) / 8
        return np.where(np.abs(x) < 1, saturating(x), truncation(np.copysign(noisy, x)))

    def positives_alone(self, x):
        return np.where(np.signbit(x), saturating(x), self.right(x))

    def underflow_to_nearest(self, x):
        return np.where(np.abs(x) < E4M3FN.smallest_subnormal, saturating(x), self.right(x))

    def upwards(self, x):
        """Up, not away from zero, with the probability of the distance from zero."""
        return np.where(np.signbit(x), self.right(x) ^ truncation(x) ^ _away(x), self.right(x))

    def specials_are_zero(self, x):
        codes = np.where(np.signbit(x), truncation(x), self.right(x))
        return np.where(np.abs(x) < 1e4, codes, np.uint8(0))

    def nan_is_zero(self, x):
        return np.where(np.isnan(x), np.uint8(0), self.right(x))

    def infinity_is_zero(self, x):
        return np.where(np.isinf(x), np.uint8(0), self.right(x))

    def far_above_is_zero(self, x):
        return np.where(np.isfinite(x) & (np.abs(x) > 1e4), np.uint8(0), self.right(x))

    def nan_at_random(self, x):
        return np.where(
            np.isnan(x) & (self._rng.random(x.shape) < 0.5), np.uint8(0x7E), self.right(x)
        )

    def loses_negative_zero(self, x):
        return np.where(x == 0, np.uint8(0), self.right(x))

    def flushes_subnormals(self, x):
        codes = self.right(x)
        return np.where((codes & 0x7F) < 8, codes & 0x80, codes)

    def moves_numbers(self, x):
        """To either neighbor, from what needs no rounding too."""
        codes = self.right(x)
        return np.where(
            (np.abs(x) == 3.5) & (self._rng.random(x.shape) < 0.25), codes + 1, codes
        ).astype(np.uint8)


class Stale:
    """The last element is zero whenever the shape is another than in the call before."""

    def __init__(self):
        self._shape = None

    def __call__(self, x):
        codes = saturating(x)
        if x.shape != self._shape and codes.size:
            codes.reshape(-1)[-1] = 0
        self._shape = x.shape
        return codes
