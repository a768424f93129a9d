"""Sums rounded once (SEMANTICS G-2): a float64 alone does not hold the exact sum of products of e5m2 numbers."""

import numpy as np


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """RN32 of the exact sum over K of finite values of FP8 formats: a [M, K], b [N, K]; float32 [M, N]. A zero sum, and that of K = 0, is +0."""
    parts = _exact_products(a.astype(np.float64), b.astype(np.float64))
    # The parts are multiples of 2^-34 below 2^48 each, so that the error terms, at most 2^-4, add without rounding.
    total, tail = parts[0], np.zeros_like(parts[0])
    for part in parts[1:]:
        total, error = _two_sum(total, part)
        tail += error
    return round_sum(total, tail) + np.float32(0)  # -0 becomes +0


def multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """RN32(x * y + z), rounded once: a fused multiply-add of float32 numbers, whose product float64 holds exactly."""
    with np.errstate(invalid="ignore", over="ignore"):
        product = x.astype(np.float64) * y.astype(np.float64)
        return np.where(np.isfinite(product) & np.isfinite(z), round_sum(product, z.astype(np.float64)), (product + z).astype(np.float32))


def round_sum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """RN32(x + y) of finite float64 numbers: their sum rounded to odd in float64, then to float32.

    A float64 rounded to odd rounds to float32 as the exact sum does (Boldo and Melquiond, "Emulation of FMA and correctly
    rounded sums: proved algorithms using rounding to odd", 2008).
    """
    total, tail = _two_sum(x, y)
    bits = total.view(np.int64)
    even = (tail != 0) & (bits % 2 == 0)
    outward = np.where(np.signbit(tail) == np.signbit(total), 1, -1)
    with np.errstate(over="ignore", under="ignore"):
        return (bits + even * outward).view(np.float64).astype(np.float32)


def _exact_products(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """Float64 [M, N] arrays whose exact sum is a @ b.T.

    Numbers of magnitude at least 1 are multiples of 2^-3 below 2^16, the others multiples of 2^-17: at most 19 bits either
    way. Products of such parts have at most 38 bits and share one quantum, and so do sums of 2^15 of them: 53 bits, which a
    float64 matrix product adds in any order without rounding. (E4M3 and E5M2 in all variants: F-2, F-3.)
    """
    chunks = range(0, a.shape[1], 1 << 15)
    parts = [
        left @ right.T  # [M, k] x [N, k] -> [M, N]
        for k in chunks
        for left in _by_magnitude(a[:, k : k + (1 << 15)])
        for right in _by_magnitude(b[:, k : k + (1 << 15)])
    ]
    return parts or [np.zeros((len(a), len(b)))]


def _by_magnitude(x: np.ndarray) -> list[np.ndarray]:
    """Arrays that sum to x: its numbers of magnitude at least 1, and the others; whichever has any."""
    large = np.where(abs(x) >= 1, x, 0)
    return [part for part in (large, x - large) if part.any()]


def _two_sum(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(RN64(x + y), x + y - RN64(x + y)), both exact (Knuth)."""
    total = x + y
    back = total - x
    return total, (x - (total - back)) + (y - back)
