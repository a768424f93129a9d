"""Which clause of docs/SEMANTICS.md explains that two backends differ in a value though all before it is equal; that none does is an answer too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref.check import bounds
from fp8ref.check.compare import Check, compare_codes, compare_scales
from fp8ref.check.crosscheck import transposed
from fp8ref.check.divergence.attention import attended
from fp8ref.check.divergence.difference import Difference
from fp8ref.check.divergence.step_values import Value, maker
from fp8ref.check.states import States
from fp8ref.formats import BFLOAT16
from fp8ref.llama import LlamaConfig
from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec, Recipe
from fp8ref.sim import delayed, gemm, scaling


@dataclass(frozen=True)
class Reason:
    """clauses: those that explain a difference; none where no clause does."""

    clauses: tuple[str, ...]
    text: str


# By kind of value; what is found by computing (scales, codes, results of GEMMs, roundings one bfloat16 apart) is below.
REASONS = {
    "tokens": Reason(("D-2", "D-3"), "a batch is a function of the text, data.seed and the step: one of them differs"),
    "initial weights": Reason(("M-6", "K-7"), "initial weights are a function of run.seed and the model, or are run.init_from's"),
    "state": Reason(("K-2",), "the states that both go on from are another"),
    "recipe": Reason(("R-1",), "the recipes quantise it otherwise"),
    "absent": Reason(("R-2",), "one of the recipes runs this GEMM in high precision"),
    "weight": Reason(("M-2",), "the masters are equal and what is multiplied is not their rounding in both"),
    "logits": Reason(
        ("G-9", "M-3"), "lm_head in high precision sums in float32 in any order, and so does model.norm before it. B-2 bounds logits"
    ),
    "loss": Reason(("M-5",), "logits are equal; logsumexp and mean are float32 sums, in the library's order. B-3 bounds the loss"),
    "gradient of high precision": Reason(
        ("G-9",), "a GEMM in high precision sums in float32 in any order, of operands that are not observed. B-5 bounds gradients"
    ),
    "gradient of the table": Reason(
        ("M-2",), "rows of the embedding's gradient are float32 sums over tokens, in the library's order. B-5 bounds them"
    ),
    "backward": Reason(
        (),
        "no clause explains it: M-3 states where the forward pass rounds, none where the backward pass does between GEMMs. B-5 bounds gradients",
    ),
    "parameter": Reason((), "no clause explains it: the GEMM that makes it has equal results, where it was observed. B-5 bounds gradients"),
    "norm": Reason(
        ("T-2",), "all gradients are equal; PyTorch sums their squares in float64, JAX in float32. B-4 bounds the curve of the norms"
    ),
    "learning rate": Reason(("T-3",), "a rate is a function of optimizer.learning_rate, min_learning_rate, warmup_steps and run.steps"),
    "moment": Reason(
        ("T-1", "T-2", "T-6"),
        "gradients and their norm are equal; clipping and moments are of optimizer.max_norm, beta1, beta2 and kind; T-1 states no order of roundings",
    ),
    "master weight": Reason(
        ("T-1",),
        "moments and learning rate are equal; what is left is optimizer.eps, weight_decay, the steps counted and the order of T-1's roundings",
    ),
    "delayed": Reason(
        ("H-3", "H-4"), "what the step observed is equal; a history and the scale made of it are a function of that and the state"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Subjects:
    """What two backends had beside the values: names, recipes by linear, A's states of delayed scaling before the step.

    model, outputs   of A: its sizes, and the results of the forward GEMMs that were observed, [B, T, N] by linear.
    unseen    linears in high precision between the values, which are not observed.
    """

    names: tuple[str, str]
    recipes: tuple[dict[str, Recipe], dict[str, Recipe]]
    states: States
    model: LlamaConfig
    outputs: Mapping[str, np.ndarray]
    unseen: Sequence[str] = ()


def explain(a: Value, b: Value, d: Difference, subjects: Subjects) -> Reason:
    """Why A's and B's value differ, all values before them being equal bit for bit."""
    if a.phase in ("state before", "optimizer", "batch", "loss"):
        return REASONS[_kind(a)]
    if a.gemm is not None:
        return _of_gemm(a, b, d, subjects)
    if a.role == "weight's gradient":
        return _of_parameter(a, subjects)
    return REASONS[a.role]


def _kind(v: Value) -> str:
    if v.role.endswith(("history", "stored scale")):
        return "delayed" if v.phase == "optimizer" else "state"
    if v.phase == "state before":
        return "initial weights" if v.role == "master weight" else "state"
    return {"mean": "loss", "exp_avg": "moment", "exp_avg_sq": "moment"}.get(v.role, v.role)


def _of_parameter(v: Value, subjects: Subjects) -> Reason:
    if v.layer == "model.embed_tokens":
        return REASONS["gradient of the table"]
    if v.layer not in subjects.recipes[0]:  # a norm's
        return REASONS["backward"]
    fp8 = all(recipes[v.layer].grad_weight.fp8 for recipes in subjects.recipes)
    return REASONS["parameter" if fp8 else "gradient of high precision"]


def _of_gemm(a: Value, b: Value, d: Difference, subjects: Subjects) -> Reason:
    if a.cast != b.cast:
        return REASONS["recipe"]
    if a.part != "value":
        return _of_cast(a, b, subjects)
    if a.role == a.gemm:
        return _of_sum(a, b, subjects)
    if a.role == "weight":
        return REASONS["weight"]
    if a.role == "grad_output":
        return REASONS["backward"]
    module, site = maker(a.layer)
    return _of_attention(a, b, module, subjects) if site == "attention output" else _of_rounding(d, subjects)


def _of_attention(a: Value, b: Value, module: str, subjects: Subjects) -> Reason:
    projections = [subjects.outputs.get(f"{module}.{p}_proj") for p in "qkv"]
    q, k, v = projections
    if q is None or k is None or v is None:
        return Reason(
            ("M-3", "G-9"), "not all of queries, keys and values are observed, whose linears are in high precision. B-2 bounds logits"
        )
    simulated = attended(q, k, v, subjects.model)
    names, outs = subjects.names, [np.asarray(x.value, np.float64) for x in (a, b)]
    used = [simulated.used(out) for out in outs]
    told = " and ".join(f"{name} at {u:.2g}" for name, u in zip(names, used, strict=True))
    if max(used) > 1:
        return Reason(
            (),
            f"no clause explains it: queries, keys and values are equal, and B-11's bound is exceeded ({told} of it): a fault of attention",
        )
    before, after = ([int((out == variant).sum()) for out in outs] for variant in (simulated.before, simulated.after))
    return Reason(
        ("M-3", "B-11"),
        "queries, keys and values are equal; the order of float32 sums, and whether probabilities are normalised before or after their rounding, are the "
        f"library's. Normalised before it, the simulator has {before[0]:,} of {outs[0].size:,} elements of {names[0]} and {before[1]:,} of {names[1]}; "
        f"after it, {after[0]:,} and {after[1]:,}. In units of B-11's bound {told}",
    )


def _of_rounding(d: Difference, subjects: Subjects) -> Reason:
    """Of a norm's output, or silu(gate) * up: one float32 result, rounded once (M-3).

    Two float32 evaluations differ by less than 2^-9 of the result for sums of up to 2^14 terms (gamma(n), Higham, section 3.1), and so by less
    than a spacing of bfloat16, which is at least 2^-8 of it: their roundings are the same number or neighbours.
    """
    if subjects.unseen:
        return Reason(
            ("M-3", "G-9"), f"linears before it are in high precision and not observed ({_few(subjects.unseen)}). B-2 bounds logits"
        )
    if d.unit == "bfloat16" and d.worst == 1:
        return Reason(
            ("M-3",),
            "its parts are equal and every element that differs lies one bfloat16 apart: float32 sums and functions in the library's order, "
            "of which one rounding falls either way. B-2 bounds what it does to logits",
        )
    by = f"{d.worst} numbers of {d.unit}" if d.worst is not None else "more than numbers"
    return Reason((), f"no clause explains it: roundings of one float32 result lie one bfloat16 apart at most (M-3); these lie {by} apart")


def _of_cast(a: Value, b: Value, subjects: Subjects) -> Reason:
    """Of a scale or codes of one tensor: the simulator's are defined bit for bit, so that one of the two is at fault."""
    assert a.cast is not None
    assert a.gemm is not None
    at = OPERANDS[a.gemm].index(a.role)
    simulated = _quantized(a, at, subjects)
    wrong = []
    for name, v in zip(subjects.names, (a, b), strict=True):
        assert v.seen is not None
        hp, codes, scale = (v.seen.a, v.seen.b)[at]
        check = Check(name=name)
        if a.part == "scale":
            compare_scales(check, {"sim": simulated.scale, name: np.asarray(scale, np.float32)}, name)
        else:
            compare_codes(check, {"sim": simulated.codes, name: np.asarray(codes)}, name, a.cast.fmt, np.asarray(hp, np.float32))
        wrong += [] if check.ok else [f"{name}'s ({check.compared - check.equal} of {check.compared} are not)"]
    clauses, of = _clauses(a.cast) if a.part == "scale" else (("C-1", "C-2", "S-5"), "tensor and scale")
    text = (
        f"its {of} are equal and {a.part} of it are defined bit for bit ({', '.join(clauses)}); not the simulator's: {' and '.join(wrong)}"
    )
    return Reason((), f"no clause explains it: {text}: a fault")


