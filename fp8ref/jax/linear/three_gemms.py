"""One of a linear's GEMMs: quantize, gather in FP8, multiply, round, sum (spec L-2, L-4, P-9)."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax

from fp8ref.formats import E4M3FN
from fp8ref.jax.distributed import gradient_reduction, sharding
from fp8ref.jax.gemm import gemm
from fp8ref.jax.gemm.gemm import Execution
from fp8ref.jax.linear import observer, operands
from fp8ref.jax.linear.carried import Layer, Operand
from fp8ref.jax.quantize import stats
from fp8ref.jax.quantize.scaling import Quantized, dequantize
from fp8ref.recipe import OPERANDS, Gemm, Role


def run(
    which: Gemm, roles: Mapping[Role, Operand], layer: Layer, mu: Array | None = None
) -> tuple[Array, stats.Measured, Array | None]:
    """One of the three GEMMs (spec L-2), leading dims flattened to M unless they are batch
    dims. Operands without codes are quantized here. mu is the factor of a sum in FP8.

    Order:     quantize, gather, multiply, round as G-8 says, sum over devices, cast to the
               result's dtype; accumulators are summed before they are rounded (P-9).
    Returns:   the result; measurements of the operands that no earlier GEMM has measured; under a
               mu the elements that the sum's cast saturated.
    """
    spec = layer.recipe.gemms[which]
    if spec.a is None or spec.b is None or spec.accumulate is None:
        return _in_high_precision(which, roles, layer, mu)
    collective = layer.collective(which)
    # 1. Each device quantizes its piece, unless the pass has done so, as under tensorwise.
    own = {role: _quantized(which, role, roles, layer) for role in OPERANDS[which]}
    # 2. What other devices hold is gathered in FP8.
    a, b = (
        roles[role].whole or operands.gathered_codes(q, role, layer.axis(which, role), layer)
        for role, q in own.items()
    )
    # 3. Multiply: output [M, K] x [N, K], grad_input [M, N] x [N, K], grad_weight [M, N] x [M, K].
    dtype = layer.dtypes[list(OPERANDS).index(which)]
    out = gemm.matmul(
        a,
        b,
        accumulate=spec.accumulate,
        epilogue=spec.epilogue,
        out_dtype=gemm.output_dtype(spec, dtype),
        execution=Execution(
            collective=collective if mu is None else None,
            in_steps=layer.summed_by_compiler(which),
            # a weight [K, N] has a gradient [K, N]
            turned=layer.turned and which == "grad_weight",
            multiply=layer.multiply,
            products=layer.products,
            powers_of_two=spec.powers_of_two,
            # of a weight [K, N], codes in another order serve this GEMM
            dequantized=layer.turned and which == "output",
        ),
    )
    saturated = None
    if mu is not None:
        out, saturated = _completed(out, collective, mu, layer)
    # 4. Report to whoever asked: the cross-check's observer, a run's statistics.
    observer.report(which, roles, tuple(own.values()), (a, b), out, layer)
    return out.astype(dtype), _measured(which, own, roles, layer), saturated


def _quantized(which: Gemm, role: Role, roles: Mapping[Role, Operand], layer: Layer) -> Quantized:
    """A role's codes of this device's piece, as a GEMM takes it."""
    spec, operand = layer.recipe.gemms[which], roles[role]
    if operand.own is not None:
        return operand.own
    cast = spec.operands[OPERANDS[which].index(role)]
    assert cast is not None
    return operands.quantize(operand, role, cast, layer.axis(which, role), layer)


def _measured(
    which: Gemm, own: Mapping[Role, Quantized], roles: Mapping[Role, Operand], layer: Layer
) -> stats.Measured:
    """Measurements of the codes that are this GEMM's own, if asked for."""
    first = {"output": ("input", "weight"), "grad_input": ("grad_output",), "grad_weight": ()}
    new = {
        role: q
        for role, q in own.items()
        if role in first[which] or roles[role].own is None or roles[role].whole is not None
    }
    measured: stats.Measured = {}
    for role, q in new.items() if layer.measures else ():
        tensor = roles[role].tensor
        assert tensor is not None, "what is quantized here has a tensor"
        cast = layer.recipe.gemms[which].operands[OPERANDS[which].index(role)]
        assert cast is not None
        axis = layer.axis(which, role)
        if cast.rotation is not None:
            tensor = operands.rotated(operands.flat(tensor, role, layer), cast, axis)
        measured[which, role] = stats.measure(tensor, q)
    return measured


def _completed(
    partial: Array, collective: sharding.Reduction | None, mu: Array, layer: Layer
) -> tuple[Array, Array]:
    """A weight gradient's FP8 sum with mu; saturated elements on all devices."""
    assert collective is not None
    value, saturated = gradient_reduction.completed(
        partial, collective.sum, collective.scatter, E4M3FN, mu
    )
    pieces = (*layer.placement.n, *layer.placement.k)
    saturated = saturated.astype(jnp.float32)
    return value.astype(partial.dtype), lax.psum(saturated, pieces) if pieces else saturated


def _in_high_precision(
    which: Gemm, roles: Mapping[Role, Operand], layer: Layer, mu: Array | None
) -> tuple[Array, stats.Measured, Array | None]:
    """``run`` without FP8 (G-9). A cast operand is dequantized and rounded to its dtype (L-4)."""
    spec = layer.recipe.gemms[which]
    numbers: list[Array] = []
    own: dict[Role, Quantized] = {}
    for role, cast in zip(OPERANDS[which], (spec.a, spec.b), strict=True):
        tensor = roles[role].tensor
        if cast is None:
            assert tensor is not None
            numbers.append(operands.gathered(tensor, role, layer))
            continue
        own[role] = _quantized(which, role, roles, layer)
        dtype = layer.dtypes[{"grad_output": 0, "input": 1, "weight": 2}[role]]
        rounded = dequantize(own[role]).astype(dtype)
        shaped = rounded if tensor is None else rounded.reshape(tensor.shape)
        numbers.append(operands.gathered(shaped, role, layer))
    out = gemm.matmul_hp(
        *numbers,
        axes=(layer.axis(which, OPERANDS[which][0]), layer.axis(which, OPERANDS[which][1])),
        out_dtype=layer.dtypes[list(OPERANDS).index(which)],
        execution=Execution(
            collective=layer.collective(which) if mu is None else None,
            in_steps=layer.summed_by_compiler(which),
            turned=layer.turned and which == "grad_weight",
        ),
    )
    measured = _measured(which, own, roles, layer)
    if mu is None:
        return out, measured, None
    out, saturated = _completed(out, layer.collective(which), mu, layer)
    return out, measured, saturated
