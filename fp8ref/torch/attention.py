"""Attention in FP8: softmax(q k^T scale) v, as a variant of ``fp8ref.attention`` computes it (SEMANTICS A).

    o = attention.apply(q, k, v, variant="cudnn", mask=Mask(causal=True))    # differentiable
    result = attention.forward(q, k, v, variant="cudnn")                     # with codes, scales and amaxes
    gradients = attention.backward(do, q, k, v, result, variant="cudnn")

Tensors are [batch, heads, tokens, features]. Tiles, roundings, scales and their order are the variant's; what sums
products is the library:

    FP8 codes       torch._scaled_mm, for each sequence and head of keys, with the query heads of that head as rows;
                    fast accumulation under the plan ``hopper_fast``. Within ``hardware.simulating``, its plan.
    MX blocks       a float32 GEMM of dequantized codes (G-16)
    bfloat16        a GEMM with a float32 result
    ``exact``       float64

A GEMM begins at +0. So probabilities times values are promoted after each tile, whatever ``promotion`` says: ``fa3``
is computed as ``fa3_promoted``, and ``fa4`` likewise.
"""

import contextlib
import dataclasses
import functools

import torch
from torch import Tensor

from fp8ref import attention as data
from fp8ref.attention import FULL, Mask, Variant
from fp8ref.torch import attention_forward, attention_gradients, attention_gradients_mx, attention_inputs, attention_real, linear_input
from fp8ref.torch import attention_operands as operands
from fp8ref.torch.attention_forward import Documents, Result
from fp8ref.torch.attention_gradients import Gradients, Saved
from fp8ref.torch.attention_inputs import Shape, Spec
from fp8ref.torch.elementary import Exponential
from fp8ref.torch.head_scaling import DTYPES, Heads
from fp8ref.torch.scales import Scales