def _clauses(cast: CastSpec) -> tuple[tuple[str, ...], str]:
    return (("H-1", "S-9"), "tensor and state") if cast.delayed else (("S-2", "S-9"), "tensor's values")


def _quantized(v: Value, at: int, subjects: Subjects) -> scaling.Quantized:
    """An operand of a GEMM, in its tensor's layout, by the simulator."""
    assert v.seen is not None
    o, role = v.seen, OPERANDS[v.seen.gemm][at]
    spec = subjects.recipes[0][o.layer].gemms[o.gemm]
    cast, axis = (spec.a, spec.b)[at], REDUCED_AXES[o.gemm][at]
    assert cast is not None
    hp = np.asarray((o.a, o.b)[at][0], np.float32)
    if cast.delayed is None:
        return scaling.quantize(hp, cast.fmt, granularity=cast.granularity, policy=cast.policy, axis=axis)
    scales = delayed.scales(subjects.states[f"{o.layer}/{role}"], cast.delayed, cast.fmt)
    return scaling.quantize_with(hp, scales, cast.fmt, policy=cast.policy, axis=axis)


def _used(v: Value, at: int, subjects: Subjects) -> scaling.Quantized:
    """An operand of a GEMM, as the GEMM had it."""
    assert v.seen is not None
    spec = subjects.recipes[0][v.layer].gemms[v.seen.gemm]
    cast, (_, codes, scale) = (spec.a, spec.b)[at], (v.seen.a, v.seen.b)[at]
    assert cast is not None
    scale = np.asarray(scale, np.float32)
    inverse = scaling.scale_inv_from_scale(scale)
    return scaling.Quantized(np.asarray(codes), scale, inverse, cast.fmt, cast.granularity, REDUCED_AXES[v.seen.gemm][at])


