"""Grouped GEMMs of FP8 operands (X-2, X-10): by torch's grouped kernels, or one GEMM a group.

``kernel`` chooses. ``deepgemm`` is DeepGEMM's. On GPUs from compute capability 9.0 on,
torch._scaled_grouped_mm takes e4m3fn with scales of all of K, and torch._grouped_mm blocks whose
scales are powers of two, dequantized to bfloat16, which is exact. Both write bfloat16, and never
wait for the device. The other path reads the groups' sizes on the host, and multiplies each group
by ``gemm.matmul``: as one operator, so that a compiled graph does not look into it.
"""

import functools
from typing import Literal

import torch
from torch import Tensor

from fp8ref.recipe import Gemm, GemmSpec, Recipe
from fp8ref.spec.granularity import by_name
from fp8ref.torch.experts import deepgemm
from fp8ref.torch.experts.operands import (
    Groups,
    exact_values,
    host_groups,
    laid_out,
    padded_rows,
    parts_of,
)
from fp8ref.torch.gemm import blocks as block_gemm
from fp8ref.torch.gemm import gemm, hardware
from fp8ref.torch.gemm.kind import GemmKind
from fp8ref.torch.quantize import cast
from fp8ref.torch.quantize.scaling import Quantized

Kernel = Literal["scaled_grouped_mm", "grouped_mm", "deep_gemm", "each_group"]
"""What multiplies: torch's grouped kernels, on codes or bfloat16, DeepGEMM's, or a GEMM a group."""

NAMES: dict[Kernel, str] = {
    "scaled_grouped_mm": "torch._scaled_grouped_mm",
    "grouped_mm": "torch._grouped_mm on dequantized codes",
    "deep_gemm": "DeepGEMM's grouped kernel",
    "each_group": "one GEMM for each group",
}
"""Kernels, as reports name them."""

ALIGNMENT = 16
"""What a group's reduced rows are padded to a multiple of: a line of codes is of 16 bytes."""


def kernel(spec: GemmSpec, device: torch.device) -> Kernel:
    """What multiplies the operands of one grouped GEMM on a device."""
    if spec.a is None or spec.b is None:
        return "each_group"
    chosen = hardware.active() or block_gemm.CHOSEN[-1] != "auto"
    if chosen or spec.epilogue != "scale_then_round" or not _has_kernel(device):
        return "each_group"  # simulated hardware, or named products, one group at a time (G-19)
    casts = (spec.a, spec.b)
    if all(by_name(c.granularity).reduced is None for c in casts):
        if all(c.fmt.name == "e4m3fn" for c in casts):
            return "scaled_grouped_mm"
        return "each_group"
    if all(c.policy.e8m0 is not None for c in casts):
        return "grouped_mm"
    return "deep_gemm" if deepgemm.takes(spec, device) else "each_group"


def kernels(recipe: Recipe, device: torch.device) -> str:
    """The kernels of a recipe's FP8 GEMMs, for reports."""
    keys = [kernel(spec, device) for spec in recipe.gemms.values() if spec.fp8]
    return " and ".join(name for key, name in NAMES.items() if key in keys)


def multiply(
    which: Gemm, a: Quantized, b: Quantized, groups: Groups, spec: GemmSpec, out_dtype: torch.dtype
) -> Tensor:
    """One grouped GEMM: output [M, N], grad_input [M, K] or grad_weight [E, N, K], of out_dtype.

    Zeros where no group writes (X-4, X-5).
    """
    chosen = kernel(spec, a.codes.device)
    if chosen == "scaled_grouped_mm":
        run = _rows_by_rows if which == "grad_weight" else _rows_by_weights
        return run(a, b, groups, spec).to(out_dtype)
    if chosen == "grouped_mm":
        return _bfloat16_gemm(which, exact_values(a, groups), exact_values(b, groups), groups).to(
            out_dtype
        )
    if chosen == "deep_gemm" and max(a.codes.numel(), b.codes.numel()) < block_gemm.OFFSETS:
        return deepgemm.rows_by_weights(a, b, groups).to(out_dtype)
    kind = GemmKind.of(spec).text
    return each_group(
        which, a.codes, a.scale_inv, b.codes, b.scale_inv, groups.ends, kind, out_dtype
    )


