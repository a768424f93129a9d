"""Why two backends differ in a value though all before it is equal: the clause of docs/SEMANTICS.md; that none explains it is an answer too."""

from collections.abc import Sequence

from fp8ref.crosscheck.divergence import compare_to_sim
from fp8ref.crosscheck.divergence.difference import Difference
from fp8ref.crosscheck.divergence.reasons import REASONS, Reason, Subjects
from fp8ref.crosscheck.divergence.step_values import Value, maker


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
        return compare_to_sim.of_cast(a, b, subjects)
    if a.role == a.gemm:
        return compare_to_sim.of_sum(a, b, subjects)
    if a.role == "weight":
        return REASONS["weight"]
    if a.role == "grad_output":
        return REASONS["backward"]
    module, site = maker(a.layer)
    return compare_to_sim.of_attention(a, b, module, subjects) if site == "attention output" else _of_rounding(d, subjects)


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


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
