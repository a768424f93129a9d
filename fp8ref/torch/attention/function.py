"""The differentiable function of attention, one for each set of constants (spec A).

``attention.apply`` calls it. A compiled graph calls it with tensors only, and AOTAutograd traces
into it.
"""

import dataclasses
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.variants import Mask, Variant
from fp8ref.torch.attention import observer, statistics
from fp8ref.torch.attention import output as attention_forward
from fp8ref.torch.attention import real as attention_real
from fp8ref.torch.attention.fast import output
from fp8ref.torch.attention.gradients import bf16, fast, mx
from fp8ref.torch.attention.gradients import gradients as attention_gradients
from fp8ref.torch.attention.gradients.gradients import Gradients, Saved
from fp8ref.torch.attention.operands import context as attention_context
from fp8ref.torch.attention.operands import inputs
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import DTYPES, Heads
from fp8ref.torch.attention.operands.inputs import Report, Shape, Spec
from fp8ref.torch.attention.output import Documents
from fp8ref.torch.delayed import delayed
from fp8ref.torch.model import checkpointing
from fp8ref.torch.tensors import linear_input

_PLAIN = tuple(
    f.name
    for f in dataclasses.fields(Variant)
    if f.name not in ("tiles", "fmt", "out", "gradient_fmt", "source")
)

Roles = tuple[tuple[str, ...], tuple[str, ...]]
"""The roles of given scales, and those of observations."""

Groups = tuple[str | None, str | None]
"""The names of ``Spec.amax_group`` and ``Spec.context``."""


def values(x: object) -> tuple:
    """The fields of a Mask or Variant, as numbers and strings.

    Of one that is made where dynamo traces, dynamo hands on another of the same class, without its
    values (torch 2.13). What it reads of the fields is right.
    """
    if isinstance(x, Mask):
        return x.causal, x.window, x.alignment
    if not isinstance(x, Variant):
        return ()
    numbers = [(tiles.features, tiles.full, tiles.causal, tiles.local) for tiles in x.tiles]
    formats = [None if fmt is None else fmt.name for fmt in (x.fmt, x.out, x.gradient_fmt)]
    return *numbers, *formats, *[getattr(x, name, None) for name in _PLAIN]


@torch._dynamo.assume_constant_result
def function(
    variant: str | Variant,
    variant_values: tuple,
    mask_values: tuple,
    scale,
    seed: int,
    arithmetic,
    groups: Groups,
    roles: Roles,
    softcap=None,
) -> type[torch.autograd.Function]:
    """The differentiable function of some constants, which a compiler does not trace.

    Raises:   ValueError: a Variant without its ``values``; no Mask; what ``Spec`` refuses.
    """
    if values(variant) != variant_values:
        raise ValueError(
            f"a Variant is made outside of what is compiled; got {variant_values}, made inside. "
            "Make it once, before."
        )
    if not mask_values:
        raise ValueError(
            "mask is a Mask of fp8ref.spec.attention.variants, and no tensor. Use "
            "Mask(causal=True), a window, or documents, which separate the sequences of a row."
        )
    causal, window, alignment = mask_values
    mask = Mask(causal=causal, window=window, alignment=alignment)
    amax_group, context = groups
    options: dict = {
        "scale": scale,
        "seed": seed,
        "arithmetic": arithmetic,
        "amax_group": amax_group or context,
        "context": context,
    }
    spec = Spec(variant=data.by_name(variant), mask=mask, softcap=softcap, **options)
    return _bind(spec, roles)


@functools.lru_cache(maxsize=256)  # a softmax scale, softcap or seed may be another in every call
def _bind(spec: Spec, roles: Roles) -> type[torch.autograd.Function]:
    """q, k, v, documents of both, sinks or None, scales and observations of these roles -> o, as an
    autograd.Function.

    A class for each spec: a compiled graph calls it with tensors only.
    """

    @torch._dynamo.allow_in_graph  # AOTAutograd traces into it
    class AttentionFunction(torch.autograd.Function):
        @staticmethod
        @linear_input.without_autocast
        def forward(
            ctx,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            q_documents: Tensor | None,
            k_documents: Tensor | None,
            sinks: Tensor | None,
            *more: Tensor,
        ) -> Tensor:
            scales, seen = more[: len(roles[0])], more[len(roles[0]) :]
            # An attribute, not a saved tensor: other uses may write it before the backward pass.
            ctx.seen = dict(zip(roles[1], seen, strict=True))
            with checkpointing.within_attention():
                return _forward(
                    ctx,
                    spec,
                    q,
                    k,
                    v,
                    (q_documents, k_documents),
                    dict(zip(roles[0], scales, strict=True)),
                    sinks,
                )

        @staticmethod
        @linear_input.without_autocast
        def backward(ctx, do: Tensor):
            with observer.inside(ctx.layer):
                *gradients, dsinks = _backward(ctx, spec, roles[0], do)
                return (*gradients, None, None, dsinks, *(None for _ in ctx.needs_input_grad[6:]))

    return AttentionFunction


