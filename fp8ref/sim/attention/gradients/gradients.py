"""Attention in FP8, backward (spec A-14 to A-16): the gradients of q, k and v.

    result = attention.forward(q, k, v, variant="cudnn")
    gradients = attention_gradients.backward(do, q, k, v, result, variant="cudnn")

Probabilities are computed again from the log-sum-exp. A head at a time on each thread: sums go over
all queries or keys at once, so that the simulator keeps a head's scores, and dS of all heads, whose
scale is one.
"""

import functools
from typing import NamedTuple

import numpy as np

from fp8ref.formats import BFLOAT16, Format
from fp8ref.sim import threads
from fp8ref.sim.attention import attention
from fp8ref.sim.attention import sinks as attention_sinks
from fp8ref.sim.attention.attention import Result
from fp8ref.sim.attention.gradients import mx as mx
from fp8ref.sim.attention.gradients.mx import by_head, heads_of, over_heads, sums_of_rows
from fp8ref.sim.attention.operands import heads
from fp8ref.sim.attention.operands import inputs as inputs
from fp8ref.sim.attention.operands import operands as operands
from fp8ref.sim.attention.operands.heads import Heads
from fp8ref.sim.attention.operands.inputs import Problem
from fp8ref.sim.attention.operands.operands import Parts, product
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scales import Scales, scales_from_amax
from fp8ref.spec import support
from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variant import blocks
from fp8ref.spec.attention.variants import Mask, Variant

_UNIT = Scales(np.ones((), np.float32), np.ones((), np.float32))


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
    # the simulator differentiates what JAX does, with the same remedy
    support.require("gradients of attention", "jax", call.variant)
    if call.keep_ds and not call.variant.real and "ds_codes" not in call.variant.gradient_matrices:
        raise ValueError(
            f"keep_ds needs a variant with FP8 P and dS; got {call.variant.name!r}. Leave it out."
        )
    if not isinstance(result, Result):
        raise ValueError(f"result is what forward returned; got {type(result).__name__}.")
    result = result._replace(o=data.in_layout(call.layout, result.o))
    problem = inputs.prepare(q, k, v, call, result.documents, result.sinks)
    if np.shape(result.o) != problem.q.shape:
        raise ValueError(
            f"result is that of forward for q {problem.q.shape}; got o {np.shape(result.o)}."
        )
    data.check_result(call.variant, result.tensors)
    do = inputs.gradient(data.in_layout(call.layout, cast.array(do)), problem)
    roles = ("s", *call.variant.roles[len(data.ROLES) :])
    role_scales = data.check_scales(scales, call.variant, roles)
    gradients = _variant_gradients(problem, do, result, role_scales)
    dq, dk, dv = (data.in_layout(call.layout, x) for x in gradients[:3])
    return gradients._replace(dq=dq, dk=dk, dv=dv)


def _variant_gradients(
    problem: Problem, do: np.ndarray, result: Result, role_scales: dict
) -> Gradients:
    variant = problem.variant
    if variant.backward == "exact":
        return _real(problem, do)
    if variant.backward == "bf16":
        return _cast(*_saved_in_bf16(problem, result), do, {})
    if variant.granularity == "mx_1x32":
        return _cast_mx(problem, result, do)
    return _cast(problem, result, do, role_scales)


def _saved_in_bf16(problem: Problem, result: Result) -> tuple[Problem, Result]:
    """The problem for the variant ``bf16``, and q, k, v, o in bfloat16 with the LSE (A-25)."""
    wide, one = problem._replace(call=problem.call.in_bf16()), np.float32(1)
    return wide, result._replace(
        tensors=operands.quantize(wide, {}),
        o=cast.round_to(result.o, BFLOAT16),
        scale_p=one,
        scale_inv_p=one,
    )


