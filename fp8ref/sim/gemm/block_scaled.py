"""A GEMM of MX operands whose scales the tensor core applies by steps, as tcgen05.mma (G-23).

Order: one chain of steps over K, ascending, from 0; in a step of 32 products these are scaled by
both blocks' powers of two before they are aligned with the accumulator; the result is rounded once
to out_dtype. In G-13 each block is summed by itself, scaled, and added in float32.
"""

import numpy as np

from fp8ref.formats import BFLOAT16, E8M0FNU, FLOAT16, FLOAT32, Format
from fp8ref.shared.errors import require
from fp8ref.sim.gemm import accumulate, tensor_core
from fp8ref.sim.gemm.tensor_core import TensorCore
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec.granularity import by_name as granularity_by_name

__all__ = ["matmul"]


def matmul(
    a: Quantized,
    b: Quantized,
    *,
    unit: str | TensorCore = "blackwell_mx",
    out_dtype: Format = FLOAT32,
) -> np.ndarray:
    """[M, K] x [N, K] -> [M, N] by a unit that takes the scales of blocks of 32.

    Shapes:   a.codes [M, K], b.codes [N, K], reduced along their last axis; blocks of 32 along K
              (``mx_1x32``, ``mx_32x32``), scale_inv powers of two; float32 [M, N] holding values of
              out_dtype.
    Specials: a NaN scale or code makes its results NaN; infinities as in G-6; a zero result is +0.
    Raises:   ValueError: operands that are not a Quantized, of other blocks, other formats, another
              axis or K; scales that are not e8m0 numbers; a unit without block scales.
    Source:   MMA-Sim (commit c785138), mmasim/simulator/nv_ptx.py: tcgen05mma_block_scale, of one K
              = 32 instruction.
    """
    unit = tensor_core.by_name(unit)
    text = f"unit {unit.name!r} has no block scales. Use 'blackwell_mx' or gemm.matmul."
    require(unit.block_scales, text)
    if out_dtype not in (FLOAT32, BFLOAT16, FLOAT16):
        raise ValueError(f"out_dtype is float32, bfloat16 or float16; got {out_dtype}.")
    _check_operands(a, b, unit)
    # [M, K / 32], [N, K / 32]
    a_scales, b_scales = (_row_scales(q, unit.fused_width) for q in (a, b))
    if missing := -a.codes.shape[1] % unit.fused_width:  # zeros fill a last block
        a, b = (q._replace(codes=np.pad(q.codes, ((0, 0), (0, missing)))) for q in (a, b))
    nan = np.isnan(a_scales).any(axis=1)[:, None] | np.isnan(b_scales).any(axis=1)[None, :]
    exponents = tensor_core.scale_exponents(a_scales), tensor_core.scale_exponents(b_scales)
    values = [cast.decode(q.codes, q.fmt) for q in (a, b)]
    left, right = (accumulate.finite_part(v) for v in values)
    zero = np.zeros((len(a.codes), len(b.codes)), np.float32)
    sums = tensor_core.chain(left, right, zero, a.fmt, b.fmt, unit, exponents)
    acc = np.where(nan, np.float32(np.nan), accumulate.with_specials(sums, *values))
    with np.errstate(over="ignore"):
        return cast.round_to(acc, out_dtype)


def _check_operands(a: Quantized, b: Quantized, unit: TensorCore) -> None:
    for q, name in ((a, "a"), (b, "b")):
        scaling.check_scales(q, name)
        if (
            granularity_by_name(q.granularity).reduced != unit.fused_width
            or q.codes.ndim != 2
            or q.axis not in (-1, 1)
        ):
            raise ValueError(
                f"{name} is 2-d, in blocks of {unit.fused_width} along axis -1; got "
                f"{q.codes.shape}, {q.granularity!r} along axis {q.axis}."
            )
        if not np.array_equal(cast.round_to(q.scale_inv, E8M0FNU), q.scale_inv, equal_nan=True):
            raise ValueError(
                f"{unit.name!r} needs e8m0fnu scales; {name} has others. Use an e8m0 policy (S-14)."
            )
    tensor_core.check_pair(a.fmt, b.fmt)
    text = f"a [M, K] and b [N, K] need one K; got {a.codes.shape} and {b.codes.shape}."
    require(a.codes.shape[1] == b.codes.shape[1], text)


def _row_scales(q: Quantized, block: int) -> np.ndarray:
    """scale_inv of each row and block of K, float32 [M, K / block]."""
    return scaling.spread(q.scale_inv, q.codes.shape, q.blocks)[:, ::block]
