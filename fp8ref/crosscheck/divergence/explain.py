"""Explain why two backends differ in a value while every earlier value is equal (spec B-10).

The reason is a clause of docs/spec that leaves the value to the library, or that none does:
then it is a fault. Scales, codes, GEMM results and attention are computed again by the simulator
(``cast_reason``, ``sum_reason``, ``attention_reason``). Where it defines the bits, a backend that
differs from it is at fault; where a clause leaves the order of a sum to the library, both results
are held to that clause's bound. Every other kind of value has its reason in ``REASONS``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.kit.compare import Check, compare_codes, compare_scales
from fp8ref.crosscheck import bounds, device_gemm
from fp8ref.crosscheck.divergence import attention
from fp8ref.crosscheck.divergence.difference import Difference
from fp8ref.crosscheck.divergence.report import Reason, fault
from fp8ref.crosscheck.divergence.step_values import Value, site_before
from fp8ref.crosscheck.operands import Operand, OperandCast, States, as_factor
from fp8ref.recipe import GemmSpec, Recipe
from fp8ref.shared import package_data
from fp8ref.sim.quantize import scaling
from fp8ref.spec.hardware import Multiply
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.config.sections import NumericsConfig

REASONS = {
    kind: Reason(texts["clauses"], texts["text"]) if "clauses" in texts else fault(texts["text"])
    for kind, texts in package_data.tables(__file__, "reasons").items()
}
"""{kind of value: why it differs where all values before it are equal}."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the reason of a difference may depend on besides the two values.

    names       of the two backends; recipes: theirs, by linear.
    states      A's states of delayed scaling before the step.
    model       A's model configuration.
    outputs     A's observed forward GEMM outputs [B, T, N], by linear.
    unobserved  linears in high precision before the value, which no observer sees.
    multiply    simulated hardware of each backend (G-19); None: the framework's own GEMMs.
    numerics    both configs', of attention by a variant.
    """

    names: tuple[str, str]
    recipes: tuple[dict[str, Recipe], dict[str, Recipe]]
    states: States
    model: LlamaConfig
    outputs: Mapping[str, np.ndarray]
    unobserved: Sequence[str] = ()
    multiply: tuple[Multiply | None, Multiply | None] = (None, None)
    numerics: tuple[NumericsConfig, NumericsConfig] | None = None


def explain(a: Value, b: Value, d: Difference, context: Context) -> Reason:
    """Why A's and B's value differ, given that all values before them are equal bit for bit."""
    if a.phase in ("state before", "optimizer", "batch", "loss"):
        return REASONS[_kind(a)]
    if a.gemm is not None:
        return _gemm_reason(a, b, d, context)
    if a.passes:
        assert context.numerics is not None
        return attention.explain(
            a, b, context.names, context.numerics, context.multiply, context.states
        )
    if a.role == "weight's gradient":
        return _parameter_reason(a, context)
    return REASONS[a.role]


def _kind(v: Value) -> str:
    if v.role.endswith(("history", "stored scale")):
        return "delayed" if v.phase == "optimizer" else "state"
    if v.phase == "state before":
        return "initial weights" if v.role == "master weight" else "state"
    return {"mean": "loss", "exp_avg": "moment", "exp_avg_sq": "moment"}.get(v.role, v.role)


def _parameter_reason(v: Value, context: Context) -> Reason:
    if v.layer == "model.embed_tokens":
        return REASONS["gradient of the table"]
    if v.layer not in context.recipes[0]:  # a norm's
        return REASONS["backward"]
    fp8 = all(recipes[v.layer].grad_weight.fp8 for recipes in context.recipes)
    return REASONS["parameter" if fp8 else "gradient of high precision"]


def _gemm_reason(a: Value, b: Value, d: Difference, context: Context) -> Reason:
    # The order is that of the values: an operand's tensor, scale and codes come before the result.
    if a.cast != b.cast:
        return REASONS["recipe"]
    if a.part != "value":
        return cast_reason(a, b, context)
    if a.role == a.gemm:
        return sum_reason(a, b, context)
    if a.role == "weight":
        return REASONS["weight"]
    if a.role == "grad_output":
        return REASONS["backward"]
    module, site = site_before(a.layer)
    if site == "attention output":
        return attention_reason(a, b, module, context)
    return _rounding_reason(d, context)


def _rounding_reason(d: Difference, context: Context) -> Reason:
    """Why a norm's output, or silu(gate) * up, differs: one float32 result, rounded once (M-3).

    Two float32 evaluations of up to 2^14 terms differ by less than 2^-9 of the result (gamma(n),
    Higham, section 3.1). A spacing of bfloat16 is at least 2^-8 of it. Their roundings are
    therefore the same number or neighbors.
    """
    if context.unobserved:
        return Reason(
            ("M-3", "G-9"),
            "linears before it are in high precision and not observed "
            f"({_few(context.unobserved)}). B-2 bounds logits",
        )
    if d.unit == "bfloat16" and d.worst == 1:
        return Reason(
            ("M-3",),
            "its parts are equal and every element that differs is one bfloat16 apart: the "
            "library chooses the order of float32 sums and functions, so a rounding can fall "
            "either way. B-2 bounds the effect on logits",
        )
    by = f"{d.worst} numbers of {d.unit}" if d.worst is not None else "more than numbers"
    return fault(
        "roundings of one float32 result are one bfloat16 apart at most "
        f"(M-3); these are {by} apart"
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def attention_reason(a: Value, b: Value, module: str, context: Context) -> Reason:
    """Why attention's output differs: of equal, observed q, k and v it is within B-11."""
    q, k, v = [context.outputs.get(f"{module}.{p}_proj") for p in "qkv"]
    if q is None or k is None or v is None:
        return Reason(
            ("M-3", "G-9"),
            "queries, keys and values are not all observed, because their linears are in high "
            "precision. B-2 bounds logits",
        )
    simulated = bounds.attention(q, k, v, context.model)
    names, outs = context.names, [np.asarray(x.value, np.float64) for x in (a, b)]
    distances = [simulated.distance(out) for out in outs]
    shown = " and ".join(f"{name} at {u:.2g}" for name, u in zip(names, distances, strict=True))
    if max(distances) > 1:
        return fault(
            "queries, keys and values are equal, but B-11's bound is "
            f"exceeded ({shown} of the bound): a fault of attention"
        )
    # Within the bound, the share of equal elements shows which variant's order a library uses.
    before, after = (
        [int((out == variant).sum()) for out in outs]
        for variant in (simulated.before, simulated.after)
    )
    return Reason(
        ("M-3", "B-11"),
        "queries, keys and values are equal. The library chooses the order of float32 sums, "
        "and whether to normalize probabilities before or after their rounding. Normalized "
        f"before it, the simulator has {before[0]:,} of {outs[0].size:,} elements of "
        f"{names[0]} and {before[1]:,} of {names[1]}; after it, {after[0]:,} and {after[1]:,}. "
        f"Distances in units of B-11's bound: {shown}",
    )


