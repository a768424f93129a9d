"""Identify an attention function: which variant explains every bit, or the nearest (A-17)."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from fp8ref.conformance.attention import arguments, comparison, decisions, subjects
from fp8ref.conformance.attention.arguments import FINDINGS, Alignment, Argument
from fp8ref.conformance.attention.comparison import Agreement, Asked
from fp8ref.conformance.attention.decisions import Probed
from fp8ref.conformance.attention.subjects import Attention
from fp8ref.conformance.kit.finding import Described, Finding
from fp8ref.formats import E4M3FN, FORMATS, Format
from fp8ref.shared.errors import one_of
from fp8ref.sim.gemm import accumulate
from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.variants import FULL, VARIANTS, Mask, Tiles, Variant

UNSEEN: dict[str, tuple] = {
    "finish": ("reciprocal", "divide"),
    "sum_order": ("tile", "quad", "packed"),
    "bias": ("fused", "separate"),
    "lse": ("fused", "log2", "sum"),
}
"""{field of ``Variant``: its values}: decisions that only last bits show, in all combinations.
"""


@dataclass(frozen=True, kw_only=True)
class AttentionOutcome(Described):
    """What an attention function was identified as.

    variant    the name in VARIANTS, or of a variation: "fa3 with promotion=4"; None if none fits
    agreement  with that variant, or with the nearest.
    reference  agreement with the expected variant, or with the nearest named one.
    departures the decisions in which it is not that one, and faults of arguments.
    expected   the variant that it should be, if any.
    arguments  agreement under each argument, with that variant; none if it is no variant.
    """

    probed: Probed
    variant: str | None
    agreement: Agreement
    reference: Agreement
    departures: tuple[str, ...]
    expected: str | None = None
    arguments: tuple[Argument, ...] = ()

    @property
    def wrong_arguments(self) -> list[str]:
        """The arguments that are not the variant's."""
        names = [one.name for one in self.arguments if one.differing(self.agreement.exact)]
        faults = [f.what for f in self.probed.faults if f.what in decisions.STRUCTURE]
        return list(dict.fromkeys([*names, *(FINDINGS.get(what, what) for what in faults)]))

    @property
    def exact(self) -> bool:
        """Whether every bit is the variant's."""
        equal = self.variant is not None and self.agreement.exact
        return equal and not self.wrong_arguments

    @property
    def ok(self) -> bool:
        """The expected variant, or a named one within its range; at least but for exponentials,
        under all of its arguments.
        """
        if self.wrong_arguments:
            return False
        if self.expected is not None:
            return self.variant == self.expected
        return self.variant in VARIANTS and self.probed.ok

    @property
    def message(self) -> str:
        """What it is, the decisions that differ, and the first output that does."""
        name, of = self.probed.asked.name, self.reference
        names = (of.variant.name, self.expected)
        same = self.variant is not None and self.variant in names
        if same and self.wrong_arguments:
            but = f"{name} {self._but_arguments()}"
            return "\n".join([but, *self._shown_arguments()])
        steps = "roundings" if self.agreement.variant.real else "exponentials"
        but = f"but for {steps}"
        match, agreed = "", self.agreement
        if self.variant is not None:
            match = f"{self.variant!r}, {'bit for bit' if agreed.exact else but}"
        count = f"{agreed.equal:,} of {agreed.compared:,} outputs on random inputs are equal"
        first = [f"  {of.first}"] if of.first else []
        faults = [f"  at fault: {fault.what}: {fault.text}" for fault in self.probed.faults]
        if self.variant == of.variant.name:
            return "\n".join([f"{name} is {match}: {count}", *first, *faults])
        other = f"{name} is {match}: {count}" if match else f"{name} is no variant"
        if self.expected:
            other = f"{name} is not {self.expected!r}{f', but {match}: {count}' if match else ''}"
        nearest = "" if self.expected else "the nearest, "
        far = (
            f"{of.equal:,} of {of.compared:,} outputs are those of "
            f"{nearest}{of.variant.name!r}, the error is {of.error:.2g} of the outputs"
        )
        departures = [f"  {departure}" for departure in self.departures]
        lines = [f"{other}; {far}", *departures, *first]
        if self.variant and self.wrong_arguments:
            lines += [f"  {self._but_arguments()}", *self._shown_arguments()]
        return "\n".join(lines)

    def _but_arguments(self) -> str:
        """In words, which arguments alone are wrong."""
        wrong = self.wrong_arguments
        bits = "has every bit of" if self.agreement.exact else "is near"
        are = "are" if len(wrong) > 1 or wrong[0].endswith("s") else "is"
        return f"{bits} {self.variant!r}; its {', '.join(wrong)} {are} not"

    def _shown_arguments(self) -> list[str]:
        """A line for each wrong argument, with its finding and the first output that differs."""
        lines = []
        for name in self.wrong_arguments:
            of_structure = (f for f in self.probed.findings if f.what in decisions.STRUCTURE)
            shown = [f for f in of_structure if FINDINGS.get(f.what, f.what) == name]
            lines += [f"  {one.what}: {one.text}; {one.evidence}" for one in shown]
            wrong = [one for one in self.arguments if one.name == name]
            firsts = [one.first(self.agreement.exact) for one in wrong]
            lines += [f"  {name}: {first}" for first in firsts if first is not None]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """What --json writes."""
        of = self.reference
        return self.probed.to_dict() | {
            "ok": self.ok,
            "is": self.variant,
            "exact": self.exact,
            "compared": self.agreement.compared,
            "equal": self.agreement.equal,
            "expected": self.expected,
            "nearest": of.variant.name,
            "nearest_equal": of.equal,
            "error": min(of.error, sys.float_info.max),  # JSON has no infinity
            "departures": list(self.departures),
            "arguments": {one.name: one.to_dict(self.agreement.exact) for one in self.arguments},
            "wrong_arguments": self.wrong_arguments,
            "first": of.first and of.first.to_dict(),
            "faults": [fault.to_dict() for fault in self.probed.faults],
        }

    @property
    def title(self) -> str:
        """As of ``probe``."""
        return self.probed.title

    @property
    def table_rows(self) -> Sequence[Finding]:
        """The findings."""
        return self.probed.findings