def _forward(
    ctx,
    spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: tuple[Tensor | None, Tensor | None],
    scales: dict,
    sinks: Tensor | None,
) -> Tensor:
    variant = spec.variant
    shape = inputs.check(q, k, v, spec)
    role_scales = inputs.check_scales(scales, variant, variant.roles, shape)
    inputs.check_sinks(sinks, shape, q.device)
    inputs.check_seen(ctx.seen, variant, variant.roles, shape)
    pair = documents if documents[0] is not None and documents[1] is not None else None
    if spec.context is not None:
        attention_context.check(spec, shape, documents=pair is not None)
    at = attention_forward.padded_documents(*inputs.check_documents(pair, shape))  # type: ignore[arg-type]
    q, k, v = (inputs.without_padding(x, ids) for x, ids in ((q, at.q), (k, at.k), (v, at.k)))
    spec, shape = attention_context.problem(spec, shape)
    ctx.shape, ctx.first, ctx.dtypes, ctx.layer = (
        shape,
        spec.first,
        (q.dtype, k.dtype, v.dtype),
        observer.layer(),
    )
    counts = variant.fmt.bits == 8 and observer.counts(ctx.layer) and not observer.again()
    report: Report = "all" if counts else "amaxes" if ctx.seen else "nothing"
    if variant.real:
        ctx.save_for_backward(sinks, q, k, v, *at)
        return (
            operands.by_head(attention_real.forward(q, k, v, spec, shape, at, sinks).o, shape)
            .float()
            .to(q.dtype)
        )
    tensors = operands.quantize(q, k, v, spec, role_scales, report=report)
    if ctx.layer is not None and variant.fmt.bits == 8 and not observer.again():
        for product, role, x in zip(
            ("scores", "scores", "values"),
            ("q", "k", "v"),
            operands.rotated(q, k, v, spec),
            strict=True,
        ):
            observer.report(ctx.layer, product, role, x, tensors[role])  # type: ignore[arg-type]
    run = output.run if spec.arithmetic == "fast" else attention_forward.run
    watched = observer.watched(ctx.layer) and not observer.again()
    keep = ["scores"] * watched + ["p_codes"] * (watched and variant.fmt.bits == 8)
    result = run(
        attention_context.gathered(tensors, spec),
        spec,
        shape,
        at,
        role_scales,
        report=report,
        keep=keep,
        sinks=sinks,
    )
    o = result.o.to(q.dtype)
    p_counts = None
    if counts and result.lost is not None:
        p_counts = statistics.counts_of(spec, shape, at, result.saturated, result.lost)
        observer.count(ctx.layer, "values", "p", result.amaxes["s"], p_counts)
    if watched:
        shown = {
            "q/value": q,
            "k/value": k,
            "v/value": v,
            "s/value": result.scores,
            "p/scale": result.scale_p,
            "p/codes": result.p_codes,
            "o/value": o,
            "softcap/value": None
            if spec.softcap is None
            else torch.tensor(spec.softcap, dtype=torch.float32, device="cpu"),
            "sinks/value": sinks,
            "p/amax": None if p_counts is None else result.amaxes["s"],
            "p/counts": p_counts,
        }
        observer.show(ctx.layer, "forward", shown, result.tensors)
    _observe(ctx.seen, result.amaxes)
    if variant.backward is None:
        return o
    if variant.backward == "bf16":
        o16, *tensors16 = map(bf16.rounded, (result.o, q, k, v))
        ctx.save_for_backward(sinks, *at, *scales.values(), o16, None, result.lse, *tensors16)
        return o
    if variant.out.bits == 8:
        kept: tuple[Tensor | None, ...] = (result.tensors["o"].codes, result.tensors["o"].scale_inv)
    else:  # o itself, if it holds the output's numbers
        kept = (
            o
            if q.dtype in (torch.float32, DTYPES[variant.out.name])
            else result.o.to(DTYPES[variant.out.name]),
            None,
        )
    if variant.granularity == "mx_1x32":
        ctx.save_for_backward(sinks, *at, *scales.values(), *kept, result.lse, q, k, v)
    else:
        codes_and_scales = (
            x for role in ("q", "k", "v") for x in (tensors[role].codes, tensors[role].scale_inv)
        )
        ctx.save_for_backward(
            sinks,
            *at,
            *scales.values(),
            *kept,
            result.lse,
            result.scale_p,
            result.scale_inv_p,
            *codes_and_scales,
        )
    return o


