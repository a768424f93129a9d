"""An attention function in NumPy with faults that can be planted: FlashAttention-4's tiles, offset
and finish, sums in float64.

It shares no code with the simulator, and does not have every bit of a variant.
"""

import math

import ml_dtypes
import numpy as np

FP8 = ml_dtypes.float8_e4m3fn
F32 = np.float32


def planted(
    *,
    threshold: float = 0.0,
    rounded_denominator: bool = False,
    saturates: bool = True,
    shift: int = 0,
    dropped: int | None = None,
    modulo_heads: bool = False,
    start: bool = False,
    offset: int = 8,
    length: int = 128,
    ascending: bool = False,
    nan_rows: bool = False,
    every_maximum: bool = True,
):
    """fn(q, k, v, causal=False, window=None) -> (o, lse).

    threshold, offset, length, ascending   as ``Variant``.
    rounded_denominator  the sum adds probabilities as they were cast.
    saturates            False: probabilities above 448 become NaN.
    shift                a causal mask's edge, by so many keys.
    dropped              a tile that is left out, counted from the first key.
    modulo_heads         query head j uses head j mod Hkv.
    start                a mask is aligned to the start.
    nan_rows             a query without keys is NaN.
    every_maximum        False: the first tile's maximum is kept forever.
    """

    def quantized(x):
        amax = np.abs(x).max()
        scale = F32(448) / amax if amax else F32(1)
        return (x * scale).astype(FP8).astype(F32), F32(1) / scale

    def head(q, k, v, scale_inv, seen):
        of_v = scale_inv[2]
        factor = F32(1 / math.sqrt(q.shape[1]) * math.log2(math.e)) * F32(
            scale_inv[0] * scale_inv[1]
        )
        m, total, o = np.full(len(q), F32(-np.inf)), np.zeros(len(q)), np.zeros(q.shape)
        tiles = [n for n in range(0, len(k), length) if n // length != dropped]
        for n in tiles if ascending else tiles[::-1]:
            part = slice(n, n + length)
            s = (q.astype(np.float64) @ k[part].T.astype(np.float64)).astype(F32)
            s = np.where(seen[:, part], s, F32(-np.inf))
            new = np.maximum(m, s.max(axis=1))
            with np.errstate(invalid="ignore"):
                lag = np.nan_to_num((new - m) * factor, nan=0.0)
            if not every_maximum:
                lag = np.where(m == -np.inf, lag, 0)
            new = np.where((lag <= threshold) & (m > -np.inf), m, new)
            used = np.where(new == -np.inf, F32(0), new)
            with np.errstate(invalid="ignore"):
                c = np.where(
                    m == -np.inf,
                    0.0,
                    np.exp2(((np.where(m == -np.inf, 0, m) - used) * factor).astype(np.float64)),
                )
            p = np.exp2(((s - used[:, None]) * factor + offset).astype(np.float64)).astype(F32)
            with np.errstate(invalid="ignore", over="ignore"):
                cast = (np.minimum(p, F32(448)) if saturates else p).astype(FP8).astype(np.float64)
            total = total * c + (cast if rounded_denominator else p).sum(axis=1)
            o = o * c[:, None] + cast @ v[part].astype(np.float64)
            m = new
        with np.errstate(invalid="ignore", divide="ignore"):
            found = o / total[:, None] * of_v
            lse = np.where(
                total == 0, -np.inf, m * factor * math.log(2) + np.log(total * 2.0**-offset)
            )
        return np.where((total == 0)[:, None], np.nan if nan_rows else 0, found), lse

    def attend(q, k, v, causal=False, window=None):
        (batch, heads, tq, _), kv, tk = q.shape, k.shape[1], k.shape[2]
        p = np.arange(tq)[:, None] + (0 if start else tk - tq)
        key = np.arange(tk)
        seen = np.ones((tq, tk), bool) if not causal else key <= p + shift
        if window is not None:
            seen &= True if window[0] is None else key >= p - window[0]
            seen &= True if window[1] is None else key <= p + window[1]
        out, lse = np.empty(q.shape, F32), np.empty(q.shape[:3], F32)
        for i in range(batch):
            for g in range(kv):
                mine = [
                    j for j in range(heads) if (j % kv if modulo_heads else j * kv // heads) == g
                ]
                (queries, of_q), (keys, of_k), (values, of_v) = (
                    quantized(q[i, mine]),
                    quantized(k[i, g]),
                    quantized(v[i, g]),
                )
                for at, j in enumerate(mine):
                    out[i, j], lse[i, j] = head(queries[at], keys, values, (of_q, of_k, of_v), seen)
        return out.astype(ml_dtypes.bfloat16).astype(F32), lse

    return attend
