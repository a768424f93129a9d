"""GEMMs of MX and NVFP4 by torch's scaled_mm: cuBLASLt's, from capability 10.0 on (spec G-26)."""

import torch
from torch import Tensor
from torch.nn import functional

from fp8ref.formats import E4M3FN
from fp8ref.spec.granularity import by_name
from fp8ref.spec.products import Kind
from fp8ref.torch.quantize import four_bits

Operand = tuple[Tensor, Tensor]
"""Codes [M, K] and scale_inv of their blocks."""


def multiply(
    kind: Kind, a: Operand, b: Operand, factor: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """[M, K] x [N, K] -> [M, N] by ``torch.nn.functional.scaled_mm``.

    Layout:   codes row-major [M, K] and column-major [K, N], K filled with zeros to a multiple of
              32; scales of blocks, and of nvfp4 each tensor's, of which b's has the product.
    Source:   PyTorch 2.13, torch/_meta_registrations.py, meta_scaled_mm_v2.
    """
    types, swizzles = functional.ScalingType, functional.SwizzleType
    kinds, orders = [types.BlockWise1x32], [swizzles.SWIZZLE_32_4_4]
    scales = [[_swizzled(kind, *operand)] for operand in (a, b)]
    if kind.name == "nvfp4":
        kinds, orders = [types.BlockWise1x16, types.TensorWise], [*orders, swizzles.NO_SWIZZLE]
        one = torch.ones((), dtype=torch.float32, device=a[0].device)
        scales = [[*scales[0], one], [*scales[1], one if factor is None else factor]]
    left, right = (_stored(kind, codes) for codes, _ in (a, b))
    written = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    pair = scales[0], kinds, scales[1], kinds, orders, orders
    return functional.scaled_mm(left, right.t(), *pair, output_dtype=written).to(out_dtype)


def _stored(kind: Kind, codes: Tensor) -> Tensor:
    """Codes [M, K] as the kernel reads them, row-major: those of e2m1fn [M, K/2]."""
    bits = functional.pad(codes.contiguous().view(torch.uint8), (0, -codes.shape[1] % 32))
    if kind.fmt.bits == 8:
        return bits.view(codes.dtype)
    pairs = four_bits.codes(bits.view(codes.dtype))
    return (pairs[:, ::2] | pairs[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)


def _swizzled(kind: Kind, codes: Tensor, scale_inv: Tensor) -> Tensor:
    """The scales of codes [M, K] in swizzled_128x4, flat. Each row of a square takes its scale."""
    if len(scale_inv) < len(codes):
        rows = by_name(kind.square).reduced or 1  # a square has as many
        scale_inv = scale_inv.repeat_interleave(rows, dim=0)[: len(codes)]
    if kind.scales == E4M3FN:
        stored = scale_inv.to(torch.float8_e4m3fn)
    else:  # the exponent's bits; 2^-127, which is subnormal, has 0
        exponents = scale_inv.contiguous().view(torch.int32) >> 23
        stored = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    bits, (n, blocks) = stored.view(torch.uint8), stored.shape
    bits = functional.pad(bits, (0, -blocks % 4, 0, -n % 128))
    tiles = bits.view(-(-n // 128), 4, 32, -1, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(stored.dtype)
