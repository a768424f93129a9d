"""All decisions of an attention function, each found by inputs of its own (spec A-17)."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fp8ref.conformance.attention import (
    accumulation,
    batch_bits,
    descales,
    logits,
    operands,
    probabilities,
    subjects,
    tiles,
    visibility,
)
from fp8ref.conformance.attention.operands import Operands
from fp8ref.conformance.attention.probabilities import Between
from fp8ref.conformance.attention.scores import FEATURES, LOG2E
from fp8ref.conformance.attention.subjects import Attention
from fp8ref.conformance.attention.tiles import Tiling
from fp8ref.conformance.kit.finding import Described, Finding
from fp8ref.formats import E4M3FN, Format
from fp8ref.shared import package_data
from fp8ref.sim.attention.operands import operands as attention_operands
from fp8ref.sim.gemm import accumulate
from fp8ref.spec.attention.variants import FULL, Variant

_NAMES = package_data.tables(__file__, "decisions")
STRUCTURE = (
    *_NAMES["structure"],
    batch_bits.REPEATED,
    *(name for names in subjects.DESCALES for name in names),
)
"""The decisions that have one right answer, whichever the variant is."""

UNSEEN: tuple[str, ...] = _NAMES["unseen"]
"""The fields of a variant that no finding shows. Where they change an output, comparing outputs
with the variant's (``identify``) shows them; those of gradients change none."""


@dataclass(frozen=True, kw_only=True)
class Probed(Described):
    """What was found of a function.

    findings  a decision each, with the inputs that show it.
    """

    asked: Attention
    operands: Operands
    tiling: Tiling
    threshold: Between | None
    largest: Between | None
    findings: Sequence[Finding]

    def __getitem__(self, what: str) -> Finding | None:
        """The finding of that name."""
        return next((finding for finding in self.findings if finding.what == what), None)

    @property
    def faults(self) -> list[Finding]:
        """Masks and heads other than A-3's, probabilities out of range (A-8), unequal repeats."""
        wrong = [f for f in self.findings if f.what in STRUCTURE and f.value is None]
        wrong = [f for f in wrong if f.words != visibility.REFUSED]
        return wrong + [f for f in self.findings if f.what == "range of P" and f.value is False]

    @property
    def ok(self) -> bool:
        """Whether there are no faults."""
        return not self.faults

    def departures(self, variant: Variant) -> list[str]:
        """The decisions that are not the variant's, in words."""
        faults = [f for f in self.faults if f.what in STRUCTURE]
        words = [f"{f.what}: {f.text}; {f.evidence}" for f in faults]
        return self.decisions_apart(variant) + words

    def decisions_apart(self, variant: Variant) -> list[str]:
        """The same without faults of an argument, which are of no variant."""
        wanted = expected(variant)
        apart = [f for f in self.findings if not self._agrees(f, wanted, variant)]
        return [f"{f.what}: {f.text}, in the variant {wanted[f.what]}; {f.evidence}" for f in apart]

    def _agrees(self, finding: Finding, wanted: dict[str, Any], variant: Variant) -> bool:
        if finding.what not in wanted or self.asked.ones:
            return True
        value = wanted[finding.what]
        if finding.what == "threshold" and self.threshold is not None:
            return variant.real or self.threshold.agrees(value)
        if finding.what == "largest P" and self.largest is not None:
            return variant.fmt.bits != 8 or self.largest.agrees(value)
        if finding.what in ("promotion", "sums of q k") and finding.value is None:
            return True  # could not be told, for a reason that another finding gives
        return bool(finding.value == value)

    @property
    def message(self) -> str:
        """In one line, whether a fault was found."""
        faults = "; ".join(f"{fault.what}: {fault.text}" for fault in self.faults)
        if faults:
            return f"{self.asked.name} has faults: {faults}"
        return f"{self.asked.name}: no fault of masks, heads or the range of P was found"

    def to_dict(self) -> dict[str, Any]:
        """What --json writes."""
        findings = [f.to_dict() | {"text": f.text} | f.witnessed() for f in self.findings]
        return {
            "ok": self.ok,
            "name": self.asked.name,
            "kind": "attention",
            "framework": self.asked.subject.framework,
            "findings": findings,
        }

    @property
    def title(self) -> str:
        """Its name, and whose arrays it takes."""
        framework = self.asked.subject.framework
        return f"{self.asked.name}: attention of {framework} arrays, {FEATURES} features"

    @property
    def table_rows(self) -> Sequence[Finding]:
        """The findings."""
        return self.findings


