"""FP8 attention, forward: softmax(q k^T scale) v (spec A), computed tile by tile over the keys.

    result = attention.forward(q, k, v, variant="fa3", mask=Mask(causal=True))

A row of queries meets the tiles in the variant's order: scores by a GEMM of section G, the online
softmax (``softmax``), the cast of probabilities, and their product with v (``probability_value``).
Rows do not affect each other, except through scales. ``gradients`` is the backward pass.
"""

import math
from typing import NamedTuple

import numpy as np

from fp8ref.formats import Format
from fp8ref.sim import threads
from fp8ref.sim.attention import exponentials, softmax
from fp8ref.sim.attention import sinks as attention_sinks
from fp8ref.sim.attention.operands import heads
from fp8ref.sim.attention.operands import inputs as inputs
from fp8ref.sim.attention.operands import operands as operands
from fp8ref.sim.attention.operands.heads import Heads
from fp8ref.sim.attention.operands.inputs import Problem
from fp8ref.sim.attention.operands.operands import Parts
from fp8ref.sim.attention.probability_value import Product
from fp8ref.sim.gemm.accumulate import multiply_add
from fp8ref.sim.kernels import attention as kernels
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec.attention import variants as attention
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variant import ROWS
from fp8ref.spec.attention.variants import Mask, Variant

_LN2 = np.float32(math.log(2))

_ROWS = 256
"""Queries that meet the tiles together: a tile's operands are laid out once for them.

Not those of two scales (``ROWS``).
"""


class Result(NamedTuple):
    """What a forward pass gives.

    o              float32 [B, H, Tq, D]: values of the output's format, times its scale_inv in FP8.
    lse            float32 [B, H, Tq]: ln of the sum of e^score; -infinity of a row without keys.
    tensors        the quantized q, k and v, and an FP8 output o, by role.
    amaxes         of q, k, v by their groups; of s, the unrounded probabilities; of o, unrounded.
    saturated      probabilities that the cast clipped: a fault of the variant (A-8).
    lost           probabilities of at least 2^-126 that the cast made 0.
    p_codes        uint8 [B, H, Tq, Tk]: the probabilities as they were cast, each under the maximum
                   of its own tile; None unless asked for.
    scale_p        what probabilities were multiplied by before their cast.
    scale_inv_p    what their codes are multiplied by.
    scores         float32 [B, H, Tq, Tk]: with all factors, under the variant's base, -infinity of
                   a key that is not seen; None unless asked for.
    documents      of queries and of keys, and ``sinks``: what the backward pass needs of them.
    """

    o: np.ndarray
    lse: np.ndarray
    tensors: dict[str, Heads]
    amaxes: dict[str, np.ndarray]
    saturated: int
    p_codes: np.ndarray | None
    scale_p: np.float32
    scale_inv_p: np.float32
    scores: np.ndarray | None = None
    lost: int = 0
    documents: tuple[np.ndarray, np.ndarray] | None = None
    sinks: np.ndarray | None = None


def forward(
    q,
    k,
    v,
    *,
    variant: str | Variant | Call,
    mask: Mask | None = None,
    documents=None,
    scales=None,
    sinks=None,
) -> Result:
    """softmax(q k^T scale) v by a variant.

    variant      a name or a Variant; or a Call, which also has the softmax scale, a softcap, the
                 layout, and what is returned. Its arithmetic is the stated one here.
    documents    integers [B, T], or a pair of them for queries and keys: a query sees its own
                 document. A token whose document is negative is padding: it is not read, and its
                 output is 0.
    scales       {role: scale} of roles q, k, v, s, o, float32 of ``Heads``' shapes: delayed
                 scaling. The others come from the tensors themselves; that of s from the amax 1.
    sinks        [H], of a dtype of q's: a logit of each query head, which joins the sum of a row
                 and has no value.
    Shapes:   q [B, H, Tq, D], k and v [B, Hkv, Tk, D], Hkv dividing H; float32, float16 or
              bfloat16. See ``Result``.
    Order:    the tiles' own (A-6); in a tile A-4 to A-9; at the end A-10 and A-11.
    Specials: a row that sees no key is 0, its lse -infinity, or its sink. Masked keys have
    probability 0.
    Raises:   ValueError: an unknown variant; shapes, dtypes or documents that do not fit; NaN or
              infinities; scales for roles without one; features that the variant does not take; a
              softcap that is not positive; sinks of another shape; a mask beside a Call.
    Source:   spec A-1 to A-13, A-22, A-23; next to each of VARIANTS.
    """
    call = Call.resolve(variant, mask)
    problem = inputs.prepare(q, k, v, call, documents, sinks)
    role_scales = attention.check_scales(scales, call.variant, attention.ROLES)
    result = _real(problem) if call.variant.real else _run(problem, role_scales)
    return result._replace(
        o=attention.in_layout(call.layout, result.o),
        documents=(problem.q_documents, problem.k_documents),
        sinks=problem.sinks,
    )