def _real(problem: Problem, do: np.ndarray) -> Gradients:
    """Gradients in float64, rounded once (A-14)."""
    dq = np.zeros(problem.q.shape, np.float64)
    b, h = problem.q.shape[:2]
    largest, sink_terms = np.zeros((b, h)), np.zeros((b, h))
    dk_heads, dv_heads = by_head(problem.k, h, np.float64), by_head(problem.v, h, np.float64)

    def differentiate_head(i: int, j: int, g: int) -> None:
        p, lse = attention.real_probabilities(problem, i, j)
        tensors = problem.q[i, j], problem.k[i, g], problem.v[i, g], do[i, j]
        q, k, v, do_head = (x.astype(np.float64) for x in tensors)
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
    amaxes = {"do": np.abs(do).max()[()], "ds": np.float32(largest.max())}
    by_role = {"dq": dq, "dk": dk, "dv": dv}
    grads = {role: x.astype(np.float32) for role, x in by_role.items()}
    amaxes |= {role: np.abs(x).max()[()] for role, x in grads.items()}
    dsinks = None if problem.sinks is None else (-sink_terms.sum(0)).astype(np.float32)
    return Gradients(grads["dq"], grads["dk"], grads["dv"], {}, amaxes, 0, _UNIT, dsinks=dsinks)


class ScoreGradients(NamedTuple):
    """Steps 1 to 6 of A-15: dS before its cast [B, H, Tq, Tk], and what each query head adds to dv
    [B, H, Tk, D]; the codes of P, if they are kept; D of the rows [B, H, Tq]; how many elements of
    P were clipped."""

    ds: np.ndarray
    dv: np.ndarray
    p_codes: np.ndarray
    d: np.ndarray
    clipped: int


def _cast(problem: Problem, result: Result, do: np.ndarray, role_scales: dict) -> Gradients:
    """The steps of A-15."""
    variant, count, scale = problem.variant, problem.k.shape[1], role_scales.get("do")
    fmt, kind = variant.format_of("ds"), variant.granularity
    do8 = heads.quantize(do, fmt, kind, variant.policy, heads=count, scale=scale)
    if "s" in role_scales:
        p_scale, p_scale_inv = operands.probability_scale(variant, role_scales)
        result = result._replace(scale_p=p_scale, scale_inv_p=p_scale_inv)
    parts = Parts(problem, dict(result.tensors))
    scores = _score_gradients(parts, result, do8)
    ds8, scale_ds, clipped_ds = _cast_ds(scores.ds, fmt, variant, role_scales)
    dq, dk = _query_key_gradients(parts, ds8, scale_ds)
    raw = {"dq": dq, "dk": dk, "dv": over_heads(scores.dv, problem)}
    largest = np.abs(scores.ds).max()[()]
    clipped = scores.clipped + clipped_ds
    gradients = _rounded(raw, do8, largest, clipped, scale_ds, problem, role_scales)
    matrices = {}
    if problem.call.keep_ds:
        ds_codes = scaling.saturate(ds8, fmt)
        matrices = {"p_codes": scores.p_codes, "ds": scores.ds, "ds_codes": ds_codes}
    return gradients._replace(
        matrices=matrices,
        dsinks=_sink_gradients(problem, scores.d, result.lse),
        lost=attention.count_lost(scores.ds, ds8, fmt),
        saturated_ds=clipped_ds,
    )


def _score_gradients(parts: Parts, result: Result, do: Heads) -> ScoreGradients:
    """P, dS and dv, one head at a time."""
    problem, variant, plan = parts.problem, parts.variant, parts.plan
    fmt, gradient_fmt = variant.fmt, variant.format_of("ds")
    unit = np.ones((), np.float32)
    o = Heads(result.o, None, unit, unit, unit)
    if fmt.bits == variant.out.bits == 8:
        o = result.tensors["o"]
    b, h, tq = problem.q.shape[:3]
    ds = np.zeros((b, h, tq, problem.k.shape[2]), np.float32)
    p_codes = np.zeros(ds.shape if problem.call.keep_ds else (), np.uint8)
    clipped, row_sums = np.zeros((b, h), np.int64), np.zeros((b, h, tq), np.float32)
    dv = by_head(problem.k, h)

    def differentiate_head(i: int, j: int, g: int) -> None:
        inverse_do, values_do = _inverse(do, i, g), do.values[i, j]
        row_sums[i, j] = d = sums_of_rows(values_do, o.values[i, j]) * inverse_do * o.scale_inv
        p, slope = mx.probabilities(parts, i, j, result.lse[i, j])
        p8, clipped[i, j], _ = attention.round_probabilities(p, result.scale_p, fmt)
        if problem.call.keep_ds:
            p_codes[i, j] = scaling.saturate(p8, fmt)
        # [Tk, Tq] x [D, Tq] -> [Tk, D]
        dv_sums = product(p8.T, values_do.T, (fmt, gradient_fmt), plan)
        dv[i, j] = dv_sums * result.scale_inv_p * inverse_do
        # [Tq, D] x [Tk, D] -> [Tq, Tk]
        dp = product(values_do, parts.tensors["v"].values[i, g], (gradient_fmt, fmt), plan)
        dp = dp * inverse_do * parts.inverse_v[i, g, 0, 0]
        ds[i, j] = (dp - d[:, None]) * p * slope * problem.scale

    threads.each(differentiate_head, heads_of(problem))
    return ScoreGradients(ds, dv, p_codes, row_sums, int(clipped.sum()))