def _backward(ctx, spec: Spec, roles: tuple[str, ...], do: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and of sinks, None without any."""
    if torch.is_grad_enabled():  # autograd would follow neither codes nor scales
        raise ValueError(
            "gradients of attention in FP8 are not differentiated again; got create_graph=True. "
            "Leave it out."
        )
    (sinks, *rest), shape, variant = ctx.saved_tensors, ctx.shape, spec.variant
    saved = iter(rest)
    spec = spec if spec.context is None else dataclasses.replace(spec, first=ctx.first)
    keep = inputs.kept_of(variant) if observer.watched(ctx.layer) else []
    counts = variant.fmt.bits == 8 and variant.backward == "cast" and observer.counts(ctx.layer)
    report: Report = "all" if counts else "amaxes" if ctx.seen else "nothing"
    if variant.real:
        q, k, v, *documents = saved
        at = Documents(*documents)
        do = inputs.without_padding(do, at.q)
        *real, _, dsinks = attention_real.backward(do, q, k, v, spec, shape, at, sinks)
        return _cast_gradients(tuple(real), dsinks, ctx.dtypes, sinks)
    at, role_scales = Documents(next(saved), next(saved)), {role: next(saved) for role in roles}
    do = inputs.without_padding(do, at.q)
    gradients, scale_p = _gradients(
        do, saved, spec, shape, at, role_scales, sinks, report=report, keep=keep
    )
    qkv_grads, ds_counts = gradients[:3], None
    if counts and gradients.saturated_ds is not None and gradients.lost is not None:
        ds_counts = statistics.counts_of(spec, shape, at, gradients.saturated_ds, gradients.lost)
        observer.count(ctx.layer, "grad_q", "ds", gradients.amaxes["ds"], ds_counts)
    if keep:
        matrices, values = (
            gradients.matrices,
            {f"{role}/value": x for role, x in zip(("dq", "dk", "dv"), qkv_grads, strict=True)},
        )
        shown = {
            "do/value": do,
            "p/scale": scale_p,
            "p/codes": matrices.get("p_codes"),
            "ds/value": matrices["ds"],
            "ds/codes": matrices.get("ds_codes"),
            "ds/amax": None if ds_counts is None else gradients.amaxes["ds"],
            "ds/counts": ds_counts,
        }
        if "ds_codes" in matrices:
            shown["ds/scale"] = gradients.scale_ds.scale
        observer.show(ctx.layer, "backward", shown | values, gradients.tensors)
    _observe(ctx.seen, gradients.amaxes)
    if ctx.layer is not None and variant.fmt.bits == 8 and variant.backward == "cast":
        if variant.granularity == "mx_1x32":
            q, k, _ = rest[-3:]  # checkpointing unpacks saved tensors once
            observer.report(ctx.layer, "grad_probabilities", "do", do, gradients.tensors["do"])
            for product, role, x in (("grad_v", "do", do), ("grad_q", "k", k), ("grad_k", "q", q)):
                tensor = mx.along_tokens(x, role, variant, shape)  # type: ignore[arg-type]
                observer.report(ctx.layer, product, role, x, tensor)  # type: ignore[arg-type]
        else:
            observer.report(ctx.layer, "grad_v", "do", do, gradients.tensors["do"])
    return _cast_gradients(qkv_grads, gradients.dsinks, ctx.dtypes, sinks)


def _gradients(
    do: Tensor,
    saved: Iterator[Tensor],
    spec: Spec,
    shape: Shape,
    at: Documents,
    role_scales: dict[str, Tensor],
    sinks: Tensor | None,
    *,
    report: Report,
    keep,
) -> tuple[Gradients, Tensor]:
    """The gradients by the variant's backward pass, and the scale of its probabilities.

    saved     what ``_forward`` saved after sinks, documents and scales.
    """
    o, o_scale_inv, lse = next(saved), next(saved), next(saved)
    unit, options = (
        torch.ones((), device=do.device, dtype=torch.float32),
        {"report": report, "keep": keep, "sinks": sinks},
    )
    if spec.variant.backward == "bf16":
        q, k, v = saved
        return bf16.gradients(do, (q, k, v), o, lse, spec, shape, at, **options), unit
    if spec.variant.granularity == "mx_1x32":
        q, k, v = saved
        kept = Saved(operands.quantize(q, k, v, spec, {}), o, None, lse, unit, unit)
        mx_scale_p = torch.full((), mx.P_SCALE, dtype=torch.float32, device="cpu")
        return mx.gradients(do, q, k, kept, spec, shape, at, **options), mx_scale_p
    scale_p, scale_inv_p = next(saved), next(saved)
    tensors = {role: Heads(next(saved), unit, unit, next(saved)) for role in ("q", "k", "v")}
    kept = Saved(
        attention_context.gathered(tensors, spec), o, o_scale_inv, lse, scale_p, scale_inv_p
    )
    role_scales = {role: x for role, x in role_scales.items() if role in data.GRADIENT_ROLES}
    pass_module = fast if spec.arithmetic == "fast" else attention_gradients
    return pass_module.gradients(do, kept, spec, shape, at, role_scales, **options), scale_p


def _cast_gradients(
    grads: tuple[Tensor, ...],
    dsinks: Tensor | None,
    dtypes: tuple[torch.dtype, ...],
    sinks: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients in the dtypes of q, k and v, and that of sinks in theirs."""
    sinks_grad = None if sinks is None or dsinks is None else dsinks.to(sinks.dtype)
    return *(x.to(dtype) for x, dtype in zip(grads, dtypes, strict=True)), sinks_grad


def _observe(seen: dict[str, Tensor], amaxes: dict[str, Tensor]) -> None:
    """Merge the amaxes of a pass into the observations of its roles."""
    for role, observation in seen.items():
        if role in amaxes:
            delayed.merge_(observation, amaxes[role])
