"""Quantize q, k and v as SageAttention does: q and k in INT8, k less its mean over the tokens, v by feature (spec A-26).

Tensors are [batch, heads, tokens, features], and are rounded to bfloat16 first.
"""

import numpy as np

from fp8ref.formats import BFLOAT16, Format
from fp8ref.sim import cast
from fp8ref.sim.head_scaling import KEYS, THREADS, Heads, padded, spread

LARGEST = 127
"""The largest magnitude of an INT8 code."""

SMALLEST = np.float32(1e-7)
"""What is added to a scale_inv, so that none is zero."""

_ZERO = np.float32(2.0**-100)
"""An amax of v below it has scale 1."""


def quantize(q: np.ndarray, k: np.ndarray, v: np.ndarray, fmt: Format) -> dict[str, Heads]:
    """q, k and v by role; fmt is v's.

    Shapes:   q [B, H, Tq, D], k and v [B, Hkv, Tk, D], float32. Codes of q and k are int8; scale_inv of q is [B, H, 8 ceil(Tq / 16), 1],
              of k [B, Hkv, 4 ceil(Tk / 128), 1], of v [B, Hkv, 1, D].
    Raises:   ValueError: k less its mean leaves bfloat16's range.
    """
    q, k, v = (cast.round_to(x, BFLOAT16) for x in (q, k, v))
    with np.errstate(over="ignore", invalid="ignore"):
        k = cast.round_to(k - mean(k), BFLOAT16)
    if not np.isfinite(k).all():
        raise ValueError("k less its mean over the tokens leaves bfloat16's range. Scale k down.")
    b, h, _, d = q.shape
    of_q = padded(q, THREADS).reshape(b, h, -1, 2, 8, d)
    amax_q = np.abs(of_q).max(axis=(3, 5)).reshape(b, h, -1, 1)
    b, h, _, d = k.shape
    of_k = padded(k, KEYS).reshape(b, h, -1, KEYS // 8, 4, 2, d)
    amax_k = np.abs(of_k).max(axis=(3, 5, 6)).reshape(b, h, -1, 1)
    return {"q": _int8(q, amax_q), "k": _int8(k, amax_k), "v": _by_feature(v, fmt)}


def mean(k: np.ndarray) -> np.ndarray:
    """The mean of k over its tokens, in bfloat16: float32 [B, Hkv, 1, D].

    Order:    zeros up to a power of two of tokens; the halves are added, until one is left; times RN32(1 / T); to bfloat16.
    """
    k = cast.round_to(k, BFLOAT16)
    total = padded(k, 1 << (k.shape[2] - 1).bit_length())
    with np.errstate(over="ignore", invalid="ignore"):
        while total.shape[2] > 1:
            half = total.shape[2] // 2
            total = total[:, :, :half] + total[:, :, half:]
        return cast.round_to(total * (np.float32(1) / np.float32(k.shape[2])), BFLOAT16)


def taken(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """What smoothing takes from the scores of a row, before the softmax scale: float32 [B, H, Tq].

    Order:    products of q and the mean of k, features ascending, each addition rounded; to bfloat16.
    """
    q, of_k = cast.round_to(q, BFLOAT16), mean(k)
    products = q * np.repeat(of_k, q.shape[1] // of_k.shape[1], axis=1)  # exact: bfloat16 times bfloat16
    total = np.zeros(q.shape[:3], np.float32)
    for n in range(q.shape[3]):
        total = total + products[..., n]
    return cast.round_to(total, BFLOAT16)


def _int8(x: np.ndarray, amax: np.ndarray) -> Heads:
    """INT8 codes of x: RN32(x / scale_inv), half of one added away from zero, rounded, and cut off."""
    scale_inv = amax / np.float32(LARGEST) + SMALLEST
    quotient = x / spread(scale_inv, x.shape, "int8_thread")
    values = np.trunc(quotient + np.where(quotient >= 0, np.float32(0.5), np.float32(-0.5)))
    return Heads(values, values.astype(np.int8), amax, np.float32(1) / scale_inv, scale_inv)


def _by_feature(v: np.ndarray, fmt: Format) -> Heads:
    amax = np.abs(v).max(axis=2, keepdims=True)
    small, largest = amax < _ZERO, np.float32(fmt.max)
    safe = np.where(small, largest, amax)
    scale, scale_inv = largest / safe, safe / largest
    codes = cast.encode(v * scale, fmt)
    return Heads(cast.decode(codes, fmt), codes, amax, scale, scale_inv)
