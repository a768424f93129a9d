"""The backward pass of attention whose operands have MX blocks (spec A-16).

A block lies along the axis that a product sums over, so that q, k, do and dS are quantized twice.
Products are float32 GEMMs of dequantized codes (G-16).
"""

from collections.abc import Collection

import torch
from torch import Tensor

from fp8ref.spec.attention.products import Role
from fp8ref.spec.attention.variants import Variant
from fp8ref.torch.attention import output as forward
from fp8ref.torch.attention import sinks as attention_sinks
from fp8ref.torch.attention.gradients.gradients import (
    Gradients,
    Raw,
    Saved,
    add_heads,
    again,
    by_rows,
    products_of_heads,
    rounded,
    rows_of,
    score_gradients,
    sums_of_rows,
    tokens_of,
)
from fp8ref.torch.attention.observer import multiplying
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import MX, Heads, pad
from fp8ref.torch.attention.operands.inputs import Report, Shape, Spec
from fp8ref.torch.attention.operands.kept import Kept, Matrix
from fp8ref.torch.attention.output import Documents
from fp8ref.torch.quantize import cast
from fp8ref.torch.quantize.scales import Scales

P_SCALE = 256.0
"""What P is multiplied by before its cast."""


def gradients(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    saved: Saved,
    spec: Spec,
    shape: Shape,
    documents: Documents,
    *,
    report: Report,
    keep: Collection[Matrix] = (),
    sinks: Tensor | None = None,
) -> Gradients:
    """The pass, of what a forward pass saved, and its q and k in high precision.

    Order:    A-16; sums over keys are added tile by tile, in float32.
    """
    variant, device, tensors = spec.variant, do.device, saved.tensors
    fmt = variant.gradient_fmt or variant.fmt
    token_operands: tuple[tuple[Role, Tensor], ...] = (("q", q), ("k", k), ("do", do))
    along = {role: along_tokens(x, role, variant, shape) for role, x in token_operands}
    amax = heads.amax(do, "mx_1x32", heads=shape.key_heads)
    do_features = heads.quantize(do, fmt, "mx_1x32", variant.policy, amax_of_groups=amax)
    do_rows = operands.grouped(heads.dequantize(do_features), shape, MX)
    do_tokens, q_tokens = (
        tokens_of(operands.grouped(_tokens(along[name]), shape, MX)) for name in ("do", "q")
    )
    k_tokens = operands.along_tokens(_tokens(along["k"]))
    q8, k8 = (
        operands.grouped(heads.dequantize(tensors["q"]), shape, MX),
        operands.along_features(heads.dequantize(tensors["k"])),
    )
    v8 = operands.along_features(heads.dequantize(tensors["v"], along_tokens=True))
    lse = rows_of(saved.lse, shape, MX)
    short = heads.rounded(do, variant.out)
    d = sums_of_rows(
        operands.grouped(short, shape, MX),
        operands.grouped(saved.o, shape, MX),
        shape.features,
        spec.arithmetic,
    )
    dq = torch.zeros(*q8.shape[:-1], k8.shape[-1], device=device, dtype=torch.float32)
    dk, dv = torch.zeros_like(k8), torch.zeros_like(k8)
    largest, saturated = (
        torch.zeros((), device=device, dtype=torch.float32),
        torch.zeros((), dtype=torch.int64, device=device),
    )
    lost = torch.zeros_like(saturated)
    kept = Kept(keep, (*q8.shape[:-1], k8.shape[2]), device)
    for tile in operands.tiles(spec, shape, MX):
        s = forward.scores(q8, k8, tile, variant)
        p, slope = again(s, lse[:, :, tile.rows], tile, tensors, spec, shape, documents)
        p8 = cast.to_fp8(p * P_SCALE, variant.fmt)
        with multiplying("grad_probabilities"):
            dp = operands.products(
                do_rows[:, :, tile.rows].flatten(2, 3), v8[:, :, tile.keys], variant
            ).view(p.shape)
        ds = score_gradients(dp - d[:, :, tile.rows, :, None], p, slope, spec, shape)
        at = (slice(None), slice(None), tile.rows, slice(None), tile.keys)
        kept.put("p_codes", at, p8)
        kept.put("ds", at, ds)
        if report != "nothing":
            largest = torch.maximum(largest, ds.abs().amax())
        if report == "all":
            saturated = saturated + heads.above_range(p * P_SCALE, variant.fmt).sum()
        add_heads(
            dv, products_of_heads("grad_v", p8.float() / P_SCALE, do_tokens, tile, variant), tile
        )
        low = _quantize(ds, 4, variant)
        if report == "all":
            lost = lost + forward.count_lost(ds, low, fmt)
        with multiplying("grad_q"):
            dq_tile = operands.products(low.flatten(2, 3), k_tokens[:, :, :, tile.keys], variant)
        dq[:, :, tile.rows] = dq[:, :, tile.rows] + dq_tile.view(*ds.shape[:-1], -1)
        add_heads(
            dk,
            products_of_heads("grad_k", _quantize(ds, 2, variant), q_tokens, tile, variant),
            tile,
        )
    if report != "nothing":
        (largest,) = operands.share([largest], spec)
    unit = torch.ones((), device=device, dtype=torch.float32)
    keys = (slice(None), slice(None), slice(shape.keys), slice(shape.features))
    raw = Raw(operands.by_head(dq, shape), dk[keys], dv[keys])
    grads = rounded(
        raw, do_features, largest, saturated, Scales(unit, unit), spec, {}, report=report
    )
    dsinks = (
        None
        if sinks is None
        else attention_sinks.gradient(by_rows(d, shape), saved.lse, sinks, spec)
    )
    return grads._replace(
        matrices=kept.all(shape), dsinks=dsinks, lost=lost, saturated_ds=torch.zeros_like(lost)
    )


def along_tokens(x: Tensor, role: Role, variant: Variant, shape: Shape) -> Heads:
    """q, k or do as a product over tokens takes it: with blocks along them."""
    fmt = (variant.gradient_fmt or variant.fmt) if role == "do" else variant.fmt
    amax = heads.amax(x, "mx_1x32", heads=shape.key_heads, along_tokens=True)
    return heads.quantize(x, fmt, "mx_1x32", variant.policy, amax_of_groups=amax, along_tokens=True)


def _tokens(x: Heads) -> Tensor:
    return heads.dequantize(x, along_tokens=True)


def _quantize(ds: Tensor, dim: int, variant: Variant) -> Tensor:
    """dS [B, Hkv, rows, G, keys], quantized in blocks of 32 along a dim, and dequantized."""
    size, fmt = ds.shape[dim], variant.gradient_fmt or variant.fmt
    blocks = pad(ds, dim, MX).unflatten(dim, (-1, MX))
    scale, scale_inv = heads.scales_of(
        blocks.abs().amax(dim + 1, keepdim=True), fmt, variant.policy
    )
    low = cast.to_fp8(blocks * scale, fmt).float() * scale_inv
    return low.flatten(dim, dim + 1).narrow(dim, 0, size)