def _run(problem: Problem, role_scales: dict) -> Result:
    variant = problem.variant
    tensors = operands.quantize(problem, role_scales)
    p_scale, p_scale_inv = operands.probability_scale(variant, role_scales)
    b, h, tq, d = problem.q.shape
    tk = problem.k.shape[2]
    out, lse = np.zeros((b, h, tq, d), np.float32), np.empty((b, h, tq), np.float32)
    codes = np.zeros((b, h, tq, tk), np.uint8) if problem.call.keep_p else None
    kept_scores = np.full((b, h, tq, tk), -np.inf, np.float32) if problem.call.keep_s else None
    block = ROWS if variant.granularity == "rows_128" else _ROWS
    jobs = [(i, j, r) for i in range(b) for j in range(h) for r in range(0, tq, block)]
    largest, (clipped, lost) = np.zeros(len(jobs), np.float32), np.zeros((2, len(jobs)), np.int64)
    parts = Parts(problem, tensors)

    def work(begin: int, end: int) -> None:
        with threads.using(1):  # the jobs are the threads' work
            for n in range(begin, end):
                i, j, r = jobs[n]
                rows = slice(r, min(r + block, tq))
                kept = None if codes is None else codes[i, j, rows]
                result = _rows(parts, i, j, rows, (p_scale, p_scale_inv), kept)
                out[i, j, rows], lse[i, j, rows], largest[n], clipped[n], lost[n] = result
                if kept_scores is not None:
                    kept_scores[i, j, rows] = _scores(parts, i, j, rows)

    threads.run(work, len(jobs))
    amaxes = {role: t.amax for role, t in tensors.items()}
    amaxes |= {"s": largest.max(), "o": np.abs(out).max()[()]}
    scaling_of_o, scale = variant.output_scaling, role_scales.get("o")
    o = heads.quantize(out, variant.out, *scaling_of_o, heads=problem.k.shape[1], scale=scale)
    if variant.out.bits == 8:
        tensors["o"] = o
    return Result(
        o.values * o.scale_inv,
        lse,
        tensors,
        amaxes,
        saturated=int(clipped.sum()),
        p_codes=codes,
        scale_p=p_scale,
        scale_inv_p=p_scale_inv,
        scores=kept_scores,
        lost=int(lost.sum()),
    )


def _rows(parts: Parts, i: int, j: int, rows: slice, p_scales: tuple, kept: np.ndarray | None):
    """(o, lse, largest probability, clipped, lost) of some rows of one head; o is not rounded."""
    p_scale, p_scale_inv = p_scales
    variant, count = parts.variant, rows.stop - rows.start
    state = softmax.start(count)
    o = Product(count, parts.v.shape[3], variant, p_scale_inv)
    largest, clipped, zeros = np.float32(0), 0, 0
    factor, inverse_v = np.float32(1), np.ones((), np.float32)
    for place, (begin, end) in enumerate(parts.tiles):
        s_seen = parts.seen(i, rows, begin, end)
        if not (np.maximum(s_seen.low, 0) < s_seen.high).any():
            continue  # such a tile changes no bit
        s = parts.scores(i, j, rows, begin, end)
        factors, factor = parts.factors(i, j, rows.start, begin)
        p, c = softmax.step(s, state, s_seen, variant, factors, factor)
        largest = max(largest, p.max())
        values, tile_clipped, lost = round_probabilities(p, p_scale, variant.fmt)
        clipped += tile_clipped
        zeros += lost
        if kept is not None:
            kept[:, begin:end] = scaling.saturate(values[:, : end - begin], variant.fmt)
        o.rescale(c, place)
        v, inverse_v = parts.values(i, j, begin, end)
        o.add(values, v, inverse_v, parts.codes_of_values(i, j, begin, end))
    total, maximum, value_sums = softmax.total(state, variant.sum_order), state.maximum, o.end()
    if parts.problem.sinks is not None:
        factor = parts.factors(i, j, rows.start, 0)[1]
        value_sums, total, maximum = attention_sinks.add(
            value_sums, total, maximum, parts.problem.sinks[j], variant, factor
        )
    at_end = np.float32(inverse_v if variant.out_scales == "end" and variant.granularity else 1)
    o_rows = _finish(value_sums, total, at_end, variant)
    return o_rows, log_sum(maximum, total, factor, variant), largest, clipped, zeros