_PLAIN = tuple(f.name for f in dataclasses.fields(Variant) if f.name not in ("tiles", "fmt", "out", "gradient_fmt", "source"))

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
    exponential: Exponential = "native",
    amax_group: str | None = None,
) -> Tensor:
    """softmax(q k^T scale) v by a variant, differentiable in q, k and v.

    scales        as in ``forward``; and of roles do, ds, dq, dk, dv, for the backward pass.
    Shapes:   as in ``forward``; o [B, H, Tq, D] of q's dtype.
    Order:    as in ``forward``; of the backward pass A-14 to A-16. o and gradients are rounded to the variant's
              format, then to q's, k's and v's dtypes.
    State:    q, k and v are kept for the backward pass as codes, beside o and the log-sum-exp; probabilities are
              computed again. ``exact`` and MX keep q, k and v themselves.
    Gradient: once; a backward pass with create_graph=True is refused.
    Specials: as in ``forward``.
    Raises:   ValueError: as ``forward``; a variant without a backward pass, for tensors that require gradients.
    Source:   SEMANTICS A.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        check_gradients(variant)
    given = scales or {}
    function = _function(variant, _values(variant), _values(mask), scale, seed, exponential, amax_group, tuple(given))
    of_q, of_k = documents if isinstance(documents, tuple) else (documents, documents)
    return function.apply(q, k, v, of_q, of_k, *given.values())


def check_gradients(variant: str | Variant) -> None:
    """ValueError: a variant without a backward pass."""
    variant = data.by_name(variant)
    if variant.backward is None:
        names = ", ".join(name for name, one in data.VARIANTS.items() if one.backward is not None)
        raise ValueError(f"variant {variant.name!r} has no backward pass (A-1). Use one of {names}, or call under torch.no_grad().")


def _values(x: object) -> tuple:
    """The fields of a Mask or Variant, as numbers and strings.

    Of one that is made where dynamo traces, dynamo hands on another of the same class, without its values (torch 2.13).
    What it reads of the fields is right.
    """
    if isinstance(x, Mask):
        return x.causal, x.window, x.alignment
    if not isinstance(x, Variant):
        return ()
    numbers = [(tiles.features, tiles.full, tiles.causal, tiles.local) for tiles in x.tiles]
    formats = [None if fmt is None else fmt.name for fmt in (x.fmt, x.out, x.gradient_fmt)]
    return *numbers, *formats, *[getattr(x, name, None) for name in _PLAIN]


@torch._dynamo.assume_constant_result
def _function(
    variant: str | Variant, values: tuple, of_mask: tuple, scale, seed: int, exponential, amax_group, roles: tuple[str, ...]
) -> type[torch.autograd.Function]:
    """The differentiable function of some constants, which a compiler does not trace."""
    if _values(variant) != values:
        raise ValueError(f"a Variant is made outside of what is compiled; got {values}, made inside. Make it once, before.")
    if not of_mask:
        raise ValueError("mask is a Mask of fp8ref.attention.")
    causal, window, alignment = of_mask
    mask = Mask(causal=causal, window=window, alignment=alignment)
    spec = Spec(variant=data.by_name(variant), mask=mask, scale=scale, seed=seed, exponential=exponential, amax_group=amax_group)
    return _bind(spec, roles)


@functools.cache
def _bind(spec: Spec, roles: tuple[str, ...]) -> type[torch.autograd.Function]:
    """q, k, v, documents of both, scales of these roles -> o, as an autograd.Function.

    A class for each spec: a compiled graph calls it with tensors only.
    """

    @torch._dynamo.allow_in_graph  # AOTAutograd traces into it
    class AttentionFunction(torch.autograd.Function):
        @staticmethod
        @linear_input.without_autocast
        def forward(ctx, q: Tensor, k: Tensor, v: Tensor, of_q: Tensor | None, of_k: Tensor | None, *scales: Tensor) -> Tensor:
            return _forward(ctx, spec, q, k, v, (of_q, of_k), dict(zip(roles, scales, strict=True)))

        @staticmethod
        @linear_input.without_autocast
        def backward(ctx, do: Tensor):
            return (*_backward(ctx, spec, roles, do), None, None, *(None for _ in roles))

    return AttentionFunction


def _forward(ctx, spec: Spec, q: Tensor, k: Tensor, v: Tensor, documents: tuple[Tensor | None, Tensor | None], scales: dict) -> Tensor:
    variant = spec.variant
    shape = attention_inputs.check(q, k, v, spec)
    roles = data.ROLES if variant.backward is None else (*data.ROLES, *data.GRADIENT_ROLES)
    given = attention_inputs.check_scales(scales, variant, roles, shape)
    pair = documents if documents[0] is not None and documents[1] is not None else None
    at = attention_forward.padded_documents(*attention_inputs.check_documents(pair, shape))  # type: ignore[arg-type]
    ctx.shape, ctx.dtypes = shape, (q.dtype, k.dtype, v.dtype)
    if variant.real:
        ctx.save_for_backward(q, k, v, *at)
        return operands.by_head(attention_real.forward(q, k, v, spec, shape, at).o, shape).float().to(q.dtype)
    tensors = operands.quantize(q, k, v, spec, given, report=False)
    result = attention_forward.run(tensors, spec, shape, at, given, report=False)
    o = result.o.to(q.dtype)
    if variant.backward is None:
        return o
    if variant.out.bits == 8:
        kept: tuple[Tensor | None, ...] = (result.tensors["o"].codes, result.tensors["o"].scale_inv)
    else:  # o itself, if it holds the output's numbers
        kept = (o if q.dtype in (torch.float32, DTYPES[variant.out.name]) else result.o.to(DTYPES[variant.out.name]), None)
    if variant.granularity == "mx_1x32":
        ctx.save_for_backward(*at, *scales.values(), *kept, result.lse, q, k, v)
    else:
        of_tensors = (x for role in ("q", "k", "v") for x in (tensors[role].codes, tensors[role].scale_inv))
        ctx.save_for_backward(*at, *scales.values(), *kept, result.lse, result.scale_p, result.scale_inv_p, *of_tensors)
    return o


def _backward(ctx, spec: Spec, roles: tuple[str, ...], do: Tensor) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled():  # autograd would follow neither codes nor scales
        raise ValueError("gradients of attention in FP8 are not differentiated again; got create_graph=True. Leave it out.")
    saved, shape = iter(ctx.saved_tensors), ctx.shape
    if spec.variant.real:
        q, k, v, *documents = saved
        found: tuple[Tensor, ...] = attention_real.backward(do, q, k, v, spec, shape, Documents(*documents))[:3]
    else:
        at, given = Documents(next(saved), next(saved)), {role: next(saved) for role in roles}
        o, o_scale_inv, lse = next(saved), next(saved), next(saved)
        one = torch.ones((), device=do.device)
        if spec.variant.granularity == "mx_1x32":
            q, k, v = saved
            kept = Saved(operands.quantize(q, k, v, spec, {}), o, None, lse, one, one)
            gradients = attention_gradients_mx.gradients(do, q, k, kept, spec, shape, at, report=False)
        else:
            scale_p, scale_inv_p = next(saved), next(saved)
            tensors = {role: Heads(next(saved), one, one, next(saved)) for role in ("q", "k", "v")}
            kept = Saved(tensors, o, o_scale_inv, lse, scale_p, scale_inv_p)
            given = {role: x for role, x in given.items() if role in data.GRADIENT_ROLES}
            gradients = attention_gradients.gradients(do, kept, spec, shape, at, given, report=False)
        found = gradients[:3]
    return tuple(x.to(dtype) for x, dtype in zip(found, ctx.dtypes, strict=True))


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
    exponential: Exponential = "native",
    amax_group: str | None = None,
    keep_p: bool = False,
) -> Result:
    """softmax(q k^T scale) v by a variant, with what it is made of. Not differentiable: ``apply`` is.

    scale         of scores, rounded to float32; None: 1 / sqrt(D).
    documents     integers [B, T], or a pair of them for queries and keys: a query sees its own document.
    scales        {role: scale} of roles q, k, v, s, o: delayed scaling. The others come from the tensors
                  themselves; that of s from the amax 1.
    seed          of a rotated variant's signs.
    exponential   ``native``: torch's float32 functions; ``rounded``: in float64, rounded (A-5).
    amax_group    name of a process group whose ranks have other sequences or heads of the same tensors: they
                  share the amaxes of whole tensors (P-2).
    keep_p        return the codes of the probabilities, whose memory is quadratic.
    Shapes:   q [B, H, Tq, D], k and v [B, Hkv, Tk, D], Hkv dividing H; float32, float16 or bfloat16, on one
              device. See ``Result``.
    Order:    the tiles' own (A-6); in a tile A-4 to A-9, with a promotion after each; at the end A-10, A-11.
    Specials: a row that sees no key is 0, its lse -infinity. NaN and infinities are not refused, since the
              host would wait for the device: all that shares a scale with one becomes NaN.
    Raises:   ValueError: an unknown variant; shapes, dtypes, devices or documents that do not fit; scales for
              roles without one; features that the variant does not take; a policy that this backend lacks.
    Source:   SEMANTICS A-1 to A-13.
    """
    spec, given, shape, at = _prepared(q, k, v, variant, mask, scale, documents, scales, seed, exponential, amax_group, data.ROLES)
    if keep_p and (spec.variant.real or spec.variant.fmt.bits != 8):
        raise ValueError(f"keep_p keeps codes of FP8 probabilities; variant {spec.variant.name!r} has none. Leave it out.")
    with _full_precision(q):
        if spec.variant.real:
            return _real(q, k, v, spec, shape, at)
        tensors = operands.quantize(q, k, v, spec, given)
        return attention_forward.run(tensors, spec, shape, at, given, report=True, keep_p=keep_p)


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
    exponential: Exponential = "native",
    amax_group: str | None = None,
) -> Gradients:
    """The gradients of q, k and v, given that of o, with what they are made of.

    result        of ``forward``, with the same other arguments.
    scales        {role: scale} of roles do, ds, dq, dk, dv, and s: delayed scaling. The others come from the
                  tensors themselves.
    Shapes:   do [B, H, Tq, D], as o; q, k, v as in ``forward``. See ``Gradients``.
    Order:    A-14 to A-16; sums over keys are added tile by tile, in float32; over the heads of a group ascending.
    Specials: a row that sees no key has no gradient. NaN and infinities as in ``forward``.
    Raises:   ValueError: a variant without a backward pass; what forward refuses; a do or a result of another shape.
    Source:   SEMANTICS A-14 to A-16.
    """
    check_gradients(variant)
    roles = ("s", *data.GRADIENT_ROLES)
    spec, given, shape, at = _prepared(q, k, v, variant, mask, scale, documents, scales, 0, exponential, amax_group, roles)
    if not isinstance(result, Result) or result.o.shape != q.shape:
        raise ValueError(f"result is what forward gave for q {tuple(q.shape)}; got {type(result).__name__}.")
    attention_inputs.check_tensor("do", do)
    if do.shape != q.shape:
        raise ValueError(f"do has the shape of o, {tuple(q.shape)}; got {tuple(do.shape)}.")
    with _full_precision(q):
        if spec.variant.real:
            return _real_gradients(do, q, k, v, spec, shape, at)
        scale_p, scale_inv_p = (result.scale_p, result.scale_inv_p)
        if "s" in given:
            scale_p, scale_inv_p = operands.probability_scale(spec.variant, given, q.device)
        low = spec.variant.out.bits == 8
        o, of_o = (result.tensors["o"].codes, result.tensors["o"].scale_inv) if low else (result.o.to(DTYPES[spec.variant.out.name]), None)
        saved = Saved(result.tensors, o, of_o, result.lse, scale_p, scale_inv_p)
        if spec.variant.granularity == "mx_1x32":
            return attention_gradients_mx.gradients(do, q, k, saved, spec, shape, at, report=True)
        return attention_gradients.gradients(do, saved, spec, shape, at, given, report=True)


def _full_precision(x: Tensor):
    """A context without autocast."""
    return torch.autocast(x.device.type, enabled=False) if linear_input.autocast_dtype(x) else contextlib.nullcontext()


def _prepared(q, k, v, variant, mask, scale, documents, scales, seed, exponential, amax_group, roles):
    """The checked inputs of either pass."""
    spec = Spec(variant=data.by_name(variant), mask=mask, scale=scale, seed=seed, exponential=exponential, amax_group=amax_group)
    shape = attention_inputs.check(q, k, v, spec)
    given = attention_inputs.check_scales(scales, spec.variant, roles, shape)
    at = attention_forward.padded_documents(*attention_inputs.check_documents(documents, shape))
    return spec, given, shape, at


def _real(q: Tensor, k: Tensor, v: Tensor, spec: Spec, shape: Shape, documents: Documents) -> Result:
    """The variant ``exact``."""
    real = attention_real.forward(q, k, v, spec, shape, documents)
    o, lse = operands.by_head(real.o, shape).float(), operands.by_head(real.lse[..., None], shape)[..., 0].float()
    one = torch.ones((), device=q.device)
    found = operands.share([x.detach().abs().amax().float() for x in (q, k, v, o)], spec)
    amaxes = dict(zip(("q", "k", "v", "o"), found, strict=True)) | {"s": one}
    return Result(o, lse, {}, amaxes, torch.zeros((), dtype=torch.int64, device=q.device), None, one, one)


def _real_gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: Spec, shape: Shape, documents: Documents) -> Gradients:
    dq, dk, dv, largest = attention_real.backward(do, q, k, v, spec, shape, documents)
    amaxes = operands.share([largest, *(x.abs().amax().float() for x in (do, dq, dk, dv))], spec)
    one = torch.ones((), device=q.device)
    by_role = dict(zip(("ds", "do", "dq", "dk", "dv"), amaxes, strict=True))
    return Gradients(dq, dk, dv, {}, by_role, torch.zeros((), dtype=torch.int64, device=q.device), Scales(one, one))