def identify_attention(
    function: Callable[..., Any],
    *,
    expect: str | None = None,
    name: str | None = None,
    framework: str | None = None,
    device: str = "cpu",
    layout: str = "BHTD",
    fmt: Format = E4M3FN,
    alignment: Alignment = "end",
) -> AttentionOutcome:
    """Identify an attention function as a variant, by its decisions and by random inputs, without
    arguments and under each that it has.

    expect    a name in VARIANTS that it must have.
    alignment the end to which its masks align queries, where it has no argument for that.
    Raises:   ValueError: an unknown variant or alignment. Raises and others: as ``probe``.
    Source:   spec A-17.
    """
    one_of("alignment", alignment, get_args(Alignment))
    if expect is not None:
        one_of("expect", expect, VARIANTS)
    attention = subjects.wrap(
        function, name=name, framework=framework, device=device, layout=layout, fmt=fmt
    )
    probed = decisions.probe_subject(attention)
    # of plain inputs, so that no tile is ragged: two of its tiles, or a long one
    tokens = probed.tiling.length or 128
    tokens *= 2 if tokens <= 256 else 1
    answers = Asked(probed.asked, comparison.plain_cases(tokens))
    best = _ranked(answers, probed)[0]
    nearest = answers.agreement(best.variant) or best
    agreement = nearest if nearest.alike and not probed.decisions_apart(best.variant) else None
    if agreement is None or not agreement.exact:
        agreement = _varied(best.variant, probed, answers) or agreement
    reference = answers.agreement(VARIANTS[expect]) or nearest if expect else nearest
    name = None if agreement is None else agreement.variant.name
    departures = () if name == reference.variant.name else probed.departures(reference.variant)
    checked: list[Argument] = []
    if agreement is not None:
        variant, exact = agreement.variant, agreement.exact
        checked = arguments.compare(probed.asked, variant, tokens, alignment, exact=exact)
    return AttentionOutcome(
        probed=probed,
        variant=name,
        agreement=agreement or nearest,
        reference=reference,
        departures=tuple(departures),
        expected=expect,
        arguments=tuple(checked),
    )


def require_attention(
    function: Callable[..., Any] | Attention,
    variant: str | Variant = "fa3",
    mask: Mask = FULL,
    *,
    exponentials: str = "exact",
    features: int = 64,
    softcap: float | None = None,
    sinks: bool = False,
) -> None:
    """Require the outputs of a variant under a mask, and log-sum-exps if they are returned; else
    raise an AssertionError with the first difference and the decisions that depart.

    function      of q, k and v; or ``wrap`` of it, which takes a framework, a device, a layout, and
                  the fmt of its codes.
    exponentials  ``exact``: every bit; ``hardware``: exponentials of A-5's bound, which changes one
                  output in a hundred at most (``comparison.NEAR``).
    features      D of the inputs.
    softcap       passed to the function, and to the variant (A-22).
    sinks         whether random ones are passed (A-23).
    Raises:   ValueError: an unknown variant, or exponentials; a softcap or sinks without an
              argument for them; as ``probe``.
    Source:   spec A-1 to A-11, A-22, A-23.
    """
    variant = data.by_name(variant)
    if exponentials not in ("exact", "hardware"):
        raise ValueError(f"exponentials are 'exact' or 'hardware'; got {exponentials!r}.")
    fmt = variant.fmt if variant.fmt.bits == 8 else E4M3FN
    attention = function
    if not isinstance(attention, Attention):
        attention = subjects.wrap(attention, fmt=fmt)
    requests = ((softcap is not None, subjects.SOFTCAPS), (sinks, subjects.SINKS))
    for requested, names in requests:
        if requested and not attention.argument(names):
            raise ValueError(
                f"{attention.name} has no argument for {names[0]}; name one {' or '.join(names)}, "
                "or leave it out here."
            )
    cases = comparison.cases(mask, features=features, softcap=softcap, sinks=sinks)
    agreement = Asked(attention, cases).agreement(variant)
    if agreement is None:
        raise ValueError(
            f"{attention.name} takes codes with scales of heads, which {variant.name!r} has not. "
            "Use another variant."
        )
    if agreement.exact or (exponentials == "hardware" and agreement.alike):
        return
    probed = decisions.probe_subject(attention)
    lines = [
        f"{attention.name} is not {variant.name!r}: {agreement.compared - agreement.equal:,} of "
        f"{agreement.compared:,} outputs differ, by {agreement.error:.2g} of the outputs",
        *([f"  {agreement.first}"] if agreement.first else []),
        *(f"  {departure}" for departure in probed.departures(variant)),
    ]
    raise AssertionError("\n".join(lines))


