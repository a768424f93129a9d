"""Products of attention in the stated form, by names for proofs of a run (spec A-4, A-9, A-15)."""

import torch
from torch import Tensor

from fp8ref.spec.attention.products import Product
from fp8ref.spec.attention.variants import Variant
from fp8ref.torch.attention.observer import multiplying
from fp8ref.torch.attention.operands.operands import Tile
from fp8ref.torch.gemm import batched as batched_gemm
from fp8ref.torch.quantize import cast


def matmul(a: Tensor, b: Tensor, variant: Variant) -> Tensor:
    """Sums of products over the last axis: [..., M, K] and [..., N, K] make float32 [..., M, N].

    Order:    that of the library. FP8 codes: a GEMM for each of [...], as torch._scaled_mm takes
              matrices. Numbers of higher precision: one batched GEMM, in float32, or float64.
    """
    codes = a.dtype in cast.FORMATS
    if not codes and not (a.dtype == torch.bfloat16 and a.is_cuda):
        wide = torch.float64 if a.dtype == torch.float64 else torch.float32
        return torch.matmul(a.to(wide), b.to(wide).transpose(-1, -2))
    matrices, others, fast = a.flatten(0, -3), b.flatten(0, -3), variant.plan == "hopper_fast"
    if codes:
        sums = batched_gemm.loop(matrices, others, None, fast)
    else:
        sums = batched_gemm.products(matrices, others, fast=fast)
    return sums.view(*a.shape[:-1], b.shape[-2])


def rows(product: Product, x: Tensor, other: Tensor, variant: Variant) -> Tensor:
    """x [B, Hkv, rows, G, K] x other [B, Hkv, N, K] -> [B, Hkv, rows, G, N]."""
    with multiplying(product):
        return matmul(x.flatten(2, 3), other, variant).view(*x.shape[:-1], other.shape[-2])


def heads(product: Product, x: Tensor, other: Tensor, tile: Tile, variant: Variant) -> Tensor:
    """Sums over a tile's queries of x [B, Hkv, rows, G, keys] and other [B, Hkv, G, D, Tq], for
    each query head: [B, Hkv, G, keys, D]."""
    a = x.permute(0, 1, 3, 4, 2).flatten(1, 2).contiguous()  # [B, H, keys, rows]
    b = other[..., tile.rows].flatten(1, 2).contiguous()
    with multiplying(product):
        return matmul(a, b, variant).unflatten(1, other.shape[1:3])
