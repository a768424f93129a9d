"""Identify a scaled GEMM's accumulation plan, epilogue and specials (spec G-18).

1. The output dtype and rounding, from sums of integers (``epilogues``).
2. The width and roundings of one step (``step``), then the order of steps (``plans``).
3. The epilogue: how scales and bias enter (``epilogues``).
4. Plan and epilogue are confirmed on new random operands; then come ``specials``: NaN, extremes.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8ref.conformance.gemm import epilogues, specials, step
from fp8ref.conformance.gemm.grade import Grade
from fp8ref.conformance.gemm.plans import (
    FIELDS,
    PLAN,
    UNIT,
    Sample,
    draw_codes,
    draw_sample,
    findings_of,
    fitting_plans,
    plan_to_dict,
)
from fp8ref.conformance.gemm.scaled_gemm import ScaledGemm, unscaled
from fp8ref.conformance.gemm.stimulus import Bench
from fp8ref.conformance.kit.finding import Finding, table
from fp8ref.formats import E4M3FN, Format
from fp8ref.shared.result import Result
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.gemm.tensor_core import K_STEP
from fp8ref.spec.epilogue import Epilogue

if TYPE_CHECKING:
    from rich.console import Console

SHAPE = (128, 128, 4096)  # the default M, N and K of the GEMM that is probed
FEW = 1000  # the number of results below which the summary adds that they prove little


@dataclass(frozen=True, kw_only=True)
class Identified(Result):
    """What was identified of a GEMM.

    plans      accumulation plans that fit all results, or ``f32`` or ``exact``; the simplest first.
    epilogue   the likeliest that fits; None if none does.
    compared   results of random operands under random scales.
    equal      those of them with the simulator's bits under accumulate and epilogue.
    grade      how wrong it is, if it was graded.
    """

    bench: Bench
    findings: Sequence[Finding]
    drawn: Sample
    plans: Sequence[str | Accumulation]
    epilogue: Epilogue | None
    compared: int
    equal: int
    grade: Grade | None = None

    @property
    def accumulate(self) -> str | Accumulation | None:
        """The simplest plan that fits; None if none does."""
        return self.plans[0] if self.plans else None

    @property
    def unlike(self) -> list[Finding]:
        """Specials, extremes and the bias, where they differ from the simulator."""
        return [
            f for f in self.findings if f.what in specials.KINDS and f.value not in specials.ALIKE
        ]

    @property
    def ok(self) -> bool:
        """True if the simulator has all of its bits."""
        return (
            self.accumulate is not None
            and self.epilogue is not None
            and self.equal == self.compared
            and not self.unlike
        )

    @property
    def plan(self) -> dict[str, Any]:
        """The plan as JSON. If no plan fits, keys that are not known are null."""
        if self.accumulate is not None:
            accumulation = plan_to_dict(self.accumulate)
        else:
            values = {f.what: f.value for f in self.findings}
            if isinstance(values.get("fused_width"), str):
                del values["fused_width"]
            accumulation = {key: values.get(key) for key in ("accumulate", *UNIT)}
            accumulation |= dict.fromkeys(PLAN)
        epilogue = self.epilogue and self.epilogue.name
        return {**accumulation, "epilogue": epilogue, "out_dtype": self.bench.out.name}

    def to_dict(self) -> dict[str, Any]:
        """As --json writes it: ok, subject, shape, formats, plan, confirmed and evidence."""
        bench = self.bench
        return {
            "ok": self.ok,
            "subject": bench.gemm.name,
            "about": dict(bench.gemm.about),
            "shape": [bench.m, bench.n, bench.k],
            "formats": [bench.fmt_a.name, bench.fmt_b.name],
            "granularity": bench.gemm.granularity,
            "plan": self.plan,
            "confirmed": {"compared": self.compared, "equal": self.equal},
            "evidence": {f.what: f.to_dict() | {"others": list(f.others)} for f in self.findings},
            "grade": self.grade and self.grade.to_dict(),
        }

    def render(self, console: "Console") -> None:
        """Print every finding, the verdict, and the grade."""
        bench = self.bench
        title = (
            f"{bench.gemm.name}, [{bench.m}, {bench.n}], K = {bench.k}, {bench.fmt_a} x "
            f"{bench.fmt_b}, {bench.gemm.granularity}"
        )
        console.print(title, table(self.findings), sep="\n", markup=False)
        console.print(self.verdict, markup=False, highlight=False, soft_wrap=True)
        if self.grade is not None:
            console.print(self.grade.message, markup=False, highlight=False, soft_wrap=True)

    @property
    def verdict(self) -> str:
        """What was identified, in one line."""
        parts = {"accumulation": self.accumulate, "epilogue": self.epilogue}
        if missing := [name for name, value in parts.items() if value is None]:
            return f"no {' and no '.join(missing)} of the simulator gives these answers"
        bits = (
            f"{self.equal:,} of {self.compared:,} random results have the simulator's bits under it"
        )
        few = ""
        if self.compared < FEW:
            least = f"{self.bench.m} and {self.bench.n}"
            few = f"; so few results prove little: probe M and N above {least}"
        if self.equal < self.compared:
            return f"NOT confirmed: {bits}"
        unlike = ", ".join(f.what for f in self.unlike)
        if self.ok:
            return f"identified: {bits}{few}"
        return f"NOT identified: {bits}, but these differ: {unlike}{few}"


def identify(
    scaled: ScaledGemm,
    *,
    shape: tuple[int, int, int] = SHAPE,
    formats: tuple[Format, Format] = (E4M3FN, E4M3FN),
    seed: int = 0,
) -> Identified:
    """Identify the arithmetic of a GEMM of this shape (M, N, K).

    formats   of a [M, K] and b [N, K].
    seed      of the random operands.
    Raises:   ValueError: M or N below 1, or a K that is not a multiple of 32.
              ProbeError: the GEMM is invalid, or its sums differ with their place in the result.
    Source:   spec G-18.

    >>> from fp8ref.conformance.gemm import ScaledGemm, identify_gemm
    >>> from fp8ref.sim import gemm
    >>> mine = ScaledGemm(name="mine", function=lambda a, b: gemm.matmul(a, b, accumulate="f32"))
    >>> identify_gemm(mine, shape=(16, 16, 64)).plan["accumulate"]
    'f32'
    """
    m, n, k = shape
    if min(m, n) < 1 or k < K_STEP or k % K_STEP:
        raise ValueError(
            "a probe takes M and N of at least 1 and a K that is a positive multiple of "
            f"{K_STEP}; got {list(shape)}."
        )
    if scaled.granularities not in (("tensorwise",) * 2, ("rowwise",) * 2):
        raise ValueError(
            "a probe takes tensorwise or rowwise scales, of both operands; got "
            f"{', '.join(scaled.granularities)}. Use grade_gemm."
        )
    bench, out_findings = epilogues.rounding(
        Bench(gemm=scaled, m=m, n=n, k=k, fmt_a=formats[0], fmt_b=formats[1]), seed
    )
    drawn = draw_sample(bench, seed)
    plans, findings = _accumulation(bench, drawn)
    fitting, epilogue_findings = epilogues.epilogue(bench, plans[0] if plans else None, seed)
    pairs, compared, equal = _confirmed(bench, plans, fitting, seed)
    ends: list[Finding] = []
    if pairs:
        plans, fitting = (list(dict.fromkeys(column)) for column in zip(*pairs, strict=True))
        fitting, ends = _at_extremes(bench, plans[0], fitting, seed)
    if fitting:
        epilogue_findings[0] = dataclasses.replace(
            epilogue_findings[0], value=fitting[0].name, others=tuple(e.name for e in fitting[1:])
        )
    findings = _settled(findings, plans)
    findings += [*epilogue_findings, *out_findings, *specials.specials(bench), *ends]
    return Identified(
        bench=bench,
        findings=findings,
        drawn=drawn,
        plans=plans,
        epilogue=fitting[0] if fitting else None,
        compared=compared,
        equal=equal,
    )


def _at_extremes(
    bench: Bench, plan: str | Accumulation, fitting: list[Epilogue], seed: int
) -> tuple[list[Epilogue], list[Finding]]:
    """The epilogues that also fit extremes, else all; and the findings on the first one's."""
    tried = {e: specials.extremes(bench, plan, e, seed) for e in fitting}
    alike = [e for e in fitting if all(f.value in specials.ALIKE for f in tried[e])]
    alike = alike or fitting
    return alike, tried[alike[0]]