def cast_reason(a: Value, b: Value, context: Context) -> Reason:
    """Why a scale or codes of equal tensors differ: their bits are defined, so it is a fault."""
    assert a.cast is not None
    cast, (hp, *_) = _operand(a, context)
    q = cast.simulated(np.asarray(hp, np.float32), cast.state(a.layer, context.states))
    wrong = []
    for name, v in zip(context.names, (a, b), strict=True):
        _, (hp, codes, scale) = _operand(v, context)
        check = Check(name=name)
        if a.part == "scale":
            compare_scales(check, {"sim": q.scale, name: np.asarray(scale, np.float32)}, name)
        else:
            by_name = {"sim": q.codes, name: np.asarray(codes)}
            compare_codes(check, by_name, name, a.cast.fmt, np.asarray(hp, np.float32))
        if not check.ok:
            wrong.append(f"{name}'s ({check.compared - check.equal} of {check.compared})")
    if a.part != "scale":
        clauses, of = "C-1, C-2, S-5", "tensor and scale"
    elif a.cast.delayed:
        clauses, of = "H-1, S-9", "tensor and state"
    else:
        clauses, of = "S-2, S-9", "tensor's values"
    return fault(
        f"its {of} are equal, and {clauses} define every bit of its "
        f"{a.part}; different from the simulator's: {' and '.join(wrong)}: a fault"
    )


