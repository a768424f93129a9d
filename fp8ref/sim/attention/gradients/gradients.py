"""Attention in FP8, backward (spec A-14 to A-16): the gradients of q, k and v.

    result = attention.forward(q, k, v, variant="cudnn")
    gradients = attention_gradients.backward(do, q, k, v, result, variant="cudnn")

Probabilities are computed again from the log-sum-exp. A head at a time on each thread: sums go over
all queries or keys at once, so that the simulator keeps a head's scores, and dS of all heads, whose
scale is one.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from fp8ref.formats import Format
from fp8ref.sim import threads
from fp8ref.sim.attention import attention, exponentials
from fp8ref.sim.attention import sinks as attention_sinks
from fp8ref.sim.attention.attention import Result
from fp8ref.sim.attention.gradients import bf16 as bf16
from fp8ref.sim.attention.gradients import mx as mx
from fp8ref.sim.attention.gradients.mx import by_head, heads_of, over_heads, sums_of_rows
from fp8ref.sim.attention.operands import heads
from fp8ref.sim.attention.operands import inputs as inputs
from fp8ref.sim.attention.operands import operands as operands
from fp8ref.sim.attention.operands.heads import Heads
from fp8ref.sim.attention.operands.inputs import Problem
from fp8ref.sim.attention.operands.operands import Parts
from fp8ref.sim.gemm import accumulate as sums
from fp8ref.sim.gemm.accumulate import Accumulation, multiply_add
from fp8ref.sim.gemm.tensor_core import K_STEP
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scales import Scales, scales_from_amax
from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variant import blocks
from fp8ref.spec.attention.variants import Mask, Variant

_LOG2E = np.float32(math.log2(math.e))


class Gradients(NamedTuple):
    """What a backward pass gives.

    dq, dk, dv   float32 of the shapes of q, k, v: values of the output's format, times their
                 scale_inv in FP8.
    tensors      the quantized do and, where they are in FP8, dq, dk and dv, by role.
    amaxes       of do by its groups; of ds, dq, dk and dv, unrounded.
    saturated    elements of P and dS that their casts clipped; saturated_ds: those of dS, none
                 under MX.
    lost         elements of dS of at least 2^-126 that the cast made 0; under MX that along the
                 keys.
    scale_ds     what dS was multiplied by: scale and scale_inv; 1 where it has none, or blocks.
    matrices     codes of P, dS before its cast and its codes [B, H, Tq, Tk] by "p_codes", "ds",
                 "ds_codes"; {} unless asked for.
    dsinks       float32 [H]: the gradient of sinks; None without any.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    tensors: dict[str, Heads]
    amaxes: dict[str, np.ndarray]
    saturated: int
    scale_ds: Scales
    matrices: dict[str, np.ndarray] = {}  # noqa: RUF012
    dsinks: np.ndarray | None = None
    lost: int = 0
    saturated_ds: int = 0


def backward(
    do,
    q,
    k,
    v,
    result: Result,
    *,
    variant: str | Variant | Call,
    mask: Mask | None = None,
    scales=None,
) -> Gradients:
    """The gradients of q, k and v, given that of o.

    result       of ``attention.forward``, with the same other arguments; it has the documents and
                 the sinks.
    variant      as in ``forward``; of a Call with ``keep_ds``, the matrices of an FP8 variant
                 without MX blocks are returned.
    scales       {role: scale} of roles do, ds, dq, dk, dv, and s: delayed scaling. The others come
                 from the tensors themselves.
    Shapes:   do [B, H, Tq, D], as o; q, k, v as in forward; see ``Gradients``.
    Order:    A-15, for MX A-16, in bfloat16 A-25, with A-22 and A-23; sums over the heads of a
              group ascending.
    Specials: a row that sees no key has no gradient.
    Raises:   ValueError: a variant without a backward pass; what forward refuses; a do or a result
              of another shape.
    Source:   spec A-14 to A-16; NVIDIA/cudnn-frontend (commit 3929da2),
              include/cudnn_frontend/node/sdpa_fp8_bwd.h.
    """
    call = Call.resolve(variant, mask)
    variant = call.variant
    if not isinstance(result, Result):
        raise ValueError(f"result is what forward gave; got {type(result).__name__}.")
    result = result._replace(o=data.in_layout(call.layout, result.o))
    problem = inputs.prepare(q, k, v, call, result.documents, result.sinks)
    if variant.backward is None:
        raise ValueError(
            f"variant {variant.name!r} has no backward pass (A-1). Use one of "
            f"{', '.join(with_gradients())}."
        )
    if np.shape(result.o) != problem.q.shape:
        raise ValueError(
            f"result is what forward gave for q {problem.q.shape}; got o {np.shape(result.o)}."
        )
    data.check_result(variant, result.tensors)
    do = inputs.gradient(data.in_layout(call.layout, cast.array(do)), problem)
    role_scales = inputs.check_scales(scales, variant, ("s", *variant.roles[len(data.ROLES) :]))
    if (
        call.keep_ds
        and variant.backward != "exact"
        and (
            variant.backward == "bf16" or variant.fmt.bits != 8 or variant.granularity == "mx_1x32"
        )
    ):
        raise ValueError(
            f"keep_ds keeps codes of P and dS; variant {variant.name!r} has no such codes. Leave "
            "it out."
        )
    gradients = _variant_gradients(problem, do, result, role_scales)
    return gradients._replace(
        **{
            role: data.in_layout(call.layout, getattr(gradients, role))
            for role in ("dq", "dk", "dv")
        }
    )


