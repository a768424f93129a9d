"""One of a linear's three GEMMs: quantize, gather in FP8, multiply, round, sum over devices (spec
L-2, L-4, P-9).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref.formats import E4M3FN
from fp8ref.jax.distributed import gradient_reduction, sharding
from fp8ref.jax.gemm import gemm
from fp8ref.jax.linear import observer, operands
from fp8ref.jax.linear.operands import Known, Use
from fp8ref.jax.quantize import stats
from fp8ref.jax.quantize.scaling import Quantized, dequantize
from fp8ref.recipe import OPERANDS, Gemm, Role


def run(
    which: Gemm,
    tensors: Mapping[Role, jax.Array],
    quantized: Mapping[Role, Quantized],
    role_scales: Known,
    use: Use,
    mu: jax.Array | None = None,
    whole: Mapping[Role, tuple[Quantized, Quantized]] | None = None,
) -> tuple[jax.Array, stats.Measured, jax.Array | None]:
    """One of the three GEMMs (spec L-2), leading dims flattened to M unless they are batch
    dims.

    quantized  operands that are quantized already; the others are quantized here, from tensors.
    whole      operands that are quantized for this GEMM and gathered already: a device's own piece,
               and all of it.
    mu         the factor of a sum in FP8.

    Order:     quantize, gather, multiply, round as G-8 says, sum over devices, cast to the
               result's dtype; accumulators are summed before they are rounded (P-9).
    Returns:   the result; measurements of the operands that no earlier GEMM has measured; under a
               mu the elements that the sum's cast saturated.
    """
    spec, roles = use.recipe.gemms[which], OPERANDS[which]
    if spec.a is None or spec.b is None or spec.accumulate is None:
        return _in_high_precision(which, tensors, quantized, role_scales, use, mu)
    collective, in_steps = use.collective(which), use.summed_by_compiler(which)
    axis_a, axis_b = (use.axis(which, role) for role in roles)
    turned = use.turned and which == "grad_weight"  # a weight [K, N] has a gradient [K, N]
    dtype = use.dtypes[list(OPERANDS).index(which)]
    # 1. Each device quantizes its own piece, unless the pass has done so for both GEMMs, as under
    # tensorwise.
    ready = {**quantized, **{role: own for role, (own, _) in (whole or {}).items()}}
    own = [
        ready[role]
        if role in ready
        else operands.quantize(tensors[role], role, cast, axis, role_scales, use)
        for role, cast, axis in zip(roles, (spec.a, spec.b), (axis_a, axis_b), strict=True)
    ]
    # 2. What other devices hold is gathered in FP8.
    qa, qb = (
        whole[role][1] if whole and role in whole else operands.gathered_codes(q, role, axis, use)
        for q, role, axis in zip(own, roles, (axis_a, axis_b), strict=True)
    )
    # 3. Multiply: output [M, K] x [N, K], grad_input [M, N] x [N, K], grad_weight [M, N] x [M, K].
    rounded = gemm.output_dtype(spec, dtype)
    options = {
        "accumulate": spec.accumulate,
        "epilogue": spec.epilogue,
        "powers_of_two": spec.powers_of_two,
        "out_dtype": rounded,
    }
    # of a weight [K, N], codes in another order serve this GEMM
    options |= {"dequantized": use.turned and which == "output"}
    summed = collective if mu is None else None
    out = gemm.matmul(
        qa,
        qb,
        **options,
        collective=summed,
        in_steps=in_steps,
        turned=turned,
        multiply=use.multiply,
    )
    saturated = None
    if mu is not None:
        out, saturated = _completed(out, collective, mu, use)
    # 4. Report to whoever asked: the cross-check's observer, a run's statistics.
    observer.report(which, tensors, own, (qa, qb), out, use)
    measured: stats.Measured = {}
    if use.measures:
        new = [
            role
            for role in roles
            if which == "output"
            or role not in quantized
            or (which, role) == ("grad_input", "grad_output")
        ]
        measured = {
            (which, role): stats.measure(tensors[role], q)
            for role, q in zip(roles, own, strict=True)
            if role in new
        }
    return out.astype(dtype), measured, saturated


def _completed(
    partial: jax.Array, collective: sharding.Reduction | None, mu: jax.Array, use: Use
) -> tuple[jax.Array, jax.Array]:
    """The sum in FP8 of a weight's gradient by mu, in the partial's dtype, and the elements that
    were saturated: float32 (), of all devices that have pieces."""
    assert collective is not None
    value, saturated = gradient_reduction.completed(
        partial, collective.sum, collective.scatter, E4M3FN, mu
    )
    pieces = (*use.placement.n, *use.placement.k)
    saturated = saturated.astype(jnp.float32)
    return value.astype(partial.dtype), lax.psum(saturated, pieces) if pieces else saturated


def _in_high_precision(
    which: Gemm,
    tensors: Mapping[Role, jax.Array],
    quantized: Mapping[Role, Quantized],
    role_scales: Known,
    use: Use,
    mu: jax.Array | None,
) -> tuple[jax.Array, stats.Measured, jax.Array | None]:
    """``run`` without FP8 (spec G-9). An operand that is cast beside one that is not is
    dequantized, and rounded to its tensor's dtype (L-4)."""
    spec, roles = use.recipe.gemms[which], OPERANDS[which]
    axes = (use.axis(which, roles[0]), use.axis(which, roles[1]))
    operand: list[jax.Array] = []
    measured: stats.Measured = {}
    for role, cast, axis in zip(roles, (spec.a, spec.b), axes, strict=True):
        if cast is None:
            operand.append(operands.gathered(tensors[role], role, use))
            continue
        ready = quantized.get(role)
        q = (
            operands.quantize(tensors[role], role, cast, axis, role_scales, use)
            if ready is None
            else ready
        )
        if use.measures and (
            which == "output" or ready is None or (which, role) == ("grad_input", "grad_output")
        ):
            measured[which, role] = stats.measure(tensors[role], q)
        numbers = dequantize(q).astype(
            use.dtypes[{"grad_output": 0, "input": 1, "weight": 2}[role]]
        )
        operand.append(
            operands.gathered(
                numbers if role not in tensors else numbers.reshape(tensors[role].shape), role, use
            )
        )
    out = gemm.matmul_hp(
        *operand,
        axes=axes,
        out_dtype=use.dtypes[list(OPERANDS).index(which)],
        turned=use.turned and which == "grad_weight",  # a weight [K, N] has a gradient [K, N]
        collective=use.collective(which) if mu is None else None,
        in_steps=use.summed_by_compiler(which),
    )
    if mu is None:
        return out, measured, None
    out, saturated = _completed(out, use.collective(which), mu, use)
    return out, measured, saturated
