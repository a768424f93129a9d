"""What of a run ran in FP8, as its manifest says: the plan beside the proof."""

from dataclasses import dataclass

from fp8ref.recipe import OPERANDS
from fp8ref.train.report.runs import Run


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One linear: its three GEMMs, each a few words."""

    path: str
    shape: str
    plan: str
    gemms: tuple[str, ...]


def gemms(run: Run) -> list[Ran]:
    """Every linear of a run, and what became of its output, grad_input and grad_weight GEMMs."""
    proof = run.manifest.get("proof")
    return [
        Ran(
            path=linear["path"],
            shape=" x ".join(map(str, linear["shape"])),
            plan=linear["recipe"] if linear["fp8"] else f"high precision: {linear['reason']}",
            gemms=tuple(_gemm(f"{linear['path']}/{which}", proof) if linear["fp8"] else "high precision" for which in OPERANDS),
        )
        for linear in run.manifest["linears"]
    ]


def _gemm(name: str, proof: dict | None) -> str:
    if proof is None:
        return "planned, no proof recorded"
    if any(message.startswith((f"{name}:", f"{name} ")) for message in proof.get("missing", [])):
        return "MISSING"
    if name in proof.get("on_dequantised_operands", []):
        return "dequantised: FP8 values, high-precision GEMM"
    if name in proof.get("pruned", []):
        return "not needed"
    if simulated := next((gemm for gemm in proof.get("simulated", []) if gemm["gemm"] == name), None):
        return f"simulated: {simulated['a']} x {simulated['b']}, {simulated['accumulate']}, under {simulated['plan']}"
    seen = [gemm for gemm in proof["gemms"] if gemm["gemm"] == name]
    fp8 = next((gemm for gemm in seen if gemm["fp8"]), None)
    if fp8:
        return f"FP8: {fp8['a']} x {fp8['b']}, {fp8['accumulate']}"
    return f"high precision: {seen[0]['a']} x {seen[0]['b']}" if seen else "not seen"