def _query_key_gradients(
    parts: Parts, ds: np.ndarray, scale_ds: Scales
) -> tuple[np.ndarray, np.ndarray]:
    """dq and dk from dS as cast (steps 7 and 8)."""
    problem, q, k = parts.problem, parts.tensors["q"].values, parts.tensors["k"].values
    formats = parts.variant.format_of("ds"), parts.variant.fmt
    dq = np.zeros(problem.q.shape, np.float32)
    dk = by_head(problem.k, problem.q.shape[1])

    def differentiate_head(i: int, j: int, g: int) -> None:
        # [Tq, Tk] x [D, Tk] -> [Tq, D], and [Tk, Tq] x [D, Tq] -> [Tk, D]
        dq_sums = product(ds[i, j], k[i, g].T, formats, parts.plan)
        dk_sums = product(ds[i, j].T, q[i, j].T, formats, parts.plan)
        dq[i, j] = dq_sums * scale_ds.scale_inv * parts.inverse_k[i, g, 0, 0]
        dk[i, j] = dk_sums * scale_ds.scale_inv * parts.inverse_q[i, j, 0, 0]

    threads.each(differentiate_head, heads_of(problem))
    return dq, over_heads(dk, problem)


def _cast_mx(problem: Problem, result: Result, do: np.ndarray) -> Gradients:
    """The steps of A-16."""
    parts = Parts(problem, dict(result.tensors))
    raw = mx.gradients(problem, parts, do, result.o, result.lse)
    by_role = {"dq": raw.dq, "dk": raw.dk, "dv": raw.dv}
    gradients = _rounded(by_role, raw.do, raw.largest, raw.clipped, _UNIT, problem, {})
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
    """Gradients in the output format, with their amaxes."""
    out = problem.variant.out
    options = functools.partial(heads.quantize, heads=problem.k.shape[1])
    rounded = {
        role: options(x, out, *problem.variant.output_scaling, scale=role_scales.get(role))
        for role, x in raw.items()
    }
    amaxes = {"do": do.amax, "ds": largest} | {role: x.amax for role, x in rounded.items()}
    coded = {role: x for role, x in rounded.items() if x.codes is not None}
    dq, dk, dv = (rounded[role].values * rounded[role].scale_inv for role in ("dq", "dk", "dv"))
    return Gradients(dq, dk, dv, {"do": do} | coded, amaxes, saturated, scale_ds)


def _inverse(x: Heads, i: int, g: int) -> np.float32:
    return np.float32(x.scale_inv if x.scale_inv.ndim == 0 else x.scale_inv[i, g, 0, 0])


def _cast_ds(
    ds: np.ndarray, fmt: Format, variant: Variant, role_scales: dict
) -> tuple[np.ndarray, Scales, int]:
    """(values of dS as cast, its scales, how many were clipped)."""
    if fmt.bits != 8:
        return cast.round_to(ds, fmt), _UNIT, 0
    if "ds" in role_scales:
        scales = heads.given_scales(role_scales["ds"], ())
    else:
        scales = scales_from_amax(np.abs(ds).max()[()], fmt, variant.policy)
    whole = blocks("tensor", ds.shape, heads=1)
    scaled = scaling.scale_blocks(ds, scales, whole)
    above = np.abs(scaled) > fmt.max
    lost = int((~np.isfinite(cast.round_to(scaled[above], fmt))).sum()) if above.any() else 0
    return cast.decode(scaling.saturate(scaled, fmt), fmt), scales, lost
