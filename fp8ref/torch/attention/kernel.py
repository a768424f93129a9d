"""FP8 attention by FlashAttention-3's kernel, forward (A-20); gradients are bfloat16 tiles (A-25).

    o, lse = attention_kernel.forward(q, k, v, mask=Mask(causal=True))
    o = attention_kernel.apply(q, k, v, variant=differentiated("fa3", "bf16"),
    mask=Mask(causal=True))   # differentiable

q, k and v are quantized here, with the bits of A-2; the kernel does all else. ``attention``
computes the same variant from tiles. FlashAttention-4's interface (commit 0251105) takes no scales
of FP8 operands.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from fp8ref.formats import E4M3FN
from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask, Variant
from fp8ref.torch.attention import observer
from fp8ref.torch.attention.gradients.gradients import gradients, in_bf16
from fp8ref.torch.attention.gradients.parts import Saved
from fp8ref.torch.attention.operands import inputs
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.problem import Problem, RankCall
from fp8ref.torch.tensors import linear_input

__all__ = ["VARIANTS", "apply", "forward", "library"]

VARIANTS = ("fa3", "fa3_promoted")
"""The variants that builds of FlashAttention-3 compute: which of both, the build decides."""

_INSTEAD = "Use fp8ref.torch.attention, which computes it tile by tile."


def apply(
    q: Tensor, k: Tensor, v: Tensor, *, variant: str | Variant | Call, mask: Mask | None = None
) -> Tensor:
    """softmax(q k^T scale) v by FlashAttention-3 in e4m3fn, differentiable once: its backward pass
    is A-25's, of the kernel's o and log-sum-exp.

    variant   ``fp8ref.spec.attention.variants.differentiated("fa3", "bf16")``, or of fa3_promoted;
              or a Call of one, whose arithmetic is that of the backward pass (A-18).
    Shapes:   as ``forward``; o of q's dtype.
    Raises:   as ``forward``; ValueError: a variant without that backward pass, for tensors that
              require gradients.
    Source:   spec A-20, A-25.
    """
    call = RankCall.resolve(variant, mask)
    fa3_variant = call.variant
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if fa3_variant.backward != "bf16" and differentiable:
        raise ValueError(
            f"FlashAttention-3 has no backward pass in FP8; got variant {fa3_variant.name!r} with "
            f"backward {fa3_variant.backward!r}. Give "
            "fp8ref.spec.attention.variants.differentiated(variant, 'bf16'), or call forward."
        )
    q, k, v = data.heads_first(call.layout, q, k, v)
    function = _function(dataclasses.replace(call, layout="bhtd"))
    return data.in_layout(call.layout, function.apply(q, k, v))


@functools.lru_cache(maxsize=256)
def _function(call: RankCall) -> type[torch.autograd.Function]:
    class KernelFunction(torch.autograd.Function):
        @staticmethod
        @linear_input.without_autocast
        def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.problem = Problem(call, inputs.check(q, k, v, call))
            ctx.dtypes, ctx.layer = [x.dtype for x in (q, k, v)], observer.layer()
            o, lse = forward(q, k, v, variant=call)
            ctx.save_for_backward(*map(in_bf16, (o, q, k, v)), lse)
            return o

        @staticmethod
        @linear_input.without_autocast
        def backward(ctx, do: Tensor) -> tuple[Tensor, ...]:
            if torch.is_grad_enabled():
                raise ValueError(
                    "FP8 attention gradients are not differentiated again; got create_graph=True."
                )
            o, q, k, v, lse = ctx.saved_tensors
            with observer.inside(ctx.layer):
                saved = Saved.from_inputs((q, k, v), o, lse)
                grads = gradients(do, saved, ctx.problem, report="nothing")
            return tuple(x.to(dtype) for x, dtype in zip(grads[:3], ctx.dtypes, strict=True))

    return KernelFunction


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str | Variant | Call = "fa3",
    mask: Mask | None = None,
    scales: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v by FlashAttention-3 in e4m3fn: (o, log-sum-exp). Not differentiable.

    variant   or a Call with its scale and layout: the kernel has no softcap here, keeps no matrices
              and has no context.
    scales    {role: scale} of q, k and v, float32 [B, Hkv, 1, 1]; the others come from the tensors
              themselves.
    Shapes:   q [B, H, Tq, D], k and v [B, Hkv, Tk, D], 16 dividing D; o [B, H, Tq, D] of q's dtype,
              lse float32 [B, H, Tq].
    Order:    of q, k and v A-2; of all else the kernel's.
    Raises:   ValueError: another variant; shapes, masks or options that the kernel does not take;
              tensors elsewhere than on a Hopper GPU. ImportError: flash_attn_interface is not
              installed.
    Source:   Dao-AILab/flash-attention, commit 01afd16, hopper/flash_attn_interface.py.
    """
    call = RankCall.resolve(variant, mask)
    mask, variant = call.mask, call.variant
    q, k, v = data.heads_first(call.layout, q, k, v)
    if variant.name not in VARIANTS or variant.fmt != E4M3FN or variant.granularity != "head":
        raise ValueError(
            f"FlashAttention-3 runs {' or '.join(VARIANTS)}; got {variant.name!r}. {_INSTEAD}"
        )
    for option in ("softcap", "keep_p", "keep_s", "keep_ds", "context"):
        if getattr(call, option):
            raise ValueError(
                f"FlashAttention-3 takes no {option}; got {getattr(call, option)!r}. {_INSTEAD}"
            )
    shape = inputs.check(q, k, v, call)
    if shape.features % 16 or mask.alignment != "end":
        raise ValueError(
            "FlashAttention-3 takes features in multiples of 16 and masks aligned to the end; got "
            f"{shape.features} and {mask}. {_INSTEAD}"
        )
    role_scales = inputs.check_scales(scales, variant, ("q", "k", "v"), shape)
    run = library(q.device)
    problem = Problem(call, shape, scales=role_scales)
    tensors = operands.quantize(q, k, v, problem, report="nothing").values()
    codes = (x.codes.transpose(1, 2) for x in tensors)  # [B, T, heads, D]
    q_descale, k_descale, v_descale = (x.scale_inv[:, :, 0, 0].contiguous() for x in tensors)
    left, right = mask.window or (None, None)
    window = -1 if left is None else left, -1 if right is None else right
    o, lse, *_ = run(
        *codes,
        softmax_scale=problem.softmax_scale,
        causal=mask.causal,
        window_size=window,
        return_attn_probs=True,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    return data.in_layout(call.layout, o.transpose(1, 2).to(q.dtype)), lse


def library(device: torch.device) -> Callable:
    """flash_attn_interface.flash_attn_func.

    Raises:   ValueError: another device than a Hopper GPU. ImportError: it is not installed.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        where = f"the {device.type.upper()}"
        if device.type == "cuda":
            where = torch.cuda.get_device_name(device)
        raise ValueError(
            f"FlashAttention-3's FP8 kernel needs a Hopper GPU; got tensors on {where}. {_INSTEAD}"
        )
    try:
        flash_attn_interface = importlib.import_module("flash_attn_interface")
    except ImportError as error:
        raise ImportError(
            "flash_attn_interface is not installed. Build hopper/ of Dao-AILab/flash-attention, or "
            "use fp8ref.torch.attention."
        ) from error
    return flash_attn_interface.flash_attn_func
