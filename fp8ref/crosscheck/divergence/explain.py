"""Explain why two backends differ in a value while every earlier value is equal (SEMANTICS B-10).

The reason is a clause of docs/spec that leaves the value to the library, or that none does:
then it is a fault. Scales, codes, GEMM results and attention are computed again by the simulator
(``compare_to_sim``); every other kind of value has its reason in ``REASONS``.
"""

from collections.abc import Sequence

from fp8ref.crosscheck.divergence import compare_to_sim
from fp8ref.crosscheck.divergence.compare_to_sim import Context
from fp8ref.crosscheck.divergence.difference import Difference
from fp8ref.crosscheck.divergence.report import Reason
from fp8ref.crosscheck.divergence.step_values import Value, site_before

REASONS = {
    "tokens": Reason(("D-2", "D-3"), "a batch is a function of the text, data.seed and the step: one of them differs"),
    "initial weights": Reason(("M-6", "K-7"), "initial weights are a function of run.seed and the model, or come from run.init_from"),
    "state": Reason(("K-2",), "both continue from different states"),
    "recipe": Reason(("R-1",), "the recipes quantize it differently"),
    "absent": Reason(("R-2",), "one of the recipes runs this GEMM in high precision"),
    "weight": Reason(("M-2",), "the master weights are equal, but a backend multiplies values that are not their rounding"),
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
        "no clause explains it: M-3 states where the forward pass rounds; no clause states "
        "where the backward pass rounds between GEMMs. B-5 bounds gradients",
    ),
    "parameter": Reason((), "no clause explains it: the GEMM that makes it has equal results, where it was observed. B-5 bounds gradients"),
    "norm": Reason(
        ("T-2",), "all gradients are equal; PyTorch sums their squares in float64, JAX in float32. B-4 bounds the curve of the norms"
    ),
    "learning rate": Reason(("T-3",), "a rate is a function of optimizer.learning_rate, min_learning_rate, warmup_steps and run.steps"),
    "moment": Reason(
        ("T-1", "T-2", "T-6"),
        "gradients and their norm are equal; clipping and moments depend on "
        "optimizer.max_norm, beta1, beta2 and kind; T-1 states no order of roundings",
    ),
    "master weight": Reason(
        ("T-1",),
        "moments and learning rate are equal; the remaining causes are optimizer.eps, "
        "weight_decay, the step count and the order of T-1's roundings",
    ),
    "delayed": Reason(
        ("H-3", "H-4"), "the observations of the step are equal; a history and its scale are a function of the observations and the state"
    ),
}
"""{kind of value: why it differs where all values before it are equal}."""


def explain(a: Value, b: Value, d: Difference, context: Context) -> Reason:
    """Why A's and B's value differ, given that all values before them are equal bit for bit."""
    if a.phase in ("state before", "optimizer", "batch", "loss"):
        return REASONS[_kind(a)]
    if a.gemm is not None:
        return _of_gemm(a, b, d, context)
    if a.role == "weight's gradient":
        return _of_parameter(a, context)
    return REASONS[a.role]


def _kind(v: Value) -> str:
    if v.role.endswith(("history", "stored scale")):
        return "delayed" if v.phase == "optimizer" else "state"
    if v.phase == "state before":
        return "initial weights" if v.role == "master weight" else "state"
    return {"mean": "loss", "exp_avg": "moment", "exp_avg_sq": "moment"}.get(v.role, v.role)


def _of_parameter(v: Value, context: Context) -> Reason:
    if v.layer == "model.embed_tokens":
        return REASONS["gradient of the table"]
    if v.layer not in context.recipes[0]:  # a norm's
        return REASONS["backward"]
    fp8 = all(recipes[v.layer].grad_weight.fp8 for recipes in context.recipes)
    return REASONS["parameter" if fp8 else "gradient of high precision"]


def _of_gemm(a: Value, b: Value, d: Difference, context: Context) -> Reason:
    # The order is that of the values: an operand's tensor, scale and codes come before the result.
    if a.cast != b.cast:
        return REASONS["recipe"]
    if a.part != "value":
        return compare_to_sim.of_cast(a, b, context)
    if a.role == a.gemm:
        return compare_to_sim.of_sum(a, b, context)
    if a.role == "weight":
        return REASONS["weight"]
    if a.role == "grad_output":
        return REASONS["backward"]
    module, site = site_before(a.layer)
    return compare_to_sim.of_attention(a, b, module, context) if site == "attention output" else _of_rounding(d, context)


def _of_rounding(d: Difference, context: Context) -> Reason:
    """Why a norm's output, or silu(gate) * up, differs: one float32 result, rounded once (M-3).

    Two float32 evaluations of up to 2^14 terms differ by less than 2^-9 of the result (gamma(n),
    Higham, section 3.1). A spacing of bfloat16 is at least 2^-8 of it. Their roundings are
    therefore the same number or neighbors.
    """
    if context.unobserved:
        return Reason(
            ("M-3", "G-9"), f"linears before it are in high precision and not observed ({_few(context.unobserved)}). B-2 bounds logits"
        )
    if d.unit == "bfloat16" and d.worst == 1:
        return Reason(
            ("M-3",),
            "its parts are equal and every element that differs is one bfloat16 apart: the "
            "library chooses the order of float32 sums and functions, so a rounding can fall "
            "either way. B-2 bounds the effect on logits",
        )
    by = f"{d.worst} numbers of {d.unit}" if d.worst is not None else "more than numbers"
    return Reason((), f"no clause explains it: roundings of one float32 result are one bfloat16 apart at most (M-3); these are {by} apart")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
