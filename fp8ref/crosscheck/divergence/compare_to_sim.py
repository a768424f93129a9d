"""Compare two backends' differing values with the simulator's: which backend is at fault?

Each function gives the reason of one difference. Where the simulator defines the bits, a backend
that differs from it is at fault. Where a clause leaves the order of a sum to the library, both
results are held to that clause's bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.compare import Check, compare_bits, compare_codes, compare_scales, compare_values
from fp8ref.crosscheck import bounds
from fp8ref.crosscheck.divergence.report import Reason
from fp8ref.crosscheck.divergence.step_values import Value
from fp8ref.crosscheck.operands import States, transposed
from fp8ref.formats import BFLOAT16
from fp8ref.hardware import Factor, Multiply
from fp8ref.llama import LlamaConfig
from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec, GemmSpec, Recipe
from fp8ref.sim import delayed, gemm, scaling


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the reason of a difference may depend on besides the two values.

    names       of the two backends; recipes: theirs, by linear.
    states      A's states of delayed scaling before the step.
    model       A's model configuration.
    outputs     A's observed forward GEMM outputs [B, T, N], by linear.
    unobserved  linears in high precision before the value, which no observer sees.
    multiply    simulated hardware of each backend (G-19); None: the framework's own GEMMs.
    """

    names: tuple[str, str]
    recipes: tuple[dict[str, Recipe], dict[str, Recipe]]
    states: States
    model: LlamaConfig
    outputs: Mapping[str, np.ndarray]
    unobserved: Sequence[str] = ()
    multiply: tuple[Multiply | None, Multiply | None] = (None, None)


def of_attention(a: Value, b: Value, module: str, context: Context) -> Reason:
    """Why attention's output differs.

    Equal queries, keys and values give outputs within B-11, if they are observed.
    """
    projections = [context.outputs.get(f"{module}.{p}_proj") for p in "qkv"]
    q, k, v = projections
    if q is None or k is None or v is None:
        return Reason(
            ("M-3", "G-9"), "queries, keys and values are not all observed, because their linears are in high precision. B-2 bounds logits"
        )
    simulated = bounds.attention(q, k, v, context.model)
    names, outs = context.names, [np.asarray(x.value, np.float64) for x in (a, b)]
    distances = [simulated.distance(out) for out in outs]
    shown = " and ".join(f"{name} at {u:.2g}" for name, u in zip(names, distances, strict=True))
    if max(distances) > 1:
        return Reason(
            (),
            "no clause explains it: queries, keys and values are equal, but B-11's bound is "
            f"exceeded ({shown} of the bound): a fault of attention",
        )
    # Within the bound, the share of elements equal to each variant shows which order a library
    # uses.
    before, after = ([int((out == variant).sum()) for out in outs] for variant in (simulated.before, simulated.after))
    return Reason(
        ("M-3", "B-11"),
        "queries, keys and values are equal. The library chooses the order of float32 sums, "
        "and whether to normalize probabilities before or after their rounding. Normalized "
        f"before it, the simulator has {before[0]:,} of {outs[0].size:,} elements of "
        f"{names[0]} and {before[1]:,} of {names[1]}; after it, {after[0]:,} and {after[1]:,}. "
        f"Distances in units of B-11's bound: {shown}",
    )


def of_cast(a: Value, b: Value, context: Context) -> Reason:
    """Why a scale or codes of equal tensors differ.

    Their bits are defined, and a backend without them is at fault.
    """
    assert a.cast is not None
    assert a.gemm is not None
    at = OPERANDS[a.gemm].index(a.role)
    simulated = _quantized(a, at, context)
    wrong = []
    for name, v in zip(context.names, (a, b), strict=True):
        assert v.observation is not None
        hp, codes, scale = (v.observation.a, v.observation.b)[at]
        check = Check(name=name)
        if a.part == "scale":
            compare_scales(check, {"sim": simulated.scale, name: np.asarray(scale, np.float32)}, name)
        else:
            compare_codes(check, {"sim": simulated.codes, name: np.asarray(codes)}, name, a.cast.fmt, np.asarray(hp, np.float32))
        wrong += [] if check.ok else [f"{name}'s ({check.compared - check.equal} of {check.compared})"]
    clauses, of = _clauses(a.cast) if a.part == "scale" else (("C-1", "C-2", "S-5"), "tensor and scale")
    text = (
        f"its {of} are equal, and {', '.join(clauses)} define every bit of its {a.part}; "
        f"different from the simulator's: {' and '.join(wrong)}"
    )
    return Reason((), f"no clause explains it: {text}: a fault")


def _clauses(cast: CastSpec) -> tuple[tuple[str, ...], str]:
    return (("H-1", "S-9"), "tensor and state") if cast.delayed else (("S-2", "S-9"), "tensor's values")