def _scores(parts: Parts, i: int, j: int, rows: slice) -> np.ndarray:
    scores = np.empty((rows.stop - rows.start, parts.problem.k.shape[2]), np.float32)
    for begin, end in parts.tiles:
        s = parts.scores(i, j, rows, begin, end)[:, : end - begin]
        factors, factor = parts.factors(i, j, rows.start, begin)
        for multiplier in (factor,) if parts.variant.scores == "raw" else factors:
            s = s * multiplier
        scores[:, begin:end] = s
    return np.where(inputs.allowed(parts.problem, i)[rows], scores, np.float32(-np.inf))


def round_probabilities(
    p: np.ndarray, scale: np.float32, fmt: Format
) -> tuple[np.ndarray, int, int]:
    """(P * scale as values of fmt, saturated; how many clipped; how many lost) (A-8)."""
    if fmt.bits != 8:
        return cast.round_to(p, fmt), 0, 0
    values = np.empty_like(p)
    counts = kernels.round_values(
        p.reshape(-1), scale, fmt.mantissa_bits, fmt.emin, np.float32(fmt.max), values.reshape(-1)
    )
    return values, int(counts[0]), int(counts[1])


def count_lost(x: np.ndarray, values: np.ndarray, fmt: Format) -> int:
    """How many numbers of at least 2^-126 a cast to FP8 made 0 (A-12)."""
    zero = (values == 0) & (np.abs(x) >= np.finfo(np.float32).tiny)
    return int(zero.sum()) if fmt.bits == 8 else 0


def _finish(o: np.ndarray, total: np.ndarray, scale_inv, variant: Variant) -> np.ndarray:
    """The output from the sums (A-10)."""
    if variant.finish == "divide":
        return (o if scale_inv == 1 else o * scale_inv) / np.maximum(total, np.float32(1))[:, None]
    with np.errstate(divide="ignore"):
        inverse = np.where(total == 0, np.float32(0), np.float32(1) / total)
    return o * (inverse * scale_inv)[:, None]


def log_sum(
    maximum: np.ndarray, total: np.ndarray, factor: np.float32, variant: Variant
) -> np.ndarray:
    """The log-sum-exp of rows (A-11)."""
    empty = total == 0
    maximum, total = np.where(empty, np.float32(0), maximum), np.where(empty, np.float32(1), total)
    if variant.lse == "fused":
        logarithm = exponentials.log(total * np.float32(2.0**-variant.offset))
        log_sums = multiply_add(maximum, np.broadcast_to(factor * _LN2, maximum.shape), logarithm)
    elif variant.base == "2":
        logarithm = exponentials.log2(total) - np.float32(variant.offset)
        log_sums = (maximum * factor + logarithm) * _LN2
    else:
        log_sums = maximum + exponentials.log(total)
    return np.where(empty, np.float32(-np.inf), log_sums)


def _real(problem: Problem) -> Result:
    """Attention in float64, rounded once at the end (A-1)."""
    b, h, tq, d = problem.q.shape
    o, lse = np.zeros((b, h, tq, d), np.float32), np.empty((b, h, tq), np.float32)
    for i in range(b):
        for j in range(h):
            p, log_sums = real_probabilities(problem, i, j)
            o[i, j], lse[i, j] = p @ problem.v[i, j // problem.group].astype(np.float64), log_sums
    tensors = {"q": problem.q, "k": problem.k, "v": problem.v, "o": o}
    amaxes = {role: np.abs(x).max()[()] for role, x in tensors.items()}
    return Result(o, lse, {}, amaxes | {"s": np.float32(1)}, 0, None, np.float32(1), np.float32(1))


def real_probabilities(problem: Problem, i: int, j: int) -> tuple[np.ndarray, np.ndarray]:
    """(P [Tq, Tk], LSE [Tq]) of one head in float64; 0 and -infinity without keys."""
    s = np.where(inputs.allowed(problem, i), real_scores(problem, i, j), -np.inf)
    m = s.max(axis=1)
    if problem.sinks is not None:
        m = np.maximum(m, np.float64(problem.sinks[j]))
    empty = m == -np.inf
    e = np.exp(s - np.where(empty, 0, m)[:, None])
    total = e.sum(axis=1)
    if problem.sinks is not None:
        total = total + np.exp(np.float64(problem.sinks[j]) - m)
    with np.errstate(divide="ignore"):
        return e / np.where(empty, 1, total)[:, None], np.where(empty, 0, m) + np.log(total)


def real_scores(problem: Problem, i: int, j: int) -> np.ndarray:
    """Scores of one head in float64, before the mask: [Tq, Tk]."""
    q, k = problem.q[i, j].astype(np.float64), problem.k[i, j // problem.group].astype(np.float64)
    s = (q @ k.T) * np.float64(problem.scale)
    if problem.call.softcap is None:
        return s
    cap = np.float64(np.float32(problem.call.softcap))
    return np.tanh(s / cap) * cap
