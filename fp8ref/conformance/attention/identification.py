"""Identify an attention function: which variant explains every bit, or where the nearest departs (SEMANTICS A)."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8ref import attention as data
from fp8ref.attention import FULL, VARIANTS, Mask, Tiles, Variant
from fp8ref.conformance.attention import comparison, decisions, subjects
from fp8ref.conformance.attention.comparison import Agreement, Asked
from fp8ref.conformance.attention.decisions import Probed
from fp8ref.formats import E4M3FN, FORMATS, Format
from fp8ref.result import Result
from fp8ref.sim import accumulate

if TYPE_CHECKING:
    from rich.console import Console

UNSEEN: dict[str, tuple] = {
    "finish": ("reciprocal", "divide"),
    "sum_order": ("tile", "quad", "packed"),
    "bias": ("fused", "separate"),
    "lse": ("fused", "log2", "sum"),
}
"""{field of ``Variant``: its values}: decisions that last bits alone show, tried in all combinations."""


@dataclass(frozen=True, kw_only=True)
class AttentionOutcome(Result):
    """What an attention function was identified as.

    variant    the name in VARIANTS, or of a variation, such as "fa3 with promotion=4"; None if none explains it.
    agreement  with that variant, or with the expected one, or with the nearest.
    departures the decisions in which it is not the expected or the nearest variant.
    expected   the variant that it should be, if any.
    """

    probed: Probed
    variant: str | None
    agreement: Agreement
    departures: tuple[str, ...]
    expected: str | None = None

    @property
    def exact(self) -> bool:
        """Whether every bit is the variant's."""
        return self.agreement.exact

    @property
    def ok(self) -> bool:
        """The expected variant, or a named one without faults, at least but for exponentials."""
        if self.expected is not None:
            return self.variant == self.expected and not self.departures
        return self.variant in VARIANTS and self.probed.ok

    @property
    def message(self) -> str:
        """The summary, the decisions that differ, and the first output that does."""
        of = self.agreement
        name = self.probed.asked.name
        count = f"{of.equal:,} of {of.compared:,} outputs on random inputs are equal"
        if self.variant is not None and not self.departures:
            how = "bit for bit" if self.exact else "but for exponentials"
            said = f"{name} is {self.variant!r}, {how}: {count}"
            wrong = "" if self.probed.ok else f". {'; '.join(f'{fault.what}: {fault.text}' for fault in self.probed.faults)}"
            unlike = f"{name} is not {self.expected!r}, but {self.variant!r}, {how}: {count}"
            said = said if self.expected in (None, self.variant) else unlike
            return said + wrong + ("" if of.first is None else f"\n  {of.first}")
        near = f"{self.expected!r}" if self.expected else f"no variant; the nearest is {of.variant.name!r}"
        lines = [f"{name} is {'not ' if self.expected else ''}{near}: {count}, the error is {of.error:.2g} of its outputs"]
        lines += [f"  {one}" for one in self.departures] + ([f"  {of.first}"] if of.first else [])
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """What --json writes."""
        of = self.agreement
        return self.probed.to_dict() | {
            "ok": self.ok,
            "is": self.variant,
            "exact": self.exact,
            "nearest": of.variant.name,
            "compared": of.compared,
            "equal": of.equal,
            "error": min(of.error, 1e30),
            "departures": list(self.departures),
            "first": of.first and of.first.to_dict(),
            "faults": [fault.to_dict() for fault in self.probed.faults],
            "expected": self.expected,
        }

    def render(self, console: "Console") -> None:
        """Print the findings, then the message."""
        from rich.text import Text

        title = Text(f"{self.probed.asked.name}: attention of {self.probed.asked.subject.framework} arrays")
        console.print(decisions.table(self.probed.findings, title=title, title_justify="left"))
        console.out(self.message, highlight=False)


def identify(
    function: Callable[..., Any],
    *,
    expect: str | None = None,
    name: str | None = None,
    framework: str | None = None,
    device: str = "cpu",
    layout: str = "BHTD",
    fmt: Format = E4M3FN,
) -> AttentionOutcome:
    """Identify an attention function as a variant, by its decisions and by random inputs.

    expect    a name in VARIANTS that it must have.
    Others:   as ``probe``.
    Raises:   ValueError: an unknown variant; as ``probe``.
    Source:   SEMANTICS A-1.
    """
    if expect is not None and expect not in VARIANTS:
        raise ValueError(f"expect is one of {', '.join(VARIANTS)}; got {expect!r}.")
    asked = subjects.wrap(function, name=name, framework=framework, device=device, layout=layout, fmt=fmt)
    probed = decisions.of_subject(asked)
    answers = Asked(asked, comparison.cases(alignment=probed.alignment))
    ranked = _ranked(answers, probed)
    best = ranked[0]
    if best.alike and not probed.departures(best.variant):
        whole = answers.agreement(best.variant)
        assert whole is not None
        if whole.alike:
            return _outcome(probed, whole, best.variant.name, expect, answers)
    for variant in _variations(best.variant, probed, answers):
        found = answers.agreement(variant)
        if found is not None and found.alike:
            return _outcome(probed, found, variant.name, expect, answers)
    compared = answers.agreement(VARIANTS[expect] if expect else best.variant) or best
    return _outcome(probed, compared, None, expect, answers)