def _variant_gradients(
    problem: Problem, do: np.ndarray, result: Result, role_scales: dict
) -> Gradients:
    """The gradients by the variant's backward pass."""
    variant = problem.variant
    if variant.backward == "exact":
        return _real(problem, do)
    if variant.backward == "bf16":
        wide, kept = bf16.saved(problem, result)
        return _cast(wide, do, kept, {})
    return (
        _cast_mx(problem, do, result)
        if variant.granularity == "mx_1x32"
        else _cast(problem, do, result, role_scales)
    )


def with_gradients() -> list[str]:
    """The names of variants with a backward pass."""
    return [name for name, variant in data.VARIANTS.items() if variant.backward is not None]


def _real(problem: Problem, do: np.ndarray) -> Gradients:
    """Real arithmetic in float64, rounded once (A-14)."""
    dq = np.zeros(problem.q.shape, np.float64)
    b, h = problem.q.shape[:2]
    largest, sink_terms = np.zeros((b, h)), np.zeros((b, h))
    dk_heads, dv_heads = by_head(problem.k, h, np.float64), by_head(problem.v, h, np.float64)

    def differentiate_head(i: int, j: int, g: int) -> None:
        p, lse = attention.real_probabilities(problem, i, j)
        q, k, v, do_head = (
            x.astype(np.float64)
            for x in (problem.q[i, j], problem.k[i, g], problem.v[i, g], do[i, j])
        )
        dp = do_head @ v.T
        d = (p * dp).sum(axis=1, keepdims=True)
        ds = p * (dp - d) * np.float64(problem.scale)
        if problem.call.softcap is not None:
            cap = np.float64(np.float32(problem.call.softcap))
            ds = ds * (1 - (attention.real_scores(problem, i, j) / cap) ** 2)
        if problem.sinks is not None:
            sink_terms[i, j] = (np.exp(np.float64(problem.sinks[j]) - lse) * d[:, 0]).sum()
        largest[i, j] = np.abs(ds).max()
        dq[i, j] = ds @ k
        dk_heads[i, j] = ds.T @ q
        dv_heads[i, j] = p.T @ do_head

    threads.each(differentiate_head, heads_of(problem))
    dk, dv = over_heads(dk_heads, problem), over_heads(dv_heads, problem)
    gradients: dict[str, Any] = {
        "dq": dq.astype(np.float32),
        "dk": dk.astype(np.float32),
        "dv": dv.astype(np.float32),
    }
    amaxes = {"do": np.abs(do).max()[()], "ds": np.float32(largest.max())} | {
        role: np.abs(x).max()[()] for role, x in gradients.items()
    }
    unit = np.ones((), np.float32)
    dsinks = None if problem.sinks is None else (-sink_terms.sum(0)).astype(np.float32)
    return Gradients(
        **gradients,
        tensors={},
        amaxes=amaxes,
        saturated=0,
        scale_ds=Scales(unit, unit),
        dsinks=dsinks,
    )


