"""Attention sinks: a learned logit a query head, in every row's sum, without a value (A-23)."""

import math

import numpy as np

from fp8ref.sim.attention import exponentials
from fp8ref.spec.attention.variants import Variant

FAR = np.float32(64)
"""A sink so far above a row's maximum, in units of the exponent, leaves nothing of its keys."""

_LOG2E = np.float32(math.log2(math.e))


def add(
    o: np.ndarray,
    total: np.ndarray,
    maximum: np.ndarray,
    sink: np.float32,
    variant: Variant,
    factor: np.float32,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(o, sums, maxima) of rows after the sink joined, each new; before the end (A-10).

    factor    of raw scores (A-5); 1 of scaled ones.
    Shapes:   o [rows, D], sums and maxima [rows].
    Order:    A-23.
    """
    two = variant.base == "2"
    z = np.float32(sink * _LOG2E) if two else sink
    with np.errstate(invalid="ignore"):
        ahead = z - np.where(maximum == -np.inf, maximum, maximum * factor)
    far = ahead > FAR
    x = np.where(far, np.float32(0), ahead) + np.float32(variant.offset)
    p = (exponentials.exp2 if two else exponentials.exp)(x)
    at = np.float32(sink * np.float32(_LOG2E / factor)) if variant.scores == "raw" else z
    total = np.where(far, np.float32(2.0**variant.offset), total + p)
    return np.where(far[:, None], np.float32(0), o), total, np.where(far, at, maximum)


def gradient(d: np.ndarray, lse: np.ndarray, sinks: np.ndarray) -> np.ndarray:
    """The gradient of the sinks, float32 [H].

    Shapes:   d [B, H, Tq], the row sums D of A-15, and lse of its shape, float32; sinks [H].
    Order:    P = RN32(e^RN32(sink - lse)); minus the exact sum of RN32(P D), rounded to float64,
              then to float32.
    """
    p = exponentials.exp(sinks[None, :, None] - lse)
    return np.array(
        [-math.fsum((p[:, j] * d[:, j]).ravel().tolist()) for j in range(len(sinks))], np.float32
    )