def _ranked(answers: Asked, probed: Probed) -> list[Agreement]:
    """The named variants, the likeliest first: by near outputs, then decisions, then error."""
    first = (answers.agreement(variant, cases=1) for variant in VARIANTS.values())
    agreements = [one for one in first if one is not None]
    departing = {one.variant.name: len(probed.decisions_apart(one.variant)) for one in agreements}
    return sorted(
        agreements, key=lambda one: (not one.alike, departing[one.variant.name], one.error)
    )


def _varied(base: Variant, probed: Probed, answers: Asked) -> Agreement | None:
    """The agreement with a variation that explains the outputs, if one does: the measured decisions
    in place of the variant's own, and then other orders of the last bits, if every bit follows."""
    try:
        measured = dataclasses.replace(base, **_changes(base, probed))
    except ValueError:  # decisions that no variant has together
        return None
    agreement = answers.agreement(_named(measured, base)) if measured != base else None
    agreement = agreement if agreement is not None and agreement.alike else None
    if base.real or (agreement is not None and agreement.exact):
        return agreement
    for values in itertools.product(*UNSEEN.values()):
        try:
            changed = dataclasses.replace(measured, **dict(zip(UNSEEN, values, strict=True)))
        except ValueError:
            continue
        variant = _named(changed, base)
        first = answers.agreement(variant, cases=1)
        if first is not None and first.exact:
            whole = answers.agreement(variant)
            if whole is not None and whole.exact:
                return whole
    return agreement


def _changes(base: Variant, probed: Probed) -> dict[str, Any]:
    """The fields of a variant whose values were found to be others."""
    changes: dict[str, Any] = {}
    length = probed.tiling.length
    if length is not None and length != base.tile(decisions.FEATURES, FULL):
        changes["tiles"] = (Tiles(features=256, full=length, causal=length, local=length),)
    if probed.tiling.descending is not None:
        changes["descending"] = probed.tiling.descending
    wanted = decisions.expected(base)

    def departs(what: str) -> Any:
        value = None if (finding := probed[what]) is None else finding.value
        return None if value == wanted[what] else value

    if (value := departs("output")) is not None and value in FORMATS:
        changes["out"] = FORMATS[value]
    if (value := departs("promotion")) is not None:
        changes["promotion"] = {"none": None, "exact": 1}.get(value, value)
    if (value := departs("sums of P v")) is not None:
        chain = probed["promotion"]
        wide = "exact" if chain is not None and chain.value == "exact" else "f32"
        every = accumulate.ACCUMULATIONS.values()
        plans = [plan.name for plan in every if plan.unit.fraction_bits == value]
        changes |= {"plan": wide} if value == "all" else {"plan": plans[0]} if plans else {}
    if (value := departs("scales of v")) is not None:
        changes["granularity"] = value
    threshold, largest = probed.threshold, probed.largest
    if threshold is not None and not threshold.agrees(wanted["threshold"]):
        value = threshold.finding.value
        changes |= {} if value is None else {"threshold": value}
    value = None if largest is None else largest.finding.value
    if largest is not None and value and not largest.agrees(wanted["largest P"]):
        changes["p_scale"] = float(value) / 2.0**base.offset
    return changes


def _named(variant: Variant, base: Variant) -> Variant:
    """The variation, called by the fields that are not its base's."""
    keys = [field.name for field in dataclasses.fields(Variant) if field.name != "name"]
    values = {key: getattr(variant, key) for key in keys}
    values = {key: value for key, value in values.items() if value != getattr(base, key)}
    if not values:
        return variant
    if "tiles" in values:
        values["tiles"] = variant.tiles[0].full
    changes = ", ".join(f"{key}={value}" for key, value in values.items())
    return dataclasses.replace(variant, name=f"{base.name} with {changes}")