def _cast(problem: Problem, do: np.ndarray, result: Result, role_scales: dict) -> Gradients:
    """The steps of A-15."""
    keep = problem.call.keep_ds
    variant, plan = problem.variant, sums.by_name(problem.variant.plan)
    low, unit = variant.fmt.bits == 8, np.ones((), np.float32)
    fmt, gradient_fmt = variant.fmt, variant.gradient_fmt or variant.fmt
    tensors = dict(result.tensors)
    do8 = heads.quantize(
        do,
        gradient_fmt,
        variant.granularity,
        variant.policy,
        heads=problem.k.shape[1],
        scale=role_scales.get("do"),
    )
    parts = Parts(problem, tensors)
    o = tensors["o"] if low and variant.out.bits == 8 else Heads(result.o, None, unit, unit, unit)
    p_scale, inverse_p = (
        operands.probability_scale(variant, role_scales)
        if "s" in role_scales
        else (result.scale_p, result.scale_inv_p)
    )
    b, h, tq = problem.q.shape[:3]
    ds, dq = (
        np.zeros((b, h, tq, problem.k.shape[2]), np.float32),
        np.zeros(problem.q.shape, np.float32),
    )
    clipped, row_sums = np.zeros((b, h), np.int64), np.zeros((b, h, tq), np.float32)
    p_codes = np.zeros(ds.shape if keep else (), np.uint8)
    dk_of_heads, dv_of_heads = by_head(problem.k, h), by_head(problem.v, h)

    def first(i: int, j: int, g: int) -> None:
        inverse_do, values_do = _inverse(do8, i, g), do8.values[i, j]
        inverse_v = parts.inverse_v[i, g, 0, 0]
        row_sums[i, j] = d = sums_of_rows(values_do, o.values[i, j]) * inverse_do * o.scale_inv
        p, slope = _probabilities(parts, i, j, result.lse[i, j])
        p8, clipped[i, j], _ = attention.round_probabilities(p, p_scale, fmt)
        if keep:
            p_codes[i, j] = scaling.saturate(p8, fmt)
        dv_of_heads[i, j] = (
            product(p8.T, values_do.T, fmt, gradient_fmt, plan) * inverse_p * inverse_do
        )
        dp = (
            product(values_do, tensors["v"].values[i, g], gradient_fmt, fmt, plan)
            * inverse_do
            * inverse_v
        )
        ds[i, j] = (dp - d[:, None]) * p * slope * problem.scale

    threads.each(first, heads_of(problem))
    ds8, scale_ds, clipped_ds = _cast_ds(ds, gradient_fmt, variant, role_scales)

    def second(i: int, j: int, g: int) -> None:
        inverse_q, inverse_k = parts.inverse_q[i, j, 0, 0], parts.inverse_k[i, g, 0, 0]
        dq[i, j] = (
            product(ds8[i, j], tensors["k"].values[i, g].T, gradient_fmt, fmt, plan)
            * scale_ds.scale_inv
            * inverse_k
        )
        dk_of_heads[i, j] = (
            product(ds8[i, j].T, tensors["q"].values[i, j].T, gradient_fmt, fmt, plan)
            * scale_ds.scale_inv
            * inverse_q
        )

    threads.each(second, heads_of(problem))
    dk, dv = over_heads(dk_of_heads, problem), over_heads(dv_of_heads, problem)
    saturated = int(clipped.sum()) + clipped_ds
    raw = {"dq": dq, "dk": dk, "dv": dv}
    gradients = _rounded(raw, do8, np.abs(ds).max()[()], saturated, scale_ds, problem, role_scales)
    matrices: dict = (
        {"p_codes": p_codes, "ds": ds, "ds_codes": scaling.saturate(ds8, gradient_fmt)}
        if keep
        else {}
    )
    zeros = attention.count_lost(ds, ds8, gradient_fmt)
    return gradients._replace(
        matrices=matrices,
        dsinks=_sink_gradients(problem, row_sums, result.lse),
        lost=zeros,
        saturated_ds=clipped_ds,
    )


def _cast_mx(problem: Problem, do: np.ndarray, result: Result) -> Gradients:
    """The steps of A-16."""
    raw, copies = mx.gradients(
        problem, Parts(problem, dict(result.tensors)), do, result.o, result.lse
    )
    unit = np.ones((), np.float32)
    raw_gradients = {"dq": raw.dq, "dk": raw.dk, "dv": raw.dv}
    gradients = _rounded(
        raw_gradients, copies.do_features, raw.largest, raw.clipped, Scales(unit, unit), problem, {}
    )
    return gradients._replace(dsinks=_sink_gradients(problem, raw.d, result.lse), lost=raw.lost)


