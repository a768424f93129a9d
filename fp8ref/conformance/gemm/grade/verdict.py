"""The verdict on a GEMM: right, imprecise or wrong, by how much, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref.conformance.gemm.grade import codes
from fp8ref.conformance.gemm.grade.row_bits import VARIES, RowBits
from fp8ref.conformance.gemm.grade.stimuli import Shape
from fp8ref.conformance.gemm.grade.structure import Cause
from fp8ref.conformance.kit.finding import Counterexample, Described, Finding
from fp8ref.formats import Format


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Errors of random results.

    ulps    of the output dtype: the largest distance from the exact result; median_ulps: median.
    bounds  the largest distance in units of B-1's bound.
    error   the root mean square of the difference from the exact results, relative to theirs.
    count   how many results; worst: the one of the largest distance.
    """

    ulps: float
    median_ulps: float
    bounds: float
    error: float
    count: int
    worst: Counterexample | None

    def __str__(self) -> str:
        return (
            f"{self.bounds:.3g} of B-1's bound, {self.ulps:.3g} ulps at most and "
            f"{self.median_ulps:.2g} in the median, {self.error:.2g} of the results"
        )

    def to_dict(self) -> dict[str, Any]:
        """As --json writes it: numbers, infinity as None."""
        entries: dict[str, Any] = {}
        for key in ("ulps", "median_ulps", "bounds", "error"):
            value = getattr(self, key)
            entries[key] = value if np.isfinite(value) else None
        worst = self.worst and self.worst.to_dict()
        return entries | {"count": self.count, "worst": worst}


@dataclass(frozen=True, kw_only=True)
class Grade(Described):
    """The verdict on a GEMM.

    right      every sum that all accumulators of 8 bits share is right; all results are within B-1.
    imprecise  those sums are right, and other results are outside B-1, or differ in equal calls.
    wrong      those sums, or products of codes, are not right.

    measured   of random operands, for each shape that was asked.
    causes     why it is not right, the gravest first; of a right one, what rounds twice.
    rows       whether a row has the same bits in calls of other rows, as a right GEMM need not.
    plan       the simulator's accumulation with the bits of random results, if any; so epilogue.
    edges      shapes at which sums of integers alone were asked, in words.
    expected   the plan that it should have, if any, and how many of compared results have its bits.
    refused    shapes that it raised for, with the error's first line; unasked: what was not asked.
    """

    name: str
    granularities: tuple[str, str]
    formats: tuple[Format, Format]
    out_dtype: Format
    bias: bool
    about: Mapping[str, str]
    verdict: str
    measured: Mapping[Shape, Measured]
    causes: Sequence[Cause]
    rows: RowBits
    plan: str | None
    epilogue: str | None
    expected: str | None
    compared: int
    equal: int
    edges: Sequence[str]
    refused: Mapping[Shape, str]
    unasked: Sequence[str]

    @property
    def ok(self) -> bool:
        """Right; or, if a plan is expected, all bits are the plan's, and nothing is wrong but
        results beyond its range.
        """
        if self.expected is None:
            return self.verdict == "right"
        return self.equal == self.compared and not any(
            cause.name != codes.RANGE and (cause.severity == "wrong" or cause.name == VARIES)
            for cause in self.causes
        )

    @property
    def worst(self) -> Measured:
        """The shape with the largest distance."""
        return max(self.measured.values(), key=lambda one: (one.bounds, one.ulps))

    @property
    def message(self) -> str:
        """The verdict with its magnitude, each cause with what shows it, and what was asked."""
        lines = [f"{self.name} is {self.verdict}: {self.worst}"]
        if self.expected is not None:
            bits = f"{self.equal:,} of {self.compared:,} random results have its bits"
            lines = [
                f"{self.name} is {'' if self.ok else 'not '}{self.expected!r}: {bits}",
                *([] if self.ok else [f"  {lines[0]}"]),
            ]
        for cause in self.causes:
            lines.append(f"  {cause.severity}: {cause.name}; {cause.evidence}")
            if cause.first is not None:
                lines.append(f"    {cause.first}")
        if not self.causes and self.verdict != "right" and self.worst.worst is not None:
            lines.append(f"  no cause has a name; {self.worst.worst}")
        if self.rows.said:
            lines.append(f"  {self.rows.said}")
        if self.plan is not None:
            under = f" under {self.epilogue!r}" if self.epilogue else ""
            lines.append(f"  random results have the bits of {self.plan!r}{under}")
        lines += [f"  tested: {self.asked}", f"  not tested: {'; '.join(self.unasked)}"]
        return "\n".join(lines)

    @property
    def asked(self) -> str:
        """Shapes, formats, dtype and scales, in words."""
        shapes = ", ".join(f"[{m}, {n}] K = {k}" for m, n, k in self.measured)
        shapes += f"; integers at {', '.join(self.edges)}" if self.edges else ""
        shapes += f"; a row's bits at {', '.join(self.rows.asked)}" if self.rows.asked else ""
        bias = ", with a bias" if self.bias else ""
        return (
            f"{shapes}; {self.formats[0]} x {self.formats[1]} to {self.out_dtype}; scales "
            f"{' x '.join(self.granularities)}{bias}"
        )

    def to_dict(self) -> dict[str, Any]:
        """What --json writes."""
        return {
            "ok": self.ok,
            "subject": self.name,
            "about": dict(self.about),
            "verdict": self.verdict,
            "measured": [{"shape": list(s), **one.to_dict()} for s, one in self.measured.items()],
            "causes": [cause.to_dict() for cause in self.causes],
            "batch_invariant": self.rows.alike,
            "plan": self.plan,
            "epilogue": self.epilogue,
            "expected": self.expected,
            "compared": self.compared,
            "equal": self.equal,
            "formats": [fmt.name for fmt in self.formats],
            "out_dtype": self.out_dtype.name,
            "granularities": list(self.granularities),
            "bias": self.bias,
            "edges": list(self.edges),
            "refused": [{"shape": list(s), "error": why} for s, why in self.refused.items()],
            "unasked": list(self.unasked),
        }

    @property
    def table_rows(self) -> Sequence[Finding]:
        """The errors of each shape."""
        return [
            Finding(f"[{m}, {n}], K = {k}", str(errors), f"{errors.count} random results")
            for (m, n, k), errors in self.measured.items()
        ]
