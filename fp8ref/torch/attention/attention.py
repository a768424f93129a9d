"""Attention in FP8: softmax(q k^T scale) v, as a variant of ``fp8ref.spec.attention.variants``
computes it (spec A).

    o = attention.apply(q, k, v, variant="cudnn", mask=Mask(causal=True))    # differentiable
    result = attention.forward(q, k, v, variant="cudnn")                     # with codes, scales
    and amaxes gradients = attention.backward(do, q, k, v, result, variant="cudnn")

Tensors are [batch, heads, tokens, features]. Tiles, roundings, scales and their order are the
variant's; what sums products is the library:

    FP8 codes       torch._scaled_mm, for each sequence and head of keys, with the query heads of
                    that head as rows; fast accumulation under the plan ``hopper_fast``. Within
                    ``hardware.simulating``, its plan. On a CPU the fast form has one float32 GEMM
                    of dequantized codes for all sequences and heads.
    MX blocks       a float32 GEMM of dequantized codes (G-16)
    bfloat16        a GEMM with a float32 result
    ``exact``       float64

Between the products are torch's own sums and functions, within a bound (A-18), or under
``arithmetic="stated"`` the specification's operations in their order.

A GEMM begins at +0. So probabilities times values are promoted after each tile, whatever
``promotion`` says: ``fa3`` is computed as ``fa3_promoted``, and ``fa4`` likewise.
"""

import contextlib
from collections.abc import Collection

import torch
from torch import Tensor

from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.variants import FULL, Arithmetic, Layout, Mask, Variant
from fp8ref.torch.attention import function as attention_function
from fp8ref.torch.attention import output as attention_forward
from fp8ref.torch.attention import real as attention_real
from fp8ref.torch.attention.fast import output
from fp8ref.torch.attention.function import values
from fp8ref.torch.attention.gradients import bf16, fast, mx
from fp8ref.torch.attention.gradients import gradients as attention_gradients
from fp8ref.torch.attention.gradients.gradients import Gradients, Saved
from fp8ref.torch.attention.operands import inputs
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import DTYPES
from fp8ref.torch.attention.operands.inputs import Shape, Spec
from fp8ref.torch.attention.operands.kept import Matrix
from fp8ref.torch.attention.output import Documents, Result
from fp8ref.torch.quantize.scales import Scales
from fp8ref.torch.tensors import linear_input

Pair = Tensor | tuple[Tensor, Tensor] | None
"""Documents of queries and keys: one tensor for both, or two."""


def apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str | Variant,
    mask: Mask = FULL,
    scale: float | None = None,
    documents: Pair = None,
    scales: dict[str, Tensor] | None = None,
    seed: int = 0,
    arithmetic: Arithmetic = "fast",
    amax_group: str | None = None,
    context: str | None = None,
    seen: dict[str, Tensor] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "bhtd",
) -> Tensor:
    """softmax(q k^T scale) v by a variant, differentiable in q, k, v and sinks.

    scales        as in ``forward``; and of roles do, ds, dq, dk, dv, for the backward pass.
    context       name of the process group whose ranks have the parts of the tokens, in their
                  order: codes of k and v are gathered (A-21). The amax_group of whole tensors is
                  then this one, or a larger one.
    seen          {role: observation}, ``delayed.RoleState.seen`` of roles whose scale is one
                  number: the passes merge their amaxes into these (H-4), the forward pass those of
                  q, k, v, s and o.
    sinks         [H], as in ``forward``; their gradient is that of this rank's rows.
    layout        of q, k, v, o and their gradients, as in ``forward``.
    Shapes:   as in ``forward``; o of q's shape and dtype.
    Order:    as in ``forward``; of the backward pass A-14 to A-16. o and gradients are rounded to
              the variant's format, then to q's, k's and v's dtypes.
    State:    q, k and v are kept for the backward pass as codes, beside o and the log-sum-exp;
              probabilities are computed again. ``exact`` and MX keep q, k and v themselves.
    Gradient: once; a backward pass with create_graph=True is refused.
    Specials: as in ``forward``.
    Raises:   ValueError: as ``forward``; what is no tensor; a variant without a backward pass, for
              tensors that require gradients.
    Source:   spec A.
    """
    inputs.check_given(q, k, v, sinks)
    q, k, v = data.heads_first(layout, q, k, v)
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
    ):
        check_gradients(variant)
    linear_input.check_transforms(
        "attention", q, k, v, otherwise="call torch's scaled_dot_product_attention"
    )
    role_scales, observed = scales or {}, seen or {}
    roles = tuple(role_scales), tuple(observed)
    function = attention_function.function(
        variant,
        values(variant),
        values(mask),
        scale,
        seed,
        arithmetic,
        (amax_group, context),
        roles,
        softcap,
    )
    q_documents, k_documents = inputs.pair_of(documents)
    o = function.apply(
        q, k, v, q_documents, k_documents, sinks, *role_scales.values(), *observed.values()
    )
    return data.in_layout(layout, o)


