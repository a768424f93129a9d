"""The arithmetic that the exhibits share: bits of float32, casts of ml_dtypes, and spacings."""

import ml_dtypes
import numpy as np

F = np.float32
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
E4M3FNUZ, E2M1 = ml_dtypes.float8_e4m3fnuz, ml_dtypes.float4_e2m1fn

FIELDS = {E4M3: (-6, 3), E5M2: (-14, 2), E4M3FNUZ: (-7, 3), E2M1: (0, 1)}
"""The exponent of the smallest normal number, and the mantissa's bits."""


def bits(x):
    """The bits of float32 numbers, uint32."""
    return np.asarray(x, F).view(np.uint32)


def number(u):
    """The float32 numbers of bits."""
    return np.asarray(u).astype(np.uint32).view(F)


def saturated(x, dtype=E4M3):
    """The cast that clips to the largest number; NaN stays."""
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(dtype)


def codes(x, dtype=E4M3):
    """The codes of ``saturated``, uint8."""
    return saturated(x, dtype).view(np.uint8)


def decoded(c, dtype=E4M3):
    """The float32 numbers of uint8 codes."""
    return np.asarray(c, np.uint8).view(dtype).astype(F)


def e8m0(c):
    """The float32 numbers of codes of e8m0: powers of two, and NaN of code 255."""
    return np.asarray(c, np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(F)


def through(x, dtype):
    """Numbers rounded to another dtype, in float32."""
    return np.asarray(x).astype(dtype).astype(F)


def bf16(x):
    """Numbers rounded to bfloat16, in float32."""
    return through(x, ml_dtypes.bfloat16)


def exponent(x):
    """The exponent of the power of two at or below |x|; 0 of zeros, infinities and NaNs."""
    magnitude = np.abs(np.asarray(x, np.float64))
    _, e = np.frexp(np.where(np.isfinite(magnitude) & (magnitude > 0), magnitude, 1.0))
    return e - 1


def spacing(x, dtype, *, normal=False):
    """The distance of the numbers of a format around x; with ``normal`` as if none were
    subnormal."""
    smallest, mantissa = FIELDS[dtype]
    e = exponent(x)
    return np.ldexp(1.0, (e if normal else np.maximum(e, smallest)) - mantissa)


def ceil_power(x):
    """The power of two at or above positive normal float32 numbers."""
    return number((bits(x) + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000))


def row_amax(x):
    """The largest magnitude of each row, [M, 1]."""
    return np.abs(np.asarray(x, F)).max(axis=-1, keepdims=True)


def blocks(x, size):
    """x [M, K] as [M, K / size, size]."""
    return x.reshape(len(x), -1, size)


def e8m0_up(x):
    """The codes of the powers of two at or above x: at most 2^127, at least 2^-127; 255 of NaN."""
    u = bits(x)
    e, fraction = u >> 23 & 255, u & 0x7FFFFF
    up = (fraction > 0) & (e < 254) & ~((e == 0) & (fraction <= 0x400000))
    return np.where(np.isnan(x), 255, np.minimum(e + up, 254)).astype(np.uint8)
