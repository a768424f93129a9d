"""Attention in FP8 as a textbook has it: one head, one scale a tensor (spec A-2 to A-11).

``attention.forward`` computes every variant, on several threads; of ``cudnn`` it has these bits.
"""

import math

import numpy as np

from fp8ref.formats import E4M3FN
from fp8ref.sim.attention.exponentials import exp, log
from fp8ref.sim.gemm.accumulate import exact_sum
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scales import scale_inv_from_scale, scales_from_amax

__all__ = ["attention_plain"]

_POLICY = "te_current"
_TILE = 128  # keys


def attention_plain(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(q k^T / sqrt(D)) v in e4m3, and the log-sum-exp of each row.

    Shapes:   q [Tq, D]; k and v [Tk, D]; visible bool [Tq, Tk]; o [Tq, D] and lse [Tq], float32.
    Order:    every operation is rounded once to float32, in the order of the lines below; sums of
              products are exact, then rounded.
    Specials: a row that sees no key gives 0, and -infinity as its lse.
    Source:   spec A-2 to A-11, variant cudnn, with an output in float32.
    """
    scale = np.float32(1 / math.sqrt(q.shape[1]))
    (q, q_inv), (k, k_inv), (v, v_inv) = map(_quantized, (q, k, v))
    p_scale = scales_from_amax(np.float32(1), E4M3FN, _POLICY).scale  # no probability exceeds 1
    p_inv = scale_inv_from_scale(np.asarray(p_scale))

    o = np.zeros((len(q), v.shape[1]), np.float32)
    maximum = np.full(len(q), -np.inf, np.float32)
    total = np.zeros(len(q), np.float32)
    for begin in range(0, len(k), _TILE):
        tile = slice(begin, begin + _TILE)
        s = exact_sum(q, k[tile]) * scale * q_inv * k_inv  # [Tq, D] x [tile, D] -> [Tq, tile]
        s = np.where(visible[:, tile], s, np.float32(-np.inf))
        new = np.maximum(maximum, s.max(axis=1))
        base = np.where(new == -np.inf, np.float32(0), new)  # a row that has seen no key yet
        p = exp(s - base[:, None])
        factor = exp(maximum - base)  # of what came before: its probabilities were under maximum
        maximum = new
        total = total * factor + _in_order(p)
        p = cast.round_to(p * p_scale, E4M3FN)
        o = o * factor[:, None]
        o = o + exact_sum(p, v[tile].T) * v_inv * p_inv  # [Tq, tile] x [D, tile] -> [Tq, D]
    lse = np.where(total == 0, np.float32(-np.inf), base + log(np.where(total == 0, 1, total)))
    return o / np.maximum(total, np.float32(1))[:, None], lse


def _quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values in e4m3, scale_inv) of a tensor with one scale."""
    quantized = scaling.quantize(x, E4M3FN, granularity="tensorwise", policy=_POLICY)
    return cast.decode(quantized.codes, E4M3FN), quantized.scale_inv


def _in_order(p: np.ndarray) -> np.ndarray:
    """The sum of each row in float32, a column after another."""
    sums = np.zeros(len(p), np.float32)
    for column in p.T:
        sums = sums + column
    return sums
