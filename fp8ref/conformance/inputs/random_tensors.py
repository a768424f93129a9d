"""Tensors for vectors of quantisers, made of random bits alone, so that every machine makes the same."""

import math

import numpy as np

from fp8ref.conformance.inputs import dtypes

KINDS = ("ordinary", "outliers", "wide", "subnormal", "zeros", "zero lines", "power of two", "huge", "infinity", "NaN")


def made(kind: str, shape: tuple[int, ...], source: dtypes.Source, seed: int) -> np.ndarray:
    """The bits of a tensor of that kind, uint64 of that shape.

    ``ordinary`` numbers have uniform mantissas and exponents that fall off geometrically from 1. Others change some of them: ``outliers``
    2^11 times as large, ``wide`` exponents over half the source's range, ``subnormal`` ones only, ``zeros`` of both signs, every third
    line zero, the largest magnitude a ``power of two``, exponents at the top, an ``infinity`` or a ``NaN`` in one place.
    """
    raw = dtypes.random(seed, 2 * math.prod(shape) + 1)
    fractions, others, place = raw[: math.prod(shape)], raw[math.prod(shape) : -1], int(raw[-1])
    mantissa = fractions & np.uint64((1 << source.mantissa_bits) - 1)
    sign = (fractions >> np.uint64(63)) << np.uint64(source.bits - 1)
    zeros = _leading_zeros(others)
    bias = 1 - source.emin
    field = bias - np.minimum(zeros, 12)
    if kind == "outliers":
        field = np.where(others % np.uint64(97) == 0, bias + 11, field)
    elif kind == "wide":
        field = bias // 2 + (others % np.uint64(bias)).astype(np.int64)
    elif kind == "subnormal":
        field = np.zeros_like(field)
    elif kind == "huge":
        field = 2 * bias - np.minimum(zeros, 2)
    elif kind == "power of two":
        largest = field == field.max()
        mantissa, field = np.where(largest, np.uint64(0), mantissa), field
    elif kind == "zeros":
        mantissa, field = np.zeros_like(mantissa), np.zeros_like(field)
    bits = (sign | field.astype(np.uint64) << np.uint64(source.mantissa_bits) | mantissa).reshape(shape)
    if kind == "zero lines":
        bits[np.indices(shape)[0] % 3 == 0] = 0
    if kind in ("infinity", "NaN"):
        bits.reshape(-1)[place % bits.size] |= np.uint64(source.infinity)
        one = bits.reshape(-1)[place % bits.size]
        quiet = np.uint64(source.infinity | 1 << (source.mantissa_bits - 1))
        bits.reshape(-1)[place % bits.size] = one & np.uint64(source.sign) | (quiet if kind == "NaN" else np.uint64(source.infinity))
    return bits


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    """Of 64 random bits: geometrically distributed, and exactly so on every machine."""
    return 64 - np.frexp((x >> np.uint64(11)).astype(np.float64))[1] - 11
