"""Attention whose operands are cast one by one: whole matrices in float32, without tiles (spec E-9).

o = apply(q, k, v, casts)          # differentiable
"""

import math

import torch
from torch import Tensor

from fp8ref import attention_casts as data
from fp8ref.attention_casts import Casts
from fp8ref.formats import Format
from fp8ref.torch import head_scaling, scaling


def apply(q: Tensor, k: Tensor, v: Tensor, casts: Casts) -> Tensor:
    """Causal attention of q [B, H, T, D], k and v [B, Hkv, T, D], of q's dtype."""
    return _Attention.apply(q, k, v, casts)


class _Attention(torch.autograd.Function):
    """Tensors are [B, Hkv, G, T, ...]: the query heads of a head of keys are a dim."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, casts: Casts) -> Tensor:
        ctx.casts, ctx.dtypes, heads = casts, (q.dtype, k.dtype, v.dtype), k.shape[1]
        cast = [_cast(x, role, casts) for x, role in ((q, "q"), (k, "k"), (v, "v"))]
        q, k, v = cast[0].unflatten(1, (heads, -1)), *(x[:, :, None] for x in cast[1:])
        s = q @ k.mT / math.sqrt(q.shape[-1])
        unseen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(unseen, -torch.inf)
        e = (s - s.amax(-1, keepdim=True)).exp()
        total = e.sum(-1, keepdim=True)
        o = _probabilities(e, casts) @ v / total
        ctx.save_for_backward(q, k, v, e / total, o)
        return o.flatten(1, 2).to(ctx.dtypes[0])

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, p, o = ctx.saved_tensors
        do = _cast(grad, "do", ctx.casts).unflatten(1, q.shape[1:3])
        dv = (_probabilities(p, ctx.casts).mT @ do).sum(2)
        d = (do * o).sum(-1, keepdim=True)
        ds = _cast((do @ v.mT - d) * p / math.sqrt(q.shape[-1]), "ds", ctx.casts)
        dq, dk = (ds @ k).flatten(1, 2), (ds.mT @ q).sum(2)
        return *(x.to(dtype) for x, dtype in zip((dq, dk, dv), ctx.dtypes, strict=True)), None


def _cast(x: Tensor, role: str, casts: Casts) -> Tensor:
    """A tensor after its cast by its own amax, if it has one, in float32."""
    x = x.float()
    return _by(scaling.amax(x), x, data.fmt(role, casts), casts) if role in casts.roles else x


def _probabilities(p: Tensor, casts: Casts) -> Tensor:
    """Probabilities after the cast by the scale of the amax 1 (A-8), if they have one."""
    return _by(torch.ones((), device=p.device), p, casts.variant.fmt, casts) if "p" in casts.roles else p


def _by(amax: Tensor, x: Tensor, fmt: Format, casts: Casts) -> Tensor:
    scale, _ = head_scaling.scales_of(amax, fmt, casts.variant.policy)
    return scaling.dequantize(scaling.quantize_with(x, scale, fmt))