def check_gradients(variant: str | Variant) -> None:
    """ValueError: a variant without a backward pass."""
    variant = data.by_name(variant)
    if variant.backward is None:
        names = ", ".join(
            name for name, other in data.VARIANTS.items() if other.backward is not None
        )
        raise ValueError(
            f"variant {variant.name!r} has no backward pass (A-1). Use one of {names}, "
            "attention.differentiated(variant, 'bf16') of fp8ref, or call under torch.no_grad()."
        )


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str | Variant,
    mask: Mask = FULL,
    scale: float | None = None,
    documents: Pair = None,
    scales: dict[str, Tensor] | None = None,
    seed: int = 0,
    arithmetic: Arithmetic = "fast",
    amax_group: str | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    keep_p: bool = False,
    keep_s: bool = False,
    layout: Layout = "bhtd",
) -> Result:
    """softmax(q k^T scale) v by a variant, with what it is made of. Not differentiable: ``apply``
    is.

    scale         of scores, rounded to float32; None: 1 / sqrt(D).
    documents     integers [B, T], or a pair of them for queries and keys: a query sees its own
                  document. A token whose document is negative is padding: it is not read, and its
                  output and gradients are 0.
    scales        {role: scale} of roles q, k, v, s, o: delayed scaling. The others come from the
                  tensors themselves; that of s from the amax 1.
    seed          of a rotated variant's signs.
    arithmetic    ``fast``: torch's own sums and functions, within a bound of the specification
                  (A-18); ``stated``: every operation in its order, exponentials in float64, rounded
                  (A-5).
    amax_group    name of a process group whose ranks have other sequences or heads of the same
                  tensors: they share the amaxes of whole tensors (P-2).
    softcap       scores become softcap tanh(score / softcap), before the mask; rounded to float32.
    sinks         [H] of high precision: a logit of each query head, which joins the sum of a row
                  and has no value.
    keep_p        return the codes of the probabilities, whose memory is quadratic.
    keep_s        return the scores, likewise.
    layout        of q, k, v and o: ``bhtd``, or ``bthd``, tokens before heads. All else in the
                  result has heads first.
    Shapes:   q [B, H, Tq, D], k and v [B, Hkv, Tk, D], Hkv dividing H; float32, float16 or
              bfloat16, on one device. See ``Result``.
    Order:    stated: the tiles' own (A-6); in a tile A-4 to A-9, with a promotion after each; at
              the end A-10, A-11. fast: A-18.
    Specials: a row that sees no key is 0, its lse -infinity, or its sink. NaN and infinities are
    not refused, since the
              host would wait for the device: all that shares a scale with one becomes NaN.
    Raises:   ValueError: an unknown variant; shapes, dtypes, devices or documents that do not fit;
              scales for roles without one; features that the variant does not take; a policy that
              this backend lacks; a softcap that is not positive; a scale or a softcap that is a
              tensor; sinks of another shape.
    Source:   spec A-1 to A-13, A-22, A-23.
    """
    q, k, v = data.heads_first(layout, q, k, v)
    spec, role_scales, shape, at = _prepared(
        q,
        k,
        v,
        variant,
        mask,
        scale,
        documents,
        scales,
        seed,
        arithmetic,
        amax_group,
        data.ROLES,
        softcap,
    )
    q, k, v = _without_padding(q, k, v, at)
    inputs.check_sinks(sinks, shape, q.device)
    if keep_p and (spec.variant.real or spec.variant.fmt.bits != 8):
        raise ValueError(
            f"keep_p keeps codes of FP8 probabilities; variant {spec.variant.name!r} has none. "
            "Leave it out."
        )
    if keep_s and spec.variant.real:
        raise ValueError(
            f"keep_s keeps scores in float32; variant {spec.variant.name!r} has real numbers. "
            "Leave it out."
        )
    keep = ["p_codes"] * keep_p + ["scores"] * keep_s
    with _full_precision(q):
        if spec.variant.real:
            result = _real(q, k, v, spec, shape, at, sinks)
        else:
            tensors = operands.quantize(q, k, v, spec, role_scales)
            run = output.run if spec.arithmetic == "fast" else attention_forward.run
            result = run(
                tensors, spec, shape, at, role_scales, report="all", keep=keep, sinks=sinks
            )
        return result._replace(o=data.in_layout(layout, result.o))