def _quantized(v: Value, at: int, context: Context) -> scaling.Quantized:
    """An operand of a GEMM as the simulator quantizes it, in its tensor's layout."""
    assert v.observation is not None
    o, role = v.observation, OPERANDS[v.observation.gemm][at]
    spec = context.recipes[0][o.layer].gemms[o.gemm]
    cast, axis = (spec.a, spec.b)[at], REDUCED_AXES[o.gemm][at]
    assert cast is not None
    hp = np.asarray((o.a, o.b)[at][0], np.float32)
    if cast.delayed is None:
        return scaling.quantize(hp, cast.fmt, granularity=cast.granularity, policy=cast.policy, axis=axis)
    scales = delayed.scales(context.states[f"{o.layer}/{role}"], cast.delayed, cast.fmt)
    return scaling.quantize_with(hp, scales, cast.fmt, policy=cast.policy, axis=axis)


def _used(v: Value, at: int, context: Context) -> scaling.Quantized:
    """An operand of a GEMM as the backend multiplied it."""
    assert v.observation is not None
    spec = context.recipes[0][v.layer].gemms[v.observation.gemm]
    cast, (_, codes, scale) = (spec.a, spec.b)[at], (v.observation.a, v.observation.b)[at]
    assert cast is not None
    scale = np.asarray(scale, np.float32)
    inverse = scaling.scale_inv_from_scale(scale)
    return scaling.Quantized(np.asarray(codes), scale, inverse, cast.fmt, cast.granularity, REDUCED_AXES[v.observation.gemm][at])


def of_sum(a: Value, b: Value, context: Context) -> Reason:
    """Why results of equal operands differ: the order of the sum, or else a fault.

    It is the order if each backend sums as stated.

    As stated means within B-1 of the exact result, or under simulated hardware the plan's bits
    (B-12).
    """
    assert a.observation is not None
    qa, qb = (q if q.axis == 1 else transposed(q) for q in (_used(a, at, context) for at in (0, 1)))
    specs = [recipes[a.layer].gemms[a.observation.gemm] for recipes in context.recipes]
    if specs[0] != specs[1]:
        return Reason(
            ("G-4", "G-5", "G-7"), "operands are equal and the recipes accumulate them, or scale and round the sum, in different ways"
        )
    checks = [
        _check_sum(name, v, qa, qb, specs[0], multiply) for name, v, multiply in zip(context.names, (a, b), context.multiply, strict=True)
    ]
    wrong = [check for check in checks if not check.ok]
    equal = "codes and scales of both operands are equal"
    if any(context.multiply):
        plans = " and ".join(f"{name} sums {_by(m)}" for name, m in zip(context.names, context.multiply, strict=True))
        if wrong:
            return Reason((), f"no clause explains it: {equal}, {plans}, and {' and '.join(map(_off, wrong))}: a fault of the sum")
        return Reason(("G-20",), f"{equal}, and {plans}, each as specified: numerics.accumulate differs for this GEMM")
    shown = ", ".join(f"{check.name} at {check.worst:.2g}" for check in checks)
    if not wrong:
        return Reason(
            ("G-7", "B-1"),
            f"{equal}; the sum's order is the library's; the largest distance from the exact result, in units of B-1's bound (1 is allowed), is {shown}",
        )
    return Reason((), f"no clause explains it: {equal}, but B-1's bound is exceeded ({shown} of the bound): a fault of the sum")


def _check_sum(name: str, v: Value, a: scaling.Quantized, b: scaling.Quantized, spec: GemmSpec, multiply: Multiply | None) -> Check:
    """Check one backend's result against the bits of its plan, or against B-1's bound."""
    if multiply is not None:
        assert spec.accumulate is not None
        factors = (Factor(q.codes, q.scale_inv, q.fmt, q.granularity) for q in (a, b))
        planned = multiply(*factors, accumulate=spec.accumulate, epilogue=spec.epilogue, out_dtype=BFLOAT16)
        check = Check(name=name)
        compare_bits(check, np.asarray(v.value, np.float32).reshape(planned.shape), planned, names=(name, "sim"))
        return check
    exact = gemm.matmul(a, b, epilogue=spec.epilogue, out_dtype=BFLOAT16)  # [M, K] x [N, K] -> [M, N]
    out, check = np.asarray(v.value).reshape(exact.shape), Check(name=name, bound=1.0)
    compare_values(check, out, exact, bounds.gemm(a, b, spec, out, exact), names=(name, "sim"))
    return check


def _by(multiply: Multiply | None) -> str:
    return "in its framework's order" if multiply is None else f"under {multiply.name}"


def _off(check: Check) -> str:
    if check.bound:
        return f"B-1's bound is exceeded by {check.name} ({check.worst:.2g} times the bound)"
    return f"{check.compared - check.equal} of {check.compared} results of {check.name} are not its plan's bit for bit (B-12)"
