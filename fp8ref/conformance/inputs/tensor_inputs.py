"""Whole tensors as inputs of quantizers, each filled by a named pattern.

``filled`` makes test vectors for any language. ``samples`` makes what the backends are compared on.
"""

import math

import numpy as np

from fp8ref.conformance.inputs import dtypes
from fp8ref.formats import BFLOAT16
from fp8ref.sim import cast

PATTERNS = ("ordinary", "outliers", "wide", "subnormal", "zeros", "zero lines", "power of two", "huge", "infinity", "NaN")
"""The patterns of ``filled``."""


def filled(pattern: str, shape: tuple[int, ...], source: dtypes.Source, seed: int) -> np.ndarray:
    """The bits of a tensor that has one of PATTERNS, uint64 of that shape; made of random bits
    alone, so the same on every machine.

    ``ordinary`` numbers have uniform mantissas, and exponents that fall off geometrically from 1.
    The other patterns change some of them:
    ``outliers``      a few are 2^11 times as large.
    ``wide``          exponents cover half the source's range.
    ``subnormal``     all are.
    ``zeros``         all are, of both signs.
    ``zero lines``    every third line is zero.
    ``power of two``  the largest magnitude is one.
    ``huge``          exponents are at the top of the range.
    ``infinity``      one element is, or with ``NaN`` is NaN.
    """
    # two words an element, for its sign and mantissa and for its exponent, and one for a place
    raw = dtypes.random(seed, 2 * math.prod(shape) + 1)
    fractions, others, place = raw[: math.prod(shape)], raw[math.prod(shape) : -1], int(raw[-1])
    mantissa = fractions & np.uint64((1 << source.mantissa_bits) - 1)
    sign = (fractions >> np.uint64(63)) << np.uint64(source.bits - 1)
    zeros = _leading_zeros(others)
    bias = 1 - source.emin
    field = bias - np.minimum(zeros, 12)
    if pattern == "outliers":
        field = np.where(others % np.uint64(97) == 0, bias + 11, field)
    elif pattern == "wide":
        field = bias // 2 + (others % np.uint64(bias)).astype(np.int64)
    elif pattern == "subnormal":
        field = np.zeros_like(field)
    elif pattern == "huge":
        field = 2 * bias - np.minimum(zeros, 2)
    elif pattern == "power of two":
        largest = field == field.max()
        mantissa, field = np.where(largest, np.uint64(0), mantissa), field
    elif pattern == "zeros":
        mantissa, field = np.zeros_like(mantissa), np.zeros_like(field)
    bits = (sign | field.astype(np.uint64) << np.uint64(source.mantissa_bits) | mantissa).reshape(shape)
    if pattern == "zero lines":
        bits[np.indices(shape)[0] % 3 == 0] = 0
    if pattern in ("infinity", "NaN"):
        special = source.infinity | (1 << (source.mantissa_bits - 1) if pattern == "NaN" else 0)
        flat, at = bits.reshape(-1), place % bits.size
        flat[at] = flat[at] & np.uint64(source.sign) | np.uint64(special)
    return bits


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    """Of 64 random bits: geometrically distributed.

    By frexp of 53 bits, which is exact, where log2 would differ between machines.
    """
    return 64 - np.frexp((x >> np.uint64(11)).astype(np.float64))[1] - 11


def samples(seed: int = 0) -> dict[str, np.ndarray]:
    """A tensor of each pattern that training rarely shows, by its name: float32 [48, 128], every
    value a bfloat16 too.
    """
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((48, 128))
    cases = {
        "normal": normal,
        "outlier": np.where(rng.random(normal.shape) < 0.002, normal * 1e4, normal),
        "wide": normal * 2.0 ** rng.integers(-60, 60, normal.shape),
        "tiny": normal * 1e-13,
        "subnormal": normal * 1e-39,
        "zero": np.zeros_like(normal),
        "zero_rows": np.where(np.arange(48)[:, None] % 3 == 0, 0, normal),
        "negative_zero": np.where(normal > 0, -0.0, normal),
        "inf": np.where(np.arange(normal.size).reshape(normal.shape) == 1234, -np.inf, normal),
        "nan": np.where(np.arange(normal.size).reshape(normal.shape) == 77, np.nan, normal),
        "huge": normal * 1e38 / np.abs(normal).max(),
    }
    with np.errstate(under="ignore"):
        return {name: cast.round_to(value, BFLOAT16) for name, value in cases.items()}
