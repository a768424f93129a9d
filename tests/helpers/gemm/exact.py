"""Arithmetic on exact rationals, sharing nothing with the simulator: what the tests trust."""

from fractions import Fraction

import numpy as np


def round_fraction(value: Fraction, *, mantissa_bits: int, emin: int) -> Fraction:
    """value rounded to nearest even among the numbers with this many mantissa bits and smallest
    exponent.
    """
    if value == 0:
        return value
    exponent = emin
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    quantum = Fraction(2) ** (exponent - mantissa_bits)
    return round(value / quantum) * quantum  # Python rounds fractions half to even


def rn32(value: Fraction) -> np.float32:
    """The float32 nearest to value; value lies in its range."""
    sign, magnitude = (-1 if value < 0 else 1), abs(value)
    if magnitude == 0:
        return np.float32(0)
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1, -126)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    quantum = Fraction(2) ** (exponent - 23)
    return np.float32(float(sign * round(magnitude / quantum) * quantum))


def fractions(values: np.ndarray) -> list[Fraction]:
    return [Fraction(float(v)) for v in values]
