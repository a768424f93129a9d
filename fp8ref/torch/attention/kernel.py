"""Attention in FP8 by FlashAttention-3's own kernel, forward (spec A-20); its gradients are tiles
in bfloat16 (A-25).

    o, lse = attention_kernel.forward(q, k, v, mask=Mask(causal=True))
    o = attention_kernel.apply(q, k, v, variant=differentiated("fa3", "bf16"),
    mask=Mask(causal=True))   # differentiable

q, k and v are quantized here, with the bits of A-2; the kernel does all else. ``attention``
computes the same variant from tiles. FlashAttention-4's interface (commit 0251105) takes no scales
of FP8 operands.
"""

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from fp8ref.formats import E4M3FN
from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.variants import FULL, Arithmetic, Layout, Mask, Variant
from fp8ref.torch.attention import observer
from fp8ref.torch.attention.gradients import bf16
from fp8ref.torch.attention.operands import inputs
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.inputs import Spec
from fp8ref.torch.attention.output import Documents
from fp8ref.torch.tensors import linear_input

VARIANTS = ("fa3", "fa3_promoted")
"""The variants that builds of FlashAttention-3 compute: which of both, the build decides."""

_INSTEAD = "Use fp8ref.torch.attention, which computes it tile by tile."


def apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str | Variant,
    mask: Mask = FULL,
    scale: float | None = None,
    arithmetic: Arithmetic = "fast",
    layout: Layout = "bhtd",
) -> Tensor:
    """softmax(q k^T scale) v by FlashAttention-3 in e4m3fn, differentiable once: its backward pass
    is A-25's, of the kernel's o and log-sum-exp.

    variant       ``attention.differentiated("fa3", "bf16")`` of fp8ref, or of fa3_promoted.
    arithmetic    of the backward pass (A-18).
    layout        of q, k, v and o, as in ``forward``.
    Shapes:   as ``forward``; o of q's dtype.
    Raises:   as ``forward``; ValueError: a variant without that backward pass, for tensors that
              require gradients.
    Source:   spec A-20, A-25.
    """
    fa3_variant = data.by_name(variant)
    if (
        fa3_variant.backward != "bf16"
        and torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or v.requires_grad)
    ):
        raise ValueError(
            f"FlashAttention-3 has no backward pass in FP8; got variant {fa3_variant.name!r} with "
            f"backward {fa3_variant.backward!r}. Give attention.differentiated(variant, 'bf16') of "
            "fp8ref, or call forward."
        )
    q, k, v = data.heads_first(layout, q, k, v)
    function = _function(Spec(variant=fa3_variant, mask=mask, scale=scale, arithmetic=arithmetic))
    return data.in_layout(layout, function.apply(q, k, v))


@functools.lru_cache(maxsize=256)
def _function(spec: Spec) -> type[torch.autograd.Function]:
    class KernelFunction(torch.autograd.Function):
        @staticmethod
        @linear_input.without_autocast
        def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.shape, ctx.dtypes = inputs.check(q, k, v, spec), [x.dtype for x in (q, k, v)]
            ctx.layer = observer.layer()
            o, lse = forward(q, k, v, variant=spec.variant, mask=spec.mask, scale=spec.scale)
            ctx.save_for_backward(*map(bf16.rounded, (o, q, k, v)), lse)
            return o

        @staticmethod
        @linear_input.without_autocast
        def backward(ctx, do: Tensor) -> tuple[Tensor, ...]:
            if torch.is_grad_enabled():
                raise ValueError(
                    "gradients of attention in FP8 are not differentiated again; got "
                    "create_graph=True. Leave it out."
                )
            o, q, k, v, lse = ctx.saved_tensors
            with observer.inside(ctx.layer):
                gradients = bf16.gradients(
                    do, (q, k, v), o, lse, spec, ctx.shape, Documents(None, None), report="nothing"
                )
            return tuple(x.to(dtype) for x, dtype in zip(gradients[:3], ctx.dtypes, strict=True))

    return KernelFunction


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str | Variant = "fa3",
    mask: Mask = FULL,
    scale: float | None = None,
    scales: dict[str, Tensor] | None = None,
    layout: Layout = "bhtd",
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v by FlashAttention-3 in e4m3fn: (o, log-sum-exp). Not differentiable.

    scales    {role: scale} of q, k and v, float32 [B, Hkv, 1, 1]; the others come from the tensors
              themselves.
    layout    of q, k, v and o: ``bhtd``, or ``bthd``, tokens before heads.
    Shapes:   q [B, H, Tq, D], k and v [B, Hkv, Tk, D], 16 dividing D; o [B, H, Tq, D] of q's dtype,
              lse float32 [B, H, Tq].
    Order:    of q, k and v A-2; of all else the kernel's.
    Raises:   ValueError: another variant; shapes or masks that the kernel does not take; tensors
              elsewhere than on a Hopper GPU. ImportError: flash_attn_interface is not installed.
    Source:   Dao-AILab/flash-attention, commit 01afd16, hopper/flash_attn_interface.py.
    """
    variant = data.by_name(variant)
    q, k, v = data.heads_first(layout, q, k, v)
    if variant.name not in VARIANTS or variant.fmt != E4M3FN or variant.granularity != "head":
        raise ValueError(
            f"FlashAttention-3 computes {' or '.join(VARIANTS)}; got variant {variant.name!r}. "
            f"{_INSTEAD}"
        )
    spec = Spec(variant=variant, mask=mask, scale=scale)
    shape = inputs.check(q, k, v, spec)
    if shape.features % 16 or mask.alignment != "end":
        raise ValueError(
            "FlashAttention-3 takes features in multiples of 16, and masks that are aligned to "
            f"the end; got {shape.features} and {mask}. {_INSTEAD}"
        )
    role_scales = inputs.check_scales(scales, variant, ("q", "k", "v"), shape)
    run = library(q.device)
    tensors = operands.quantize(q, k, v, spec, role_scales, report="nothing")
    codes = (tensors[role].codes.transpose(1, 2) for role in ("q", "k", "v"))  # [B, T, heads, D]
    descales = {
        f"{role}_descale": tensors[role].scale_inv[:, :, 0, 0].contiguous()
        for role in ("q", "k", "v")
    }
    left, right = mask.window or (None, None)
    window = -1 if left is None else left, -1 if right is None else right
    o, lse, *_ = run(
        *codes,
        softmax_scale=spec.softmax_scale(shape.features),
        causal=mask.causal,
        window_size=window,
        return_attn_probs=True,
        **descales,
    )
    return data.in_layout(layout, o.transpose(1, 2).to(q.dtype)), lse


def library(device: torch.device) -> Callable:
    """flash_attn_interface.flash_attn_func.

    Raises:   ValueError: another device than a Hopper GPU. ImportError: it is not installed.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        where = (
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"the {device.type.upper()}"
        )
        raise ValueError(
            f"FlashAttention-3's FP8 kernel needs a Hopper GPU; the tensors are on {where}. "
            f"{_INSTEAD}"
        )
    try:
        flash_attn_interface = importlib.import_module("flash_attn_interface")
    except ImportError as error:
        raise ImportError(
            "FlashAttention-3's kernel is in flash_attn_interface, which is not installed. "
            "Build hopper/ of Dao-AILab/flash-attention, or use fp8ref.torch.attention."
        ) from error
    return flash_attn_interface.flash_attn_func