@torch.no_grad()
def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Result,
    *,
    variant: str | Variant,
    mask: Mask = FULL,
    scale: float | None = None,
    documents: Pair = None,
    scales: dict[str, Tensor] | None = None,
    arithmetic: Arithmetic = "fast",
    amax_group: str | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    keep: Collection[Matrix] = (),
    layout: Layout = "bhtd",
) -> Gradients:
    """The gradients of q, k and v, given that of o, with what they are made of.

    result        of ``forward``, with the same other arguments.
    scales        {role: scale} of roles do, ds, dq, dk, dv, and s: delayed scaling. The others come
                  from the tensors themselves.
    keep          the matrices to return, of p_codes, ds and ds_codes, whose memory is quadratic; of
                  MX blocks dS has no one code.
    layout        of do, q, k, v, the result's o and the gradients.
    Shapes:   do [B, H, Tq, D], as o; q, k, v as in ``forward``. See ``Gradients``.
    Order:    stated: A-14 to A-16, A-25; sums over keys are added tile by tile, in float32; over
              the heads of a group ascending. fast: A-18.
    Specials: a row that sees no key has no gradient. NaN and infinities as in ``forward``.
    Raises:   ValueError: a variant without a backward pass; what forward refuses; a do or a result
              of another shape; a result of another variant.
    Source:   spec A-14 to A-16.
    """
    check_gradients(variant)
    q, k, v, do = data.heads_first(layout, q, k, v, do)
    result = (
        result._replace(o=data.in_layout(layout, result.o))
        if isinstance(result, Result)
        else result
    )
    roles = ("s", *data.by_name(variant).roles[len(data.ROLES) :])
    spec, role_scales, shape, at = _prepared(
        q, k, v, variant, mask, scale, documents, scales, 0, arithmetic, amax_group, roles, softcap
    )
    inputs.check_sinks(sinks, shape, q.device)
    if not isinstance(result, Result) or result.o.shape != q.shape:
        raise ValueError(
            f"result is what forward gave for q {tuple(q.shape)}; got {type(result).__name__}."
        )
    data.check_result(spec.variant, result.tensors)
    inputs.check_tensor("do", do)
    if do.shape != q.shape:
        raise ValueError(f"do has the shape of o, {tuple(q.shape)}; got {tuple(do.shape)}.")
    inputs.check_kept(keep, spec.variant)
    q, k, v = _without_padding(q, k, v, at)
    do = inputs.without_padding(do, at.q)
    with _full_precision(q):
        if spec.variant.real:
            grads = _real_gradients(do, q, k, v, spec, shape, at, sinks)
        else:
            grads = _gradients(
                do, (q, k, v), result, spec, shape, at, role_scales, keep=keep, sinks=sinks
            )
    return grads._replace(
        **{role: data.in_layout(layout, getattr(grads, role)) for role in ("dq", "dk", "dv")}
    )