def require_attention(
    function: Callable[..., Any],
    variant: str | Variant = "fa3",
    mask: Mask = FULL,
    *,
    exponentials: str = "exact",
    framework: str | None = None,
    device: str = "cpu",
    layout: str = "BHTD",
    features: int = 64,
) -> None:
    """Require the outputs of a variant under a mask, and log-sum-exps if they are returned; else raise an AssertionError with the first
    difference and the decisions that depart.

    exponentials  ``exact``: every bit; ``hardware``: exponentials of A-5's bound, which changes one output in a hundred at most
                  (``comparison.NEAR``).
    features      D of the inputs.
    Raises:   ValueError: an unknown variant, or exponentials; as ``probe``.
    Source:   SEMANTICS A-1 to A-11.
    """
    variant = data.by_name(variant)
    if exponentials not in ("exact", "hardware"):
        raise ValueError(f"exponentials are 'exact' or 'hardware'; got {exponentials!r}.")
    asked = subjects.wrap(function, framework=framework, device=device, layout=layout, fmt=variant.fmt if variant.fmt.bits == 8 else E4M3FN)
    found = Asked(asked, comparison.cases(mask, features=features)).agreement(variant)
    if found is None:
        raise ValueError(f"{asked.name} takes codes with scales of heads, which {variant.name!r} has not. Use another variant.")
    if found.exact or (exponentials == "hardware" and found.alike):
        return
    probed = decisions.of_subject(asked)
    lines = [
        f"{asked.name} is not {variant.name!r}: {found.compared - found.equal:,} of {found.compared:,} outputs differ, by {found.error:.2g} of the outputs",
        *([f"  {found.first}"] if found.first else []),
        *(f"  {one}" for one in probed.departures(variant)),
    ]
    raise AssertionError("\n".join(lines))


def _outcome(probed: Probed, found: Agreement, name: str | None, expect: str | None, answers: Asked) -> AttentionOutcome:
    """With departures from the expected variant, or from the nearest if none explains it."""
    if expect is not None and name != expect:
        found = answers.agreement(VARIANTS[expect]) or found if name is None else found
        departures = probed.departures(VARIANTS[expect]) if name is None else ()
    else:
        departures = probed.departures(found.variant) if name is None else ()
    return AttentionOutcome(probed=probed, variant=name, agreement=found, departures=tuple(departures), expected=expect)


def _ranked(answers: Asked, probed: Probed) -> list[Agreement]:
    """The named variants, the likeliest first: by outputs that are near, then by decisions, then by error."""
    found = [one for variant in VARIANTS.values() if (one := answers.agreement(variant, cases=1)) is not None]
    departing = {one.variant.name: len(probed.departures(one.variant)) for one in found}
    return sorted(found, key=lambda one: (not one.alike, departing[one.variant.name], one.error))


def _variations(base: Variant, probed: Probed, answers: Asked) -> Iterator[Variant]:
    """The variant with the decisions that were found in place of its own; then with other orders of last bits, as they fit the
    first case best."""
    try:
        measured = _measured(base, probed)
    except ValueError:  # decisions that no variant has together
        return
    changed = {field.name for field in dataclasses.fields(Variant) if getattr(measured, field.name) != getattr(base, field.name)}
    yield _named(measured, base, changed)
    best, of_best = measured, -1
    for values in itertools.product(*UNSEEN.values()):
        try:
            one = dataclasses.replace(measured, **dict(zip(UNSEEN, values, strict=True)))
        except ValueError:
            continue
        found = answers.agreement(one, cases=1)
        if found is not None and found.equal > of_best:
            best, of_best = one, found.equal
    changed = {field.name for field in dataclasses.fields(Variant) if getattr(best, field.name) != getattr(base, field.name)}
    yield _named(best, base, changed)


def _measured(base: Variant, probed: Probed) -> Variant:
    """The variant with all decisions that were found. ValueError if they contradict each other."""
    changes: dict[str, Any] = {}
    length = probed.tiling.length
    if length is not None and length != base.tile(decisions.FEATURES, FULL):
        changes["tiles"] = (Tiles(features=256, full=length, causal=length, local=length),)
    if probed.tiling.descending is not None:
        changes["descending"] = probed.tiling.descending
    wanted = decisions.expected(base)

    def departs(what: str) -> Any:
        finding = probed[what]
        return None if finding is None or finding.value is None or finding.value == wanted[what] else finding.value

    if (value := departs("output")) is not None and value in FORMATS:
        changes["out"] = FORMATS[value]
    if (value := departs("promotion")) is not None and value != "exact":
        changes["promotion"] = None if value == "none" else value
    if (value := departs("sums of P v")) is not None and value != "all":
        plans = [plan.name for plan in accumulate.ACCUMULATIONS.values() if plan.unit.fraction_bits == value]
        changes |= {"plan": plans[0]} if plans else {}
    if (value := departs("scales of v")) is not None:
        changes["granularity"] = value
    if probed.threshold is not None and not probed.threshold.agrees(wanted["threshold"]) and probed.threshold.finding.value is not None:
        changes["threshold"] = probed.threshold.finding.value
    if probed.largest is not None and not probed.largest.agrees(wanted["largest P"]) and probed.largest.finding.value:
        changes["p_scale"] = float(probed.largest.finding.value) / 2.0**base.offset
    return dataclasses.replace(base, **changes)


def _named(variant: Variant, base: Variant, changed: set[str]) -> Variant:
    said = [f"{key}={_value(variant, key)}" for key in sorted(changed - {"name"})]
    return dataclasses.replace(variant, name=f"{base.name} with {', '.join(said)}") if said else variant


def _value(variant: Variant, key: str) -> Any:
    return variant.tiles[0].full if key == "tiles" else getattr(variant, key)
