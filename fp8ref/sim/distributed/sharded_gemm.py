"""A GEMM whose reduced axis is cut over devices (P-7, P-8): what is summed, and rounded before.

Two GEMMs of training are such: grad_weight under data parallelism, which reduces M, and the output
of a row-parallel linear, which reduces K. ``matmul``'s ``reduce`` says whether devices sum raw
accumulators, scaled results or rounded outputs.
"""

import functools
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from fp8ref.formats import FLOAT32, Format
from fp8ref.shared import errors
from fp8ref.shared.errors import require
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized, check_scales

__all__ = ["matmul"]

Reduce = Literal["exact", "accumulators", "scaled", "rounded"]
"""What ranks sum: products of one exact GEMM, accumulators, scaled results, rounded outputs."""


def matmul(
    a: Sequence[Quantized],
    b: Sequence[Quantized],
    *,
    reduce: Reduce = "accumulators",
    accumulate: str | Accumulation = "exact",
    out_dtype: Format = FLOAT32,
) -> np.ndarray:
    """[M, K_r] x [N, K_r] on each rank r -> [M, N], summed over the ranks.

    ``exact``        one device's exact GEMM: RN32 of the exact sum over all ranks, then the
                     epilogue.
    ``accumulators`` each rank's raw float32 accumulator; acc = RN32(acc + acc_r), r ascending; then
                     the epilogue, once (P-7).
    ``scaled``       each rank applies its scales first; then sum in float32, r ascending, and round
                     to out_dtype.
    ``rounded``      each rank rounds its finished output to out_dtype; then sum and round as
                     ``scaled`` (P-8): as trainers sum by default.

    Shapes:   a[r].codes [M, K_r], b[r].codes [N, K_r], tensorwise or rowwise along K; a rank with
              K_r = 0 adds nothing. float32 [M, N].
    Order:    accumulate within a rank; then as above; the epilogue is G-4.
    Specials: Inf and NaN as in IEEE 754.
    Raises:   ValueError: ``exact`` or ``accumulators`` with scales that differ between ranks;
              operands that gemm.matmul refuses; nothing to sum.
    Source:   spec P-7, P-8.
    """
    _check(a, b, reduce, accumulate, out_dtype)
    ranks = [(qa, qb) for qa, qb in zip(a, b, strict=True) if qa.codes.shape[-1]]
    if reduce in ("exact", "accumulators"):
        _check_scales("a", [qa for qa, _ in ranks])
        _check_scales("b", [qb for _, qb in ranks])
        # One scale for all ranks, so that it can be applied after the sum.
        sa, sb = ranks[0][0].scale_inv, ranks[0][1].scale_inv
    # Inf - Inf, Inf * 0 and overflow are results here
    with np.errstate(invalid="ignore", over="ignore"):
        if reduce == "exact":
            # All ranks' codes side by side along K are one device's operand.
            whole = [
                _unit(side, np.concatenate([q.codes for q in side], axis=-1))
                for side in zip(*ranks, strict=True)
            ]
            return cast.round_to(gemm.matmul(*whole, accumulate="exact") * sa * sb.T, out_dtype)
        if reduce == "accumulators":
            ranks = [(_unit([qa], qa.codes), _unit([qb], qb.codes)) for qa, qb in ranks]
        own = out_dtype if reduce == "rounded" else FLOAT32
        parts = [gemm.matmul(*pair, accumulate=accumulate, out_dtype=own) for pair in ranks]
        total = functools.reduce(np.add, parts)
        return cast.round_to(total * sa * sb.T if reduce == "accumulators" else total, out_dtype)


def _unit(side: Sequence[Quantized], codes: np.ndarray) -> Quantized:
    """Codes with scale 1: their GEMM is the raw accumulator."""
    unit_scale = np.ones((), np.float32)
    return Quantized(codes, unit_scale, unit_scale, side[0].fmt, "tensorwise", -1)


def _check(
    a: Sequence[Quantized],
    b: Sequence[Quantized],
    reduce: Reduce,
    accumulate: str | Accumulation,
    out_dtype: Format,
) -> None:
    if len(a) != len(b) or not any(q.codes.size for q in a):
        raise ValueError(
            f"a sharded GEMM needs one a and b per rank, not all empty; got {len(a)} and {len(b)}."
        )
    errors.one_of("reduce", reduce, get_args(Reduce))
    gemm.check_out_dtype(out_dtype)
    if reduce == "exact" and accumulate != "exact":
        raise ValueError(
            f"reduce 'exact' needs accumulate 'exact'; got {accumulate!r}. Use 'accumulators'."
        )
    for name, side in (("a", a), ("b", b)):
        for q in side:
            if q.codes.size:
                check_scales(q, name)
    for r, (qa, qb) in enumerate(zip(a, b, strict=True)):
        text = f"a and b of rank {r} need the same K; got {qa.codes.shape}, {qb.codes.shape}."
        require(qa.codes.shape[-1] == qb.codes.shape[-1], text)
    if len({len(qa.codes) for qa in a}) > 1 or len({len(qb.codes) for qb in b}) > 1:
        raise ValueError(
            f"all ranks have the same M and N; got {[q.codes.shape for q in a]}, "
            f"{[q.codes.shape for q in b]}."
        )


def _check_scales(name: str, side: list[Quantized]) -> None:
    """ValueError unless scales are equal on all ranks and constant along K."""
    first = side[0]
    for q in side:
        if q.granularity not in ("tensorwise", "rowwise") or (
            q.granularity == "rowwise" and q.axis not in (-1, 1)
        ):
            raise ValueError(
                f"raw accumulators need scales that are constant along K; got {name} "
                f"{q.granularity}, axis={q.axis}. Use reduce='scaled'."
            )
        if q.fmt != first.fmt or not np.array_equal(q.scale_inv, first.scale_inv, equal_nan=True):
            raise ValueError(
                f"raw accumulators need equal scales and formats on all ranks; those of {name} "
                "differ. Quantize with a scope that includes the summed axis, or use "
                "reduce='scaled' (P-7)."
            )
