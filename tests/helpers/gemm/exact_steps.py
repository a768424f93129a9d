"""Steps of tensor cores in Python's fractions, and what they are asked with."""

from fractions import Fraction

import numpy as np

from fp8ref.formats import FLOAT16
from fp8ref.sim.quantize import cast


def exponent(value, emin):
    """max(floor(log2 |value|), emin); -126 for a zero."""
    if value == 0:
        return -126
    n = abs(value.numerator).bit_length() - value.denominator.bit_length()
    n -= abs(value) < Fraction(2) ** n
    return max(n + (abs(value) >= Fraction(2) ** (n + 1)), emin)


def cut(value, quantum, how):
    """value as a multiple of the quantum, by a function of a fraction that gives an integer."""
    return how(value / quantum) * quantum


def toward_zero(x):
    return abs(x) // 1 * (1 if x >= 0 else -1)


def floor(x):
    return x // 1


def nearest(x):
    return round(x)  # Python's, to even


def rounded(value, bits, fmt, how):
    found = (
        cut(value, Fraction(2) ** (max(exponent(value, fmt.emin), fmt.emin) - bits), how)
        if value
        else Fraction(0)
    )
    infinity = np.inf if found > 0 else -np.inf
    return infinity if abs(found) >= Fraction(2) ** (fmt.bias + 1) else float(found)


def drawn(rng, count, fmt, k=32):
    """Finite codes of any kind, of few that are not zero, and near 1."""
    any_code = rng.integers(0, 256, (count, k)).astype(np.uint8)
    any_code = np.where(np.isfinite(cast.decode(any_code, fmt)), any_code, 0).astype(np.uint8)
    few = np.where(rng.random((count, k)) < 0.1, any_code, 0).astype(np.uint8)
    near = cast.encode(rng.standard_normal((count, k)).astype(np.float32), fmt)
    return np.choose(rng.integers(0, 3, (count, 1)), [any_code, few, near])


def accumulators(rng, shape, half):
    c = rng.standard_normal(shape) * 2.0 ** (
        rng.integers(-24, 15, shape) if half else rng.integers(-40, 30, shape)
    )
    tiny = rng.standard_normal(shape) * 2.0 ** rng.integers(-149, -90, shape)
    c = np.where(rng.random(shape) < 0.25, 0 if half else tiny, c).astype(np.float32)
    return cast.round_to(np.clip(c, -60000, 60000), FLOAT16) if half else c


def fractions(codes, fmt):
    return [[Fraction(float(v)) for v in row] for row in cast.decode(codes, fmt)]