def _sink_gradients(problem: Problem, d: np.ndarray, lse: np.ndarray) -> np.ndarray | None:
    return None if problem.sinks is None else attention_sinks.gradient(d, lse, problem.sinks)


def _rounded(
    raw: dict,
    do: Heads,
    largest,
    saturated: int,
    scale_ds: Scales,
    problem: Problem,
    role_scales: dict,
) -> Gradients:
    """The gradients in the output's format, with their amaxes."""
    variant = problem.variant
    amaxes, gradients, coded = {"do": do.amax, "ds": largest}, {}, {"do": do}
    for role, x in raw.items():
        amaxes[role] = np.abs(x).max()[()]
        rounded = heads.quantize(
            x,
            variant.out,
            *attention.output_scaling(variant),
            heads=problem.k.shape[1],
            scale=role_scales.get(role),
        )
        gradients[role] = rounded.values * rounded.scale_inv
        if rounded.codes is not None:
            coded[role] = rounded
    return Gradients(
        **gradients, tensors=coded, amaxes=amaxes, saturated=saturated, scale_ds=scale_ds
    )


def _inverse(x: Heads, i: int, g: int) -> np.float32:
    """scale_inv of a head."""
    return np.float32(x.scale_inv if x.scale_inv.ndim == 0 else x.scale_inv[i, g, 0, 0])


def _probabilities(parts: Parts, i: int, j: int, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P of one head again, from the log-sum-exp; the slope of its softcap): float32 [Tq, Tk]; the
    slope is 1 without one.
    """
    problem, variant = parts.problem, parts.variant
    tq, tk = problem.q.shape[2], problem.k.shape[2]
    s = parts.scores(i, j, slice(0, tq), 0, tk)[:, :tk]
    slope = mx.slope(s, parts)
    factors, factor = parts.factors(i, j, 0, 0)
    seen = inputs.allowed(problem, i)
    lse = np.where(lse == -np.inf, np.float32(0), lse)  # such a row sees no key
    if variant.scores == "raw":
        bias = np.broadcast_to(-(lse * _LOG2E)[:, None], s.shape)
        x, exponential = multiply_add(s, np.broadcast_to(factor, s.shape), bias), exponentials.exp2
    else:
        for multiplier in factors:
            s = s * multiplier
        x, exponential = s - lse[:, None], exponentials.exp
    return exponential(np.where(seen, x, np.float32(-np.inf))), slope


def _cast_ds(
    ds: np.ndarray, fmt: Format, variant: Variant, role_scales: dict
) -> tuple[np.ndarray, Scales, int]:
    """(values of dS as cast, its scales, how many were clipped)."""
    unit = np.ones((), np.float32)
    if fmt.bits != 8:
        return cast.round_to(ds, fmt), Scales(unit, unit), 0
    if "ds" in role_scales:
        scales = heads.given_scales(role_scales["ds"], ())
    else:
        scales = scales_from_amax(np.abs(ds).max()[()], fmt, variant.policy)
    whole = blocks("tensor", ds.shape, heads=1)
    scaled = scaling.scale_blocks(ds, scales, whole)
    above = np.abs(scaled) > fmt.max
    lost = int((~np.isfinite(cast.round_to(scaled[above], fmt))).sum()) if above.any() else 0
    return cast.decode(scaling.saturate(scaled, fmt), fmt), scales, lost


def product(
    a: np.ndarray, b: np.ndarray, fmt_a: Format, fmt_b: Format, plan: str | Accumulation
) -> np.ndarray:
    """Sums of products over K of values a [M, K] and b [N, K], by a plan of section G: float32 [M,
    N].
    """
    if isinstance(plan, Accumulation):
        pad = ((0, 0), (0, -a.shape[1] % K_STEP))
        return np.ascontiguousarray(sums.chains(np.pad(a, pad), np.pad(b, pad), fmt_a, fmt_b, plan))
    return sums.exact_sum(a, b) if plan == "exact" else sums.f32(a, b)
