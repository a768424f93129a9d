"""Grouped FP8 GEMMs of blocks, by DeepGEMM's kernel for groups along M (spec G-17, X-10).

It multiplies all groups' rows, in blocks of 1x128, by each group's weight, in blocks of 128x128,
without waiting for the device. For groups along the reduced axis its kernel wants their sizes on
the host, so ``gemm`` multiplies each group by itself there.
"""

import torch
from torch import Tensor

from fp8ref.recipe import GemmSpec
from fp8ref.torch.experts.operands import Groups, laid_out, padded_rows
from fp8ref.torch.gemm import blocks as block_gemm
from fp8ref.torch.quantize.scaling import Quantized

ALIGNMENT = 128
"""Rows that each group begins at a multiple of:
``deep_gemm.get_m_alignment_for_contiguous_layout()``, the rows of the largest tile."""

NO_GROUP = -1
"""The group of a row that only fills: the kernel multiplies no tile that begins with it."""


def takes(spec: GemmSpec, device: torch.device) -> bool:
    """Whether DeepGEMM multiplies such operands: on Hopper, both in blocks."""
    if spec.a is None or spec.b is None or device.type != "cuda":
        return False
    lines = (spec.a.granularity, spec.b.granularity)
    if lines != ("blockwise_1x128", "blockwise_128x128"):
        return False
    columns = block_gemm.DEEP_GEMM_COLUMNS
    by = block_gemm.takes(spec.a, spec.b, device, columns=columns)
    return by in ("scaled_mm", "deep_gemm") and hasattr(
        block_gemm.deep_gemm(), "m_grouped_fp8_gemm_nt_contiguous"
    )


def rows_by_weights(a: Quantized, b: Quantized, groups: Groups) -> Tensor:
    """bfloat16 [M, D] of rows a [M, C] and weights [E, D, C], or [E, C, D] if axis -2 is reduced;
    +0 in rows of no group (X-5)."""
    pair = b.codes, b.scale_inv
    codes, scale = ((x if b.axis == -1 else x.mT).contiguous() for x in pair)
    to, _, total = padded_rows(groups, len(a.codes), ALIGNMENT)
    out = multiply(a.codes, a.scale_inv, codes, scale, to, groups.group, total)
    return groups.only(out)


@torch.library.custom_op("fp8ref::grouped_deep_gemm", mutates_args=())
def multiply(
    codes_a: Tensor,
    scale_inv_a: Tensor,
    codes_b: Tensor,
    scale_inv_b: Tensor,
    to: Tensor,
    group: Tensor,
    total: int,
) -> Tensor:
    """bfloat16 [M, D], by ``m_grouped_fp8_gemm_nt_contiguous`` (DeepGEMM 54e2261,
    csrc/apis/gemm.hpp, of 9.0).

    Shapes:   codes_a [M, C], scale_inv_a [M, C / 128]; codes_b [E, D, C], scale_inv_b [E, D / 128,
              C / 128]; to and total as of ``padded_rows``; group int64 [M].
    Layout:   rows where ``to`` says, with zeros between; int32 [total], of each row its group, or
              NO_GROUP.
    """
    library = block_gemm.deep_gemm()
    assert library is not None
    codes = laid_out(codes_a.view(torch.uint8), to, total).view(codes_a.dtype)
    out = codes_a.new_empty(total, codes_b.shape[1], dtype=torch.bfloat16)
    library.m_grouped_fp8_gemm_nt_contiguous(
        (codes, laid_out(scale_inv_a, to, total)),
        (codes_b, scale_inv_b),
        out,
        laid_out(group.to(torch.int32), to, total, NO_GROUP),
        recipe=(1, block_gemm.BLOCK, block_gemm.BLOCK),
    )
    return out[to.clamp(max=total - 1)]


@multiply.register_fake
def _(codes_a, scale_inv_a, codes_b, scale_inv_b, to, group, total):
    return codes_a.new_empty((codes_a.shape[0], codes_b.shape[1]), dtype=torch.bfloat16)


OPERATOR = torch.ops.fp8ref.grouped_deep_gemm.default
"""The operator that ``multiply`` is in graphs and in dispatch."""