def _settled(findings: Sequence[Finding], plans: Sequence[str | Accumulation]) -> list[Finding]:
    """The findings, with those about the order of sums taken from the plans that were confirmed."""
    accumulations = [plan for plan in plans if isinstance(plan, Accumulation)]
    if not accumulations:
        return list(findings)
    evidence = next(finding.evidence for finding in findings if finding.what == "promotion")
    return [
        *(finding for finding in findings if finding.what not in FIELDS),
        *findings_of(accumulations, evidence),
    ]


def _accumulation(
    bench: Bench, drawn: Sample
) -> tuple[Sequence[str | Accumulation], list[Finding]]:
    """The accumulation plans that fit, and the findings about them."""
    width = step.width(bench)
    if not isinstance(width.value, int):
        name = {step.SEQUENTIAL: "f32", step.WIDE: "exact"}.get(str(width.value))
        fits = [name] if name and drawn.fits(bench, name) else []
        evidence = "no order of the simulator groups products in this way"
        if name:
            evidence = f"random sums have{'' if fits else ' not'} the bits of {name!r}"
        return fits, [width, Finding("order", fits[0] if fits else None, evidence)]
    units, findings = step.units(bench, width.value)
    findings = [width, *findings]
    if not units:
        return [], findings
    plans, order_findings = fitting_plans(bench, units, drawn)
    if plans:
        # units that one step does not distinguish may differ in random sums
        alike = [
            unit
            for unit in units
            if unit == plans[0].unit or drawn.fits(bench, dataclasses.replace(plans[0], unit=unit))
        ]
        alike.sort(key=lambda unit: unit != plans[0].unit)
        findings = [step.settled(finding, alike) for finding in findings]
    return plans, findings + order_findings