@torch.library.custom_op("fp8ref::grouped_gemm", mutates_args=())
def each_group(
    which: str,
    codes_a: Tensor,
    scale_inv_a: Tensor,
    codes_b: Tensor,
    scale_inv_b: Tensor,
    ends: Tensor,
    kind: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """One GEMM for each group that has rows, by ``gemm.matmul``.

    kind      text of a ``GemmKind``.
    Shapes:   codes and scale_inv as those of an operand.
    """
    granularity_a, granularity_b, accumulate, epilogue = GemmKind.parse(kind)
    out = _empty(which, codes_a, codes_b, len(ends), out_dtype).zero_()
    axis_a, axis_b = {"output": (-1, -1), "grad_input": (-1, -2), "grad_weight": (-2, -2)}[which]
    fmt_a, fmt_b = (cast.FORMATS[codes.dtype] for codes in (codes_a, codes_b))
    a = Quantized(codes_a, scale_inv_a, scale_inv_a, fmt_a, granularity_a, axis_a)
    b = Quantized(codes_b, scale_inv_b, scale_inv_b, fmt_b, granularity_b, axis_b)
    host = ends.tolist()
    for (e, begin, end, q_a), (*_, q_b) in zip(parts_of(a, host), parts_of(b, host), strict=True):
        product = gemm.matmul(
            q_a, q_b, accumulate=accumulate, epilogue=epilogue, out_dtype=out_dtype
        )
        if which == "grad_weight":  # [N, M_e] x [K, M_e]
            out[e] = product
        else:  # [M_e, C] x [D, C]
            out[begin:end] = product
    return out


@each_group.register_fake
def _(which, codes_a, scale_inv_a, codes_b, scale_inv_b, ends, kind, out_dtype):
    return _empty(which, codes_a, codes_b, len(ends), out_dtype)


@torch.library.custom_op("fp8ref::grouped_gemm_hp", mutates_args=())
def each_group_hp(which: str, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """One GEMM in high precision (G-9) for each group that has rows, of its operands' dtype."""
    out = _empty(which, a, b, len(ends), a.dtype).zero_()
    for e, begin, end in host_groups(ends.tolist()):
        if which == "grad_weight":
            out[e] = a[begin:end].t() @ b[begin:end]  # [N, M_e] @ [M_e, K]
        else:
            out[begin:end] = a[begin:end] @ (b[e].t() if which == "output" else b[e])
    return out


@each_group_hp.register_fake
def _(which, a, b, ends):
    return _empty(which, a, b, len(ends), a.dtype)


@torch.library.custom_op("fp8ref::scaled_grouped_mm", mutates_args=())
def by_torch(
    codes_a: Tensor, scale_a: Tensor, codes_b: Tensor, scale_b: Tensor, ends: Tensor, kind: str
) -> Tensor:
    """bfloat16, by ``torch._scaled_grouped_mm``: an operator that names its scales (B-8).

    Shapes:   codes_a [M, C] x codes_b [E, D, C] -> [M, D], groups of rows; or [N, M] x [K, M] ->
              [E, N, K], groups of the reduced columns; scales float32 as torch takes them, a line
              each; kind: text of a ``GemmKind``.
    """
    return torch._scaled_grouped_mm(
        codes_a,
        codes_b.mT,
        scale_a,
        scale_b,
        ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=GemmKind.parse(kind).accumulate == "fast",
    )


@by_torch.register_fake
def _(codes_a, scale_a, codes_b, scale_b, ends, kind):
    experts = () if codes_b.ndim == 3 else (len(ends),)
    return codes_a.new_empty((*experts, codes_a.shape[0], codes_b.shape[-2]), dtype=torch.bfloat16)


OPERATORS = (
    torch.ops.fp8ref.grouped_gemm.default,
    torch.ops.fp8ref.grouped_gemm_hp.default,
    torch.ops.fp8ref.scaled_grouped_mm.default,
    deepgemm.OPERATOR,
)
"""The operators, as a dispatch mode sees them."""


def _empty(which: str, a: Tensor, b: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    if which == "grad_weight":
        shape: tuple = (experts, a.shape[1], b.shape[1])
    else:
        shape = (a.shape[0], b.shape[1] if which == "output" else b.shape[2])
    return a.new_empty(shape, dtype=dtype)


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and hasattr(torch, "_scaled_grouped_mm")
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def _rows_by_weights(a: Quantized, b: Quantized, groups: Groups, spec: GemmSpec) -> Tensor:
    """bfloat16 [M, D] of a [M, C] and weights [E, D, C], or [E, C, D] if axis -2 is reduced."""
    experts = len(groups.sizes)
    codes = b.codes if b.axis == -1 else b.codes.transpose(-2, -1).contiguous()  # [E, D, C]
    columns = codes.shape[1]
    scale_a = a.scale_inv
    if a.granularity == "tensorwise":
        e = groups.group.clamp(max=experts - 1)
        scale_a = scale_a.expand(len(a.codes)) if scale_a.ndim == 0 else scale_a[e]
    expert_scales = b.scale_inv if b.scale_inv.ndim == 0 else b.scale_inv.reshape(experts, -1)
    flat_a = scale_a.reshape(-1).contiguous()
    flat_b = expert_scales.expand(experts, columns).contiguous()
    kind = GemmKind.of(spec).text
    return groups.only(
        by_torch(a.codes.contiguous(), flat_a, codes.contiguous(), flat_b, groups.ends, kind)
    )


def _rows_by_rows(a: Quantized, b: Quantized, groups: Groups, spec: GemmSpec) -> Tensor:
    """bfloat16 [E, N, K] of a [M, N] and b [M, K], each group's rows reduced."""
    experts, rows = len(groups.sizes), len(a.codes)
    to, ends, total = padded_rows(groups, rows, ALIGNMENT)
    codes_a, codes_b = (laid_out(q.codes.view(torch.uint8), to, total) for q in (a, b))
    scale_a, scale_b = (
        q.scale_inv.reshape(-1, 1).expand(experts, q.codes.shape[1])
        if q.granularity == "tensorwise"
        else q.scale_inv.expand(experts, -1)
        for q in (a, b)
    )
    columns_a = codes_a.t().contiguous().view(a.codes.dtype)
    columns_b = codes_b.t().contiguous().view(b.codes.dtype)
    flat_a, flat_b = scale_a.reshape(-1).contiguous(), scale_b.reshape(-1).contiguous()
    out = by_torch(columns_a, flat_a, columns_b, flat_b, ends, GemmKind.of(spec).text)
    return _zero_empty_groups(out, groups)


def _bfloat16_gemm(which: Gemm, a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    """One grouped GEMM in bfloat16, by torch's grouped kernel."""
    if which != "grad_weight":
        return groups.only(torch._grouped_mm(a, b.mT if which == "output" else b, offs=groups.ends))
    to, ends, total = padded_rows(groups, len(a), ALIGNMENT)
    padded_a, padded_b = (laid_out(x, to, total) for x in (a, b))
    # [N, M] @ [M, K]
    return _zero_empty_groups(
        torch._grouped_mm(padded_a.t().contiguous(), padded_b, offs=ends), groups
    )


def _zero_empty_groups(out: Tensor, groups: Groups) -> Tensor:
    """grad_weight [E, N, K], zeros for groups without rows (X-4)."""
    return torch.where((groups.sizes > 0)[:, None, None], out, 0)
