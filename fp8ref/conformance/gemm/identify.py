"""A scaled GEMM's arithmetic from outside: everything that is asked of it, and the plan that its answers make (SEMANTICS G-18)."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8ref.conformance.finding import Finding, table
from fp8ref.conformance.gemm import epilogues, order, plans, specials, step
from fp8ref.conformance.gemm.adapter import Subject, operand
from fp8ref.conformance.gemm.order import Sample
from fp8ref.conformance.gemm.stimulus import Bench
from fp8ref.epilogue import Epilogue
from fp8ref.formats import E4M3FN, Format
from fp8ref.result import Result
from fp8ref.sim import gemm
from fp8ref.sim.accumulate import Accumulation
from fp8ref.sim.tensor_core import K_STEP

if TYPE_CHECKING:
    from rich.console import Console

SHAPE = (128, 128, 4096)
FEW = 1000  # results, fewer than which prove little


@dataclass(frozen=True, kw_only=True)
class Identified(Result):
    """plans: those that fit all answers, of a tensor core, or ``f32`` or ``exact``; the simplest first, none where none does. epilogue likewise.

    compared, equal
        results of random operands under random scales, and those whose bits are the simulator's under accumulate and epilogue.
    """

    bench: Bench
    findings: Sequence[Finding]
    drawn: Sample
    plans: Sequence[str | Accumulation]
    epilogue: Epilogue | None
    compared: int
    equal: int

    @property
    def accumulate(self) -> str | Accumulation | None:
        """The simplest plan that fits; None where none does."""
        return self.plans[0] if self.plans else None

    @property
    def unlike(self) -> list[Finding]:
        """What is not as the simulator has it though random numbers are: specials, extremes, the bias."""
        return [f for f in self.findings if f.what in specials.KINDS and f.value not in specials.ALIKE]

    @property
    def ok(self) -> bool:
        """Whether the simulator has all of its bits."""
        return self.accumulate is not None and self.epilogue is not None and self.equal == self.compared and not self.unlike

    @property
    def plan(self) -> dict[str, Any]:
        """What was found as data; keys of a plan that none fits are null."""
        if self.accumulate is not None:
            of_sums = plans.of_accumulation(self.accumulate)
        else:
            known = {f.what: f.value for f in self.findings if not (f.what == "fused_width" and isinstance(f.value, str))}
            of_sums = {"accumulate": None} | {key: known.get(key) for key in plans.UNIT} | dict.fromkeys(plans.PLAN)
        return {**of_sums, "epilogue": self.epilogue and self.epilogue.name, "out_dtype": self.bench.out.name}

    def to_dict(self) -> dict[str, Any]:
        """What --json keeps: ok, subject, shape, formats, plan, confirmed, and the evidence of each finding."""
        bench = self.bench
        return {
            "ok": self.ok,
            "subject": bench.subject.name,
            "about": dict(bench.subject.about),
            "shape": [bench.m, bench.n, bench.k],
            "formats": [bench.fmt_a.name, bench.fmt_b.name],
            "granularity": bench.subject.granularity,
            "plan": self.plan,
            "confirmed": {"compared": self.compared, "equal": self.equal},
            "evidence": {f.what: f.to_dict() | {"others": list(f.others)} for f in self.findings},
        }

    def render(self, console: "Console") -> None:
        """Every finding, and the verdict."""
        bench = self.bench
        title = f"{bench.subject.name}, [{bench.m}, {bench.n}], K = {bench.k}, {bench.fmt_a} x {bench.fmt_b}, {bench.subject.granularity}"
        console.print(title, table(self.findings), sep="\n", markup=False)
        console.print(self.verdict, markup=False, highlight=False, soft_wrap=True)

    @property
    def verdict(self) -> str:
        """What was found in one line, for a person."""
        if self.accumulate is None or self.epilogue is None:
            missing = [name for name, value in (("accumulation", self.accumulate), ("epilogue", self.epilogue)) if value is None]
            return f"no {' and no '.join(missing)} of the simulator gives these answers"
        bits = f"{self.equal:,} of {self.compared:,} random results have the simulator's bits under it"
        few = f"; so few tell little: probe a larger M and N than {self.bench.m} and {self.bench.n}" if self.compared < FEW else ""
        if self.equal < self.compared:
            return f"NOT confirmed: {bits}"
        unlike = ", ".join(f.what for f in self.unlike)
        return f"identified: {bits}{few}" if self.ok else f"NOT identified: {bits}, but not: {unlike}{few}"


def identify(
    subject: Subject, *, shape: tuple[int, int, int] = SHAPE, formats: tuple[Format, Format] = (E4M3FN, E4M3FN), seed: int = 0
) -> Identified:
    """Ask a GEMM of this shape [M, N, K] everything.

    formats   of a [M, K] and b [N, K]; seed: of the random operands that confirm what was found.
    Raises:   ValueError: M or N below 1, a K that is no multiple of 32; ProbeError: the subject is no function, or sums in different ways at
              different places of one result.
    Source:   SEMANTICS G-18.
    """
    m, n, k = shape
    if min(m, n) < 1 or k < K_STEP or k % K_STEP:
        raise ValueError(f"a probe takes M and N of at least 1 and a K of at least {K_STEP} that {K_STEP} divides; got {list(shape)}.")
    bench, of_out = epilogues.rounding(Bench(subject=subject, m=m, n=n, k=k, fmt_a=formats[0], fmt_b=formats[1]), seed)
    drawn = order.sample(bench, seed)
    plans, findings = _accumulation(bench, drawn)
    fitting, of_epilogue = epilogues.epilogue(bench, plans[0] if plans else None, seed)
    pairs, compared, equal = _confirmed(bench, plans, fitting, seed)
    ends: list[Finding] = []
    if pairs:
        plans, fitting = (list(dict.fromkeys(of_pair)) for of_pair in zip(*pairs, strict=True))
        tried = {epilogue: specials.extremes(bench, plans[0], epilogue, seed) for epilogue in fitting}
        fitting = [e for e in fitting if all(f.value in specials.ALIKE for f in tried[e])] or fitting
        ends = tried[fitting[0]]
    if fitting:
        of_epilogue[0] = dataclasses.replace(of_epilogue[0], value=fitting[0].name, others=tuple(e.name for e in fitting[1:]))
    findings = _settled(findings, plans)
    findings += [*of_epilogue, *of_out, *specials.specials(bench), *ends]
    epilogue = fitting[0] if fitting else None
    return Identified(bench=bench, findings=findings, drawn=drawn, plans=plans, epilogue=epilogue, compared=compared, equal=equal)


def _settled(findings: Sequence[Finding], plans: Sequence[str | Accumulation]) -> list[Finding]:
    """The findings, those about the order of sums made anew from the plans that are left after all."""
    made = [plan for plan in plans if isinstance(plan, Accumulation)]
    if not made:
        return list(findings)
    evidence = next(finding.evidence for finding in findings if finding.what == "promotion")
    return [*(finding for finding in findings if finding.what not in order.NAMES), *order.findings_of(made, evidence)]


def _accumulation(bench: Bench, drawn: Sample) -> tuple[Sequence[str | Accumulation], list[Finding]]:
    """The plans that fit, and what they were found by."""
    width = step.width(bench)
    if not isinstance(width.value, int):
        name = {step.SEQUENTIAL: "f32", step.WIDE: "exact"}.get(str(width.value))
        fits = [name] if name and drawn.fits(bench, name) else []
        evidence = f"random sums have{'' if fits else ' not'} the bits of {name!r}" if name else "no order of ours groups products so"
        return fits, [width, Finding(what="order", value=fits[0] if fits else None, evidence=evidence)]
    units, found = step.units(bench, width.value)
    found = [width, *found]
    if not units:
        return [], found
    plans, strung = order.order(bench, units, drawn)
    if plans:
        alike = [unit for unit in units if unit == plans[0].unit or drawn.fits(bench, dataclasses.replace(plans[0], unit=unit))]
        alike.sort(key=lambda unit: unit != plans[0].unit)
        found = [step.settled(finding, alike) for finding in found]
    return plans, found + strung


def _confirmed(
    bench: Bench, plans: Sequence[str | Accumulation], fitting: Sequence[Epilogue], seed: int
) -> tuple[list[tuple[str | Accumulation, Epilogue]], int, int]:
    """The pairs with the most results of new random operands under random scales; of how many, and how many are equal."""
    pairs = [(plan, epilogue) for plan in plans for epilogue in fitting]
    if not pairs:
        return [], 0, 0
    equal, compared = dict.fromkeys(pairs, 0), 0
    rows, columns = bench.seen
    for i in range(max(2, min(epilogues.MOST_ROUNDS, epilogues.ENOUGH // (len(rows) * len(columns))))):
        rng = np.random.default_rng([seed, i])
        a, b, found = epilogues.under_scales(bench, order.draw(bench, rng), rng)
        plain = [operand(q.codes, q.fmt, "tensorwise") for q in (a, b)]
        most = max(equal.values())
        for plan in plans:
            left = [epilogue for epilogue in fitting if equal[plan, epilogue] == most]
            if not left:
                continue
            acc = gemm.matmul(*plain, accumulate=plan)
            for epilogue in left:
                expected = gemm.finish(acc, a.scale_inv, b.scale_inv.T, epilogue=epilogue, out_dtype=bench.out)
                equal[plan, epilogue] += int((found.view(np.uint32) == expected.view(np.uint32)).sum())
        compared += found.size
    most = max(equal.values())
    return [pair for pair in pairs if equal[pair] == most], compared, most