def _without_padding(
    q: Tensor, k: Tensor, v: Tensor, at: Documents
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with zeros for padding."""
    zeroed = inputs.without_padding
    return zeroed(q, at.q), zeroed(k, at.k), zeroed(v, at.k)


def _gradients(
    do: Tensor,
    tensors,
    result: Result,
    spec: Spec,
    shape: Shape,
    at: Documents,
    role_scales: dict[str, Tensor],
    *,
    keep,
    sinks,
) -> Gradients:
    """The gradients by the backward pass of a variant that is not real; tensors are q, k and v."""
    more: dict = {"report": "all", "keep": keep, "sinks": sinks}
    if spec.variant.backward == "bf16":
        return bf16.gradients(do, tensors, result.o, result.lse, spec, shape, at, **more)
    scale_p, scale_inv_p = (result.scale_p, result.scale_inv_p)
    if "s" in role_scales:
        scale_p, scale_inv_p = operands.probability_scale(spec.variant, role_scales, do.device)
    low = spec.variant.out.bits == 8
    o, o_scale_inv = (
        (result.tensors["o"].codes, result.tensors["o"].scale_inv)
        if low
        else (result.o.to(DTYPES[spec.variant.out.name]), None)
    )
    saved = Saved(result.tensors, o, o_scale_inv, result.lse, scale_p, scale_inv_p)
    if spec.variant.granularity == "mx_1x32":
        q, k, _ = tensors
        return mx.gradients(do, q, k, saved, spec, shape, at, **more)
    gradients = (fast if spec.arithmetic == "fast" else attention_gradients).gradients
    return gradients(do, saved, spec, shape, at, role_scales, **more)


def _full_precision(x: Tensor):
    """A context without autocast."""
    return (
        torch.autocast(x.device.type, enabled=False)
        if linear_input.autocast_dtype(x)
        else contextlib.nullcontext()
    )


def _prepared(
    q, k, v, variant, mask, scale, documents, scales, seed, arithmetic, amax_group, roles, softcap
):
    """The checked inputs of either pass."""
    options = {"seed": seed, "arithmetic": arithmetic, "amax_group": amax_group, "softcap": softcap}
    spec = Spec(variant=data.by_name(variant), mask=mask, scale=scale, **options)
    shape = inputs.check(q, k, v, spec)
    role_scales = inputs.check_scales(scales, spec.variant, roles, shape)
    at = attention_forward.padded_documents(*inputs.check_documents(documents, shape))
    return spec, role_scales, shape, at


def _real(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    shape: Shape,
    documents: Documents,
    sinks: Tensor | None,
) -> Result:
    """The variant ``exact``."""
    real = attention_real.forward(q, k, v, spec, shape, documents, sinks)
    o, lse = (
        operands.by_head(real.o, shape).float(),
        operands.by_head(real.lse[..., None], shape)[..., 0].float(),
    )
    unit = torch.ones((), device=q.device, dtype=torch.float32)
    shared = operands.share([x.detach().abs().amax().float() for x in (q, k, v, o)], spec)
    amaxes = dict(zip(("q", "k", "v", "o"), shared, strict=True)) | {"s": unit}
    return Result(
        o, lse, {}, amaxes, torch.zeros((), dtype=torch.int64, device=q.device), None, unit, unit
    )


def _real_gradients(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    shape: Shape,
    documents: Documents,
    sinks,
) -> Gradients:
    dq, dk, dv, largest, dsinks = attention_real.backward(
        do, q, k, v, spec, shape, documents, sinks
    )
    amaxes = operands.share([largest, *(x.abs().amax().float() for x in (do, dq, dk, dv))], spec)
    unit = torch.ones((), device=q.device, dtype=torch.float32)
    by_role = dict(zip(("ds", "do", "dq", "dk", "dv"), amaxes, strict=True))
    return Gradients(
        dq,
        dk,
        dv,
        {},
        by_role,
        torch.zeros((), dtype=torch.int64, device=q.device),
        Scales(unit, unit),
        dsinks=dsinks,
    )
