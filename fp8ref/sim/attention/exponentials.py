"""Exponentials, logarithms and tanh of float32 numbers, rounded correctly (spec A-5, A-11, A-22).

``exp_plain``, ``exp2_plain``, ``tanh_plain``, ``log``, ``log2`` and ``tanh`` take their digits from
the standard library's ``decimal``. The compiled twins of the first two, in ``kernels.attention``,
add a table and a polynomial in two float64 numbers.
"""

import decimal
from collections.abc import Callable

import numpy as np

from fp8ref.sim.kernels import attention as kernels

_CONTEXT = decimal.Context(prec=60)
_LN2 = _CONTEXT.ln(decimal.Decimal(2))
_TINY = decimal.Decimal(2) ** -150


def exp2(x) -> np.ndarray:
    """RN32(2^x), float32 below 128 of any shape; 0 of -infinity."""
    return _compiled(x, True)


def exp(x) -> np.ndarray:
    """RN32(e^x), float32 below 88 of any shape; 0 of -infinity."""
    return _compiled(x, False)


def exp2_plain(x) -> np.ndarray:
    """The definition of ``exp2``."""
    return _each(x, lambda v: _exact_exp(_CONTEXT.multiply(decimal.Decimal(v), _LN2)))


def exp_plain(x) -> np.ndarray:
    """The definition of ``exp``."""
    return _each(x, lambda v: _exact_exp(decimal.Decimal(v)))


def log(x) -> np.ndarray:
    """RN32(ln x) of float32 numbers that are not negative; -infinity of 0."""
    return _sure(x, np.log, lambda v: _CONTEXT.ln(decimal.Decimal(v)))


def log2(x) -> np.ndarray:
    """RN32(log2 x) of float32 numbers that are not negative; -infinity of 0."""
    return _sure(x, np.log2, lambda v: _CONTEXT.divide(_CONTEXT.ln(decimal.Decimal(v)), _LN2))


def tanh(x) -> np.ndarray:
    """RN32(tanh x), float32 of any shape, finite; a zero keeps its sign."""
    return _sure(x, np.tanh, _exact_tanh)


def tanh_plain(x) -> np.ndarray:
    """The definition of ``tanh``."""
    return _each(x, _exact_tanh)


def _exact_exp(v: decimal.Decimal) -> decimal.Decimal:
    return _CONTEXT.exp(v) if v > -130 else decimal.Decimal(0)  # below it rounded to 0


def _exact_tanh(v: float) -> decimal.Decimal:
    if abs(v) < 2.0**-20:  # two terms of the series: the next is below 2^-80 of the first
        x = decimal.Decimal(v)
        return _CONTEXT.subtract(x, _CONTEXT.divide(_CONTEXT.power(x, 3), 3))
    # beyond 40 it is 1 in any rounding
    square = _CONTEXT.exp(_CONTEXT.multiply(decimal.Decimal(max(-40.0, min(v, 40.0))), 2))
    return _CONTEXT.divide(_CONTEXT.subtract(square, 1), _CONTEXT.add(square, 1))


def _compiled(x, two: bool) -> np.ndarray:
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty(x.size, np.float32)
    kernels.exponentials(x.reshape(-1), two, out)
    return out.reshape(x.shape)


def _sure(x, float64_function: Callable, exactly: Callable) -> np.ndarray:
    """The float64 function rounded; the exact one where an error of 2^-50 could change it."""
    x = np.asarray(x, np.float32)
    with np.errstate(divide="ignore"):
        near = np.asarray(float64_function(x.astype(np.float64)))
    with np.errstate(invalid="ignore"):
        bounds = near * (1 - 2.0**-50), near * (1 + 2.0**-50)
        below, above = (bound.astype(np.float32) for bound in bounds)
    out = np.where(below == above, below, np.float32(0))
    unsure = np.asarray(below != above)
    out[unsure] = _each(x[unsure], exactly)
    return out


def _each(x, exactly: Callable[[float], decimal.Decimal]) -> np.ndarray:
    x = np.asarray(x, np.float32)
    return np.array([_round(exactly(float(v))) for v in x.reshape(-1)], np.float32).reshape(x.shape)


def _round(value: decimal.Decimal) -> np.float32:
    """The float32 nearest to a decimal, of three neighbors; ties to even."""
    if abs(value) <= _TINY:
        return np.float32(0)
    near = np.float32(float(value))
    below, above = (np.nextafter(near, np.float32(end)) for end in (-np.inf, np.inf))

    def distance(v: np.float32) -> tuple[decimal.Decimal, int]:
        return abs(decimal.Decimal(float(v)) - value), int(v.view(np.uint32)) & 1

    return min((below, near, above), key=distance)