def _operand(v: Value, context: Context) -> tuple[OperandCast, Operand]:
    """The operand that a value is part of, and how A's recipe casts it."""
    assert v.observation is not None
    o = v.observation
    spec = context.recipes[0][o.layer].gemms[o.gemm]
    return next(pair for pair in o.operands(spec) if pair[0].role == v.role)


def sum_reason(a: Value, b: Value, context: Context) -> Reason:
    """Why results of equal operands differ: the order of the sum, or else a fault.

    It is the order if each backend sums as stated.

    As stated: within B-1 of the exact result, or under simulated hardware the plan's bits.
    """
    assert a.observation is not None
    specs = [recipes[a.layer].gemms[a.observation.gemm] for recipes in context.recipes]
    qa, qb = map(as_factor, a.observation.used(specs[0]))
    if specs[0] != specs[1]:
        return Reason(
            ("G-4", "G-5", "G-7"),
            "operands are equal and the recipes accumulate them, or scale and round the sum, in "
            "different ways",
        )
    checks = [
        _check_sum(name, v, (qa, qb), specs[0], multiply)
        for name, v, multiply in zip(context.names, (a, b), context.multiply, strict=True)
    ]
    wrong = [check for check in checks if not check.ok]
    equal = "codes and scales of both operands are equal"
    if any(context.multiply):
        plans = " and ".join(
            f"{name} sums {_by(m)}" for name, m in zip(context.names, context.multiply, strict=True)
        )
        if wrong:
            return fault(
                f"{equal}, {plans}, and {' and '.join(map(_off, wrong))}: a fault of the sum"
            )
        return Reason(
            ("G-20",),
            f"{equal}, and {plans}, each as specified: numerics.accumulate differs for this GEMM",
        )
    shown = ", ".join(f"{check.name} at {check.worst:.2g}" for check in checks)
    if not wrong:
        return Reason(
            ("G-7", "B-1"),
            f"{equal}; the sum's order is the library's; the largest distance from the exact "
            f"result, in units of B-1's bound (1 is allowed), is {shown}",
        )
    return fault(f"{equal}, but B-1's bound is exceeded ({shown} of the bound): a fault of the sum")


def _check_sum(
    name: str,
    v: Value,
    operands: tuple[scaling.Quantized, scaling.Quantized],
    spec: GemmSpec,
    multiply: Multiply | None,
) -> Check:
    """Check one backend's result against the bits of its plan, or within B-1's bound or B-16's."""
    assert v.observation is not None
    a, b = operands
    out = np.asarray(v.value, np.float32).reshape(len(a.codes), len(b.codes))
    names = (name, "sim")
    if multiply is not None:
        check = Check(name=name)
        device_gemm.compare_planned(check, operands, spec, out, multiply, names=names)
        return check
    backend, check = v.observation.backend, Check(name=name, bound=1.0)
    parts = [bounds.Part(a, b, device_gemm.simulated(backend, a, b, spec))]
    device_gemm.compare(check, backend, parts, spec, out, names=names)
    return check


def _by(multiply: Multiply | None) -> str:
    return "in its framework's order" if multiply is None else f"under {multiply.name}"


def _off(check: Check) -> str:
    if check.bound:
        return f"B-1's bound is exceeded by {check.name} ({check.worst:.2g} times the bound)"
    return (
        f"{check.compared - check.equal} of {check.compared} results of {check.name} are not "
        "its plan's bit for bit (B-12)"
    )
