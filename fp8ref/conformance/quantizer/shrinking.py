"""Shrinking: the numbers to try in place of one that shows a fault, the most ordinary first."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

_MAGNITUDES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_EXPONENTS = (0, *(sign * n for n in _MAGNITUDES for sign in (1, -1)))


def numbers(largest: float) -> Iterator[np.float32]:
    """Finite numbers like largest, a finite number: its mantissa cut, or rounded up, to each count
    of bits, times powers of two.

    >>> [float(x) for x in itertools.islice(numbers(-1.3e-30), 6)]
    [-1.0, -2.0, -1.5, -2.0, -2.0, -4.0]
    """
    fraction, own = np.frexp(largest)
    mantissa = float(fraction) * 2
    for bits, exponent in sorted(
        itertools.product(range(24), (*_EXPONENTS, int(own) - 1)), key=lambda pair: _oddity(*pair)
    ):
        unit = 2.0**-bits
        ends = {np.floor(mantissa / unit) * unit, np.ceil(mantissa / unit) * unit}
        for m in sorted(ends, key=abs):
            with np.errstate(over="ignore", under="ignore"):
                number = np.float32(m * 2.0**exponent)
            if np.isfinite(number) and number != 0:
                yield number


def _oddity(bits: int, exponent: int) -> float:
    """How odd a number of so many mantissa bits is: two bits count as a doubled exponent.

    >>> _oddity(1, 0) < _oddity(0, -30), _oddity(2, 1) < _oddity(9, 0)
    (True, True)
    """
    return bits + 2 * math.log2(1 + abs(exponent))