def _confirmed(
    bench: Bench, plans: Sequence[str | Accumulation], fitting: Sequence[Epilogue], seed: int
) -> tuple[list[tuple[str | Accumulation, Epilogue]], int, int]:
    """The pairs that fit new random results best.

    Returns:  the pairs, how many results were compared, and how many are equal.
    """
    pairs = [(plan, epilogue) for plan in plans for epilogue in fitting]
    if not pairs:
        return [], 0, 0
    equal, compared = dict.fromkeys(pairs, 0), 0
    for i in range(epilogues.rounds(bench, least=2)):
        rng = np.random.default_rng([seed, i])
        a, b, results = epilogues.under_scales(bench, draw_codes(bench, rng), rng)
        most, bits = max(equal.values()), results.view(np.uint32)
        for plan in plans:
            left = [epilogue for epilogue in fitting if equal[plan, epilogue] == most]
            if not left:
                continue
            acc = gemm.matmul(*unscaled(a, b), accumulate=plan)
            for epilogue in left:
                scales = a.scale_inv, b.scale_inv.T
                expected = gemm.finish(acc, *scales, epilogue=epilogue, out_dtype=bench.out)
                equal[plan, epilogue] += int((bits == expected.view(np.uint32)).sum())
        compared += results.size
    most = max(equal.values())
    return [pair for pair in pairs if equal[pair] == most], compared, most