def _of_sum(a: Value, b: Value, subjects: Subjects) -> Reason:
    """Of a GEMM's result: operands are equal, so that it is the order of the sum, if both are within B-1."""
    assert a.seen is not None
    qa, qb = (q if q.axis == 1 else transposed(q) for q in (_used(a, at, subjects) for at in (0, 1)))
    specs = [recipes[a.layer].gemms[a.seen.gemm] for recipes in subjects.recipes]
    if specs[0] != specs[1]:
        return Reason(
            ("G-4", "G-5", "G-7"), "operands are equal and the recipes accumulate them, or scale and round the sum, in different ways"
        )
    simulated = gemm.matmul(qa, qb, epilogue=specs[0].epilogue, out_dtype=BFLOAT16)  # [M, K] x [N, K] -> [M, N]
    used = []
    for v in (a, b):
        out = np.asarray(v.value).reshape(simulated.shape)
        distance = np.abs(out.astype(np.float64) - simulated)
        used.append(float(np.nan_to_num(distance / bounds.gemm(qa, qb, specs[0], out, simulated), nan=np.inf).max()))
    told = ", ".join(f"{name} at {u:.2g}" for name, u in zip(subjects.names, used, strict=True))
    if max(used) <= 1:
        return Reason(
            ("G-7", "B-1"),
            "codes and scales of both operands are equal; the order of the sum is the library's, and the largest distance from the exact result, in "
            f"units of B-1's bound, is {told}",
        )
    return Reason(
        (),
        f"no clause explains it: codes and scales of both operands are equal, and B-1's bound is exceeded ({told} of it): a fault of the sum",
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
