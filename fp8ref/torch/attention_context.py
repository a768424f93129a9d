"""Attention of ranks that have parts of the tokens: context parallelism (spec A-21).

    o = attention_context.apply(q, k, v, group=mesh["context"].get_group().group_name, variant="cudnn", mask=Mask(causal=True))

Rank r of n has tokens r T / n to below (r + 1) T / n of q, k and v. Codes of k and v are gathered, a byte an element; then each
rank's queries meet all tiles in the variant's order, as on one device. Gradients of k and v are summed in the ranks' order.
"""

import dataclasses
import functools

import torch
from torch import Tensor, distributed

from fp8ref import attention as data
from fp8ref.attention import FULL, Arithmetic, Mask, Variant
from fp8ref.torch import (
    attention,
    attention_fast,
    attention_fast_gradients,
    attention_forward,
    attention_gradients,
    attention_inputs,
    attention_operands,
    linear_input,
)
from fp8ref.torch.attention_forward import Documents
from fp8ref.torch.attention_gradients import Saved
from fp8ref.torch.attention_inputs import Shape, Spec
from fp8ref.torch.head_scaling import DTYPES, Heads


def apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: str,
    variant: str | Variant,
    mask: Mask = FULL,
    scale: float | None = None,
    arithmetic: Arithmetic = "fast",
    amax_group: str | None = None,
) -> Tensor:
    """softmax(q k^T scale) v of this rank's queries and all ranks' keys, differentiable once.

    group         name of the process group of the ranks that have the parts of the tokens, in the order of the tokens.
    amax_group    name of the group of all ranks that share the amaxes of whole tensors; None: ``group``.
    Shapes:   q [B, H, T / n, D], k and v [B, Hkv, T / n, D], the same on every rank; o as q.
    Order:    as ``attention.apply``. Of q, k, v, o, the log-sum-exp and dq each row is computed as on one device; dk and dv are sums of
              the ranks' parts, in their order, before they are rounded.
    Raises:   ValueError: as ``attention.apply``; a variant whose scales belong to heads or blocks; parts of other lengths.
    Source:   spec A-21.
    """
    known = data.by_name(variant)
    if known.real or known.granularity not in ("tensor", None):
        raise ValueError(
            f"context parallelism takes one scale for a tensor, or none; variant {known.name!r} has scales of "
            f"{known.granularity or 'real numbers'}. Use 'cudnn' or 'bf16', or cut sequences and heads instead (amax_group)."
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        attention.check_gradients(known)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"context parallelism cuts queries and keys alike; got {q.shape[2]} queries and {k.shape[2]} keys on a rank.")
    spec = Spec(variant=known, mask=mask, scale=scale, arithmetic=arithmetic, amax_group=amax_group or group, context=group)
    return _function(spec).apply(q, k, v)


@functools.cache
def _function(spec: Spec) -> type[torch.autograd.Function]:
    class ContextFunction(torch.autograd.Function):
        @staticmethod
        @linear_input.without_autocast
        def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _forward(ctx, spec, q, k, v)

        @staticmethod
        @linear_input.without_autocast
        def backward(ctx, do: Tensor):
            return _backward(ctx, spec, do)

    return ContextFunction


def _forward(ctx, spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attention_inputs.check(q, k, v, spec)
    spec, shape = _placed(spec, q, k)
    tensors = attention_operands.quantize(q, k, v, spec, {}, report="nothing")
    run = attention_fast.run if spec.arithmetic == "fast" else attention_forward.run
    result = run(_gathered(tensors, spec), spec, shape, Documents(None, None), {}, report="nothing")
    o = result.o.to(q.dtype)
    ctx.shape, ctx.dtypes, ctx.spec = shape, (q.dtype, k.dtype, v.dtype), spec
    if spec.variant.out.bits == 8:
        kept: tuple[Tensor | None, ...] = (result.tensors["o"].codes, result.tensors["o"].scale_inv)
    else:
        kept = (result.o.to(DTYPES[spec.variant.out.name]), None)
    own = (x for role in ("q", "k", "v") for x in (tensors[role].codes, tensors[role].scale_inv))
    ctx.save_for_backward(*kept, result.lse, result.scale_p, result.scale_inv_p, *own)
    return o


def _backward(ctx, spec: Spec, do: Tensor) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled():
        raise ValueError("gradients of attention in FP8 are not differentiated again; got create_graph=True. Leave it out.")
    o, o_scale_inv, lse, scale_p, scale_inv_p, *own = ctx.saved_tensors
    one, pieces = torch.ones((), device=do.device), iter(own)
    tensors = {role: Heads(next(pieces), one, one, next(pieces)) for role in ("q", "k", "v")}
    saved = Saved(_gathered(tensors, ctx.spec), o, o_scale_inv, lse, scale_p, scale_inv_p)
    of_pass = attention_fast_gradients if ctx.spec.arithmetic == "fast" else attention_gradients
    found = of_pass.gradients(do, saved, ctx.spec, ctx.shape, Documents(None, None), {}, report="nothing")
    return tuple(x.to(dtype) for x, dtype in zip(found[:3], ctx.dtypes, strict=True))


def _placed(spec: Spec, q: Tensor, k: Tensor) -> tuple[Spec, Shape]:
    """The spec of this rank's queries, and the shape of its problem: all ranks' keys."""
    group = spec.ranks
    (b, h, t, d), heads = q.shape, k.shape[1]
    return dataclasses.replace(spec, first=group.rank() * t), Shape(b, h, heads, t, group.size() * t, d)


def _gathered(tensors: dict[str, Heads], spec: Spec) -> dict[str, Heads]:
    """The tensors with the codes of k and v of all ranks, along the tokens."""
    return {role: x if role == "q" else x._replace(codes=_all(x.codes, spec)) for role, x in tensors.items()}


def _all(codes: Tensor, spec: Spec) -> Tensor:
    """[B, Hkv, T / n, D] of each rank as [B, Hkv, T, D], as bytes."""
    group = spec.ranks
    own = codes.contiguous().view(torch.uint8)
    found = [torch.empty_like(own) for _ in range(group.size())]
    distributed.all_gather(found, own, group=group)
    return torch.cat([x.view(codes.dtype) for x in found], dim=2)
