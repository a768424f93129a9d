"""Attention's products for all heads of a tile: [n, M, K] x [n, N, K] -> [n, M, N] (spec A-18).

    float32 numbers    one batched GEMM
    bfloat16           one batched GEMM on a GPU, with a float32 result
    FP8 codes          n calls of torch._scaled_mm, which takes matrices

Compiled graphs have one operator for the n calls, whatever the number of sequences and heads.
"""

import torch
from torch import Tensor

from fp8ref.torch.gemm import gemm, hardware
from fp8ref.torch.quantize import cast
from fp8ref.torch.quantize.scaling import Quantized


def products(
    a: Tensor, b: Tensor, *, fast: bool, factor: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Sums of products over the last axis, float32, of two batches of matrices.

    fast      FP8 tensor cores accumulate in their own registers.
    factor    float32 () or [n], times which the sums are, of FP8 codes alone: scale_inv of the
              GEMM.
    out       float32 [n, M, N], which products of float32 numbers are written to.
    Order:    the library's. Under simulated hardware, FP8 codes by its plan.
    """
    if a.dtype not in cast.FORMATS:
        if a.dtype == torch.bfloat16:
            return torch.bmm(a, b.transpose(1, 2), out_dtype=torch.float32)
        if out is None:
            return torch.bmm(a, b.transpose(1, 2))
        return torch.bmm(a, b.transpose(1, 2), out=out)
    a, b = a.contiguous(), b.contiguous()
    if torch.compiler.is_compiling() and hardware.active() is None:
        return scaled_mms(a, b, factor, fast)
    return loop(a, b, factor, fast)


def loop(a: Tensor, b: Tensor, factor: Tensor | None, fast: bool) -> Tensor:
    """A GEMM of FP8 codes for each of n."""
    accumulate = "fast" if fast else "slow"
    unit = torch.ones((), device=a.device, dtype=torch.float32)
    factor = unit if factor is None else factor
    factors = factor.unbind() if factor.ndim else [factor] * len(a)
    outputs = [
        gemm.matmul(_quantized(x, scale_inv), _quantized(y, unit), accumulate=accumulate)
        for x, y, scale_inv in zip(a.unbind(), b.unbind(), factors, strict=True)
    ]
    return torch.stack(outputs) if len(outputs) > 1 else outputs[0][None]


@torch.library.custom_op("fp8ref::scaled_mms", mutates_args=())
def scaled_mms(a: Tensor, b: Tensor, factor: Tensor | None, fast: bool) -> Tensor:
    """``loop`` as one operator of compiled graphs."""
    return loop(a, b, factor, fast)


OPERATOR = torch.ops.fp8ref.scaled_mms.default
"""The operator of ``scaled_mms`` in graphs."""


@scaled_mms.register_fake
def _(a, b, factor, fast):
    return a.new_empty((a.shape[0], a.shape[1], b.shape[1]), dtype=torch.float32)


def _quantized(codes: Tensor, scale_inv: Tensor) -> Quantized:
    return Quantized(codes, scale_inv, scale_inv, cast.FORMATS[codes.dtype], "tensorwise", 1)
