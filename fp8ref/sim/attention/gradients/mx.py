"""The backward pass of attention whose operands have MX blocks (spec A-16).

A block lies along the axis that a product sums over, so that q, k, do and dS have two copies: along
the features or keys, and along the tokens. v has the forward pass's copy alone.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from fp8ref.formats import Format
from fp8ref.sim import threads
from fp8ref.sim.attention import attention, exponentials
from fp8ref.sim.attention.operands import heads as head_scaling
from fp8ref.sim.attention.operands import inputs as inputs
from fp8ref.sim.attention.operands.heads import Heads
from fp8ref.sim.attention.operands.inputs import Problem
from fp8ref.sim.attention.operands.operands import Parts, scaled_product
from fp8ref.sim.gemm import accumulate as sums
from fp8ref.sim.gemm.accumulate import multiply_add
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.variant import MX

_LOG2E = np.float32(math.log2(math.e))

P_SCALE = np.float32(256)
"""What P is multiplied by before its cast."""


class Raw(NamedTuple):
    """Unrounded gradients float32, the largest |dS|, how many elements of P were clipped, D of each
    row [B, H, Tq], how many elements of dS were lost, and do quantized along its features."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    largest: np.float32
    clipped: int
    d: np.ndarray
    lost: int
    do: Heads


def gradients(
    problem: Problem, parts: Parts, do: np.ndarray, o: np.ndarray, lse: np.ndarray
) -> Raw:
    """The gradients before they are rounded to the output's format.

    Shapes:   do and o [B, H, Tq, D], lse [B, H, Tq], float32; see ``Raw``.
    Order:    A-16, a head at a time; sums over the heads of a group ascending.
    """
    variant = problem.variant
    fmt, policy = variant.format_of("ds"), variant.policy
    quantized = functools.partial(
        head_scaling.quantize, granularity="mx_1x32", policy=policy, heads=problem.k.shape[1]
    )
    q8 = quantized(problem.q, variant.fmt, along_tokens=True)
    k8 = quantized(problem.k, variant.fmt, along_tokens=True)
    do8 = quantized(do, fmt, along_tokens=True)
    v, tensor = parts.tensors["v"], quantized(do, fmt)
    v = v.values * head_scaling.spread(v.scale_inv, problem.v.shape, "mx_1x32", along_tokens=True)
    do_values = tensor.values * head_scaling.spread(tensor.scale_inv, do.shape, "mx_1x32")
    (b, h), dq = do.shape[:2], np.zeros(problem.q.shape, np.float32)
    dk, dv = by_head(problem.k, h), by_head(problem.v, h)
    largest, row_sums = np.zeros((b, h), np.float32), np.zeros(do.shape[:3], np.float32)
    clipped, zeros = np.zeros((2, b, h), np.int64)
    formats = fmt, variant.fmt

    def differentiate_head(i: int, j: int, g: int) -> None:
        row_sums[i, j] = d = sums_of_rows(cast.round_to(do[i, j], variant.out), o[i, j])
        p, slope = probabilities(parts, i, j, lse[i, j])
        p8, clipped[i, j], _ = attention.round_probabilities(p, P_SCALE, variant.fmt)
        ones = np.full((p.shape[1], -(-p.shape[0] // MX)), np.float32(1) / P_SCALE)
        do_tokens = do8.values[i, j].T, do8.scale_inv[i, j].T
        dv[i, j] = scaled_product(p8.T, ones, *do_tokens, formats[::-1])
        ds = (sums.f32(do_values[i, j], v[i, g]) - d[:, None]) * p * slope * problem.scale
        largest[i, j] = np.abs(ds).max()
        along_keys, along_queries = _both(ds, fmt, policy)
        zeros[i, j] = attention.count_lost(ds, along_keys.values[0, 0], fmt)
        keys = along_keys.values[0, 0], along_keys.scale_inv[0, 0]
        dq[i, j] = scaled_product(*keys, k8.values[i, g].T, k8.scale_inv[i, g].T, formats)
        queries = along_queries.values[0, 0].T, along_queries.scale_inv[0, 0].T
        dk[i, j] = scaled_product(*queries, q8.values[i, j].T, q8.scale_inv[i, j].T, formats)

    threads.each(differentiate_head, heads_of(problem))
    dk, dv = over_heads(dk, problem), over_heads(dv, problem)
    counts = int(clipped.sum()), row_sums, int(zeros.sum())
    return Raw(dq, dk, dv, largest.max(), *counts, tensor)


def heads_of(problem: Problem) -> list[tuple[int, int, int]]:
    """(sequence, query head, head of keys), in order."""
    b, h = problem.q.shape[:2]
    return [(i, j, j // problem.group) for i in range(b) for j in range(h)]


def by_head(x: np.ndarray, heads: int, dtype: type = np.float32) -> np.ndarray:
    """Zeros [B, H, Tk, D]: what each query head adds to a gradient of the shape of x."""
    return np.zeros((len(x), heads, *x.shape[2:]), dtype)


def over_heads(x: np.ndarray, problem: Problem) -> np.ndarray:
    """The ascending sum over a key head's query heads: [B, H, Tk, D] -> [B, Hkv, Tk, D]."""
    parts = x.reshape(len(x), -1, problem.group, *x.shape[2:])
    total = np.zeros_like(parts[:, :, 0])
    for n in range(problem.group):
        total += parts[:, :, n]
    return total


def sums_of_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of products over the last axis, ascending, each addition rounded: float32 [rows]."""
    total = np.zeros(len(a), np.float32)
    for x, y in zip(a.T, b.T, strict=True):
        total = total + x * y
    return total


def _both(ds: np.ndarray, fmt: Format, policy: str) -> tuple[Heads, Heads]:
    """dS of a head [Tq, Tk] with blocks along keys and with blocks along queries."""
    tk = ds.shape[1]
    wide = np.pad(ds, ((0, 0), (0, -tk % MX)))[None, None]
    keys = head_scaling.quantize(wide, fmt, "mx_1x32", policy, heads=1)
    queries = head_scaling.quantize(
        ds[None, None], fmt, "mx_1x32", policy, heads=1, along_tokens=True
    )
    return keys._replace(values=keys.values[..., :tk]), queries


def probabilities(parts: Parts, i: int, j: int, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P of one head from the LSE, float32 [Tq, Tk]; the softcap's factor of dS, or 1."""
    problem, unit = parts.problem, np.float32(1)
    tq, tk = problem.q.shape[2], problem.k.shape[2]
    s = parts.scores(i, j, slice(0, tq), 0, tk)[:, :tk]  # hyperbolic tangents under a softcap
    slope = np.asarray(unit) if parts.cap is None else unit - s * s
    factors, factor = parts.factors(i, j, 0, 0)
    lse = np.where(lse == -np.inf, np.float32(0), lse)  # such a row sees no key
    if parts.variant.scores == "raw":
        bias = np.broadcast_to(-(lse * _LOG2E)[:, None], s.shape)
        x, exponential = multiply_add(s, np.broadcast_to(factor, s.shape), bias), exponentials.exp2
    else:
        for multiplier in factors:
            s = s * multiplier
        x, exponential = s - lse[:, None], exponentials.exp
    seen = inputs.allowed(problem, i)
    return exponential(np.where(seen, x, np.float32(-np.inf))), slope
