"""Attention whose operands are cast one by one: whole float32 matrices, without tiles (spec E-9).

o = apply(q, k, v, casts)          # differentiable
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fp8ref.selection.attention_casts import Casts
from fp8ref.torch.attention.operands import heads as head_scaling
from fp8ref.torch.quantize import scaling
from fp8ref.torch.tensors import linear_input


def apply(q: Tensor, k: Tensor, v: Tensor, casts: Casts) -> Tensor:
    """Causal attention of q [B, H, T, D], k and v [B, Hkv, T, D], of q's dtype. ValueError for a
    second derivative.

    Order:    products are of float32 numbers, under torch.autocast too, and whatever float32
              precision torch.backends says.
    """
    return _Attention.apply(q, k, v, casts)


@contextlib.contextmanager
def _precise() -> Iterator[None]:
    """In this context torch multiplies float32 without TF32 or bfloat16."""
    settings = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def _in_float32(pass_: Callable) -> Callable:
    """Wrap a forward or backward pass (ctx, tensor, ...) that computes in float32."""

    @functools.wraps(pass_)
    def run(*arguments):
        with _precise():
            return pass_(*arguments)

    return linear_input.without_autocast(run)


class _Attention(torch.autograd.Function):
    """Attention of [B, Hkv, G, T, ...]; G: the query heads of a key head."""

    @staticmethod
    @_in_float32
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, casts: Casts) -> Tensor:
        ctx.casts, ctx.dtypes, heads = casts, (q.dtype, k.dtype, v.dtype), k.shape[1]
        cast = [_cast(x, role, casts) for x, role in ((q, "q"), (k, "k"), (v, "v"))]
        q, k, v = cast[0].unflatten(1, (heads, -1)), *(x[:, :, None] for x in cast[1:])
        s = q @ k.mT / math.sqrt(q.shape[-1])
        unseen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(unseen, -torch.inf)
        e = (s - s.amax(-1, keepdim=True)).exp()
        total = e.sum(-1, keepdim=True)
        o = _cast(e, "p", casts) @ v / total
        ctx.save_for_backward(q, k, v, e / total, o)
        return o.flatten(1, 2).to(ctx.dtypes[0])

    @staticmethod
    @_in_float32
    def backward(ctx, grad: Tensor):
        if torch.is_grad_enabled():  # autograd would not follow casts
            raise ValueError(
                "gradients of single casts are not differentiated again; got create_graph=True."
            )
        q, k, v, p, o = ctx.saved_tensors
        do = _cast(grad, "do", ctx.casts).unflatten(1, q.shape[1:3])
        dv = (_cast(p, "p", ctx.casts).mT @ do).sum(2)
        d = (do * o).sum(-1, keepdim=True)
        ds = _cast((do @ v.mT - d) * p / math.sqrt(q.shape[-1]), "ds", ctx.casts)
        dq, dk = (ds @ k).flatten(1, 2), (ds.mT @ q).sum(2)
        return *(x.to(dtype) for x, dtype in zip((dq, dk, dv), ctx.dtypes, strict=True)), None


def _cast(x: Tensor, role: str, casts: Casts) -> Tensor:
    """x in float32, cast if its role is; P by the scale of amax 1 (A-8)."""
    x = x.float()
    if role not in casts.roles:
        return x
    fmt = casts.variant.format_of(role)
    amax = x.new_ones(()) if role == "p" else scaling.amax(x)
    scale, _ = head_scaling.scales_of(amax, fmt, casts.variant.policy)
    return scaling.dequantize(scaling.quantize_with(x, scale, fmt))