def probe(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    framework: str | None = None,
    device: str = "cpu",
    layout: str = "BHTD",
    fmt: Format = E4M3FN,
) -> Probed:
    """Find an attention function's decisions from its outputs for chosen inputs.

    function  fn(q, k, v) -> o, (o, lse), or an object with them; see ``subjects``.
    framework whose arrays it takes; None: the first that it takes.
    layout    BHTD or BTHD.
    fmt       of the codes, where it takes q_descale, k_descale and v_descale.
    Raises:   ValueError: an unknown layout, framework or device. RefusedError: it raises.
              ConformanceError: it returns another type, changes its input, or does not repeat.
    Source:   spec A-17.
    """
    attention = subjects.wrap(
        function, name=name, framework=framework, device=device, layout=layout, fmt=fmt
    )
    return probe_subject(attention)


def probe_subject(attention: Attention) -> Probed:
    """``probe`` of a wrapped function."""
    descale_findings = descales.findings(attention)
    if any(finding.value is None for finding in descale_findings):
        return _without_descales(attention, descale_findings)
    probed_operands = operands.operands(attention)
    tiling = tiles.tiling(attention)
    threshold = probabilities.threshold(attention, tiling)
    largest = probabilities.largest(attention, probed_operands.fmt)
    scale = largest.low * 1.1 if largest else 1.0
    if largest and largest.finding.value:
        scale = float(largest.finding.value)
    findings = [
        *descale_findings,
        *visibility.findings(attention),
        *logits.findings(attention),
        *probed_operands.findings,
        tiling.finding,
        *(measured.finding for measured in (threshold, largest) if measured is not None),
        probabilities.saturation(attention, tiling, threshold),
        probabilities.denominator(attention, probed_operands.fmt, scale),
        *([accumulation.score_bits(attention)] if probed_operands.exact else []),
        accumulation.value_bits(attention),
        accumulation.chains(attention, tiling),
        *operands.output(attention),
        *batch_bits.findings(attention),
    ]
    return Probed(
        asked=attention,
        operands=probed_operands,
        tiling=tiling,
        threshold=threshold,
        largest=largest,
        findings=findings,
    )


def _without_descales(attention: Attention, descale_findings: list[Finding]) -> Probed:
    """A function with a wrong descale: other questions need scales, and are not asked."""
    untested = Finding("tiles", None, "", words="not tested: needs right descales")
    tiling = Tiling(None, None, untested)
    return Probed(
        asked=dataclasses.replace(attention, ones=True),
        operands=Operands(attention.fmt, False, []),
        tiling=tiling,
        threshold=None,
        largest=None,
        findings=[*descale_findings, tiling.finding],
    )


def expected(variant: Variant) -> dict[str, Any]:
    """{name of a finding: its value, if a function is of this variant}."""
    order = "descending" if variant.descending else "ascending"
    plan = accumulate.by_name(variant.plan)
    bits = "all" if isinstance(plan, str) else plan.unit.fraction_bits
    unit = 2.0**variant.offset
    scale = float(attention_operands.probability_scale(variant, {})[0]) * unit
    within = variant.largest_probability / unit * scale <= variant.fmt.max
    values = {
        "softcap": "none",
        "sinks": "none",
        "format": variant.fmt.name,
        "q and k": not variant.rotated,
        "scales of k": variant.granularity,
        "scales of v": variant.granularity,
        "tiles": f"{variant.tile(FEATURES, FULL)} keys, {order}",
        "threshold": variant.threshold * (1.0 if variant.base == "2" else LOG2E),
        "largest P": scale,
        "range of P": "kept" if within else False,
        "denominator": "unrounded",
        "sums of q k": bits,
        "sums of P v": bits,
        "promotion": "exact" if variant.plan == "exact" else variant.promotion or "none",
        "output": variant.out.name,
        "log-sum-exp": "natural",
    }
    unseen = ("tiles", "denominator", "promotion") if variant.real else ()
    return values | dict.fromkeys(unseen)
