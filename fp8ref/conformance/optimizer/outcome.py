"""What an optimizer was identified as: findings, the summary, the first difference."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8ref.conformance.kit.finding import Counterexample, Described, Finding, bits_of, show
from fp8ref.conformance.optimizer import forms
from fp8ref.conformance.optimizer.forms import Form
from fp8ref.conformance.optimizer.search import PROBE, Departure, Search
from fp8ref.shared import package_data
from fp8ref.spec.states.layouts import LAYOUTS, WITH_MASTERS, Layout

NAMED = LAYOUTS | WITH_MASTERS  # the layouts that have a name

FIELDS: dict[str, str] = package_data.tables(__file__, "outcome")["fields"]
"""{field of ``Form``: what it is called}."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOutcome(Described):
    """What an optimizer was identified as.

    layout     the name in LAYOUTS or WITH_MASTERS, or of a variation such as "torchao with block
               128 of m and v"; None if none explains it.
    form       the order of operations that explains every weight; else the nearest.
    known      whether a form of AdamW explains the first step, or nearly so. Otherwise it is
               another optimizer, or has other numbers, and ``form`` says nothing.
    exact      whether layout and form explain every bit of weights, and of states that are shown.
    findings   with their evidence.
    expected   the layout that it should have, if any.
    departure  from that layout in the form found, or else from the nearest layout.
    faults     that have a name, in sentences.
    damage     by the gradient, what it does with NaN and inf otherwise than clause O; or {}.
    """

    name: str
    kind: str
    layout: str | None
    form: Form
    known: bool
    exact: bool
    shown: bool
    findings: Sequence[Finding]
    summary: str
    expected: str | None = None
    departure: Counterexample | None = field(default=None)
    damage: Mapping[str, str] = field(default_factory=dict)
    faults: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """A named layout, or the expected one; AdamW; every bit explained; no hidden damage."""
        return (
            self.exact
            and self.form.sound
            and not self.damage
            and not self.faults
            and (self.layout == self.expected if self.expected else self.layout in NAMED)
        )

    @property
    def message(self) -> str:
        """The summary, and the first difference."""
        first = f"\n  {self.departure}" if self.departure else ""
        if self.expected is None:
            return self.summary + first
        if self.ok:
            return f"{self.name} is {self.expected!r}: {self.summary}"
        return f"{self.name} is not {self.expected!r}: {self.summary}{first}"

    def to_dict(self) -> dict[str, Any]:
        """What --json writes."""
        return {
            "ok": self.ok,
            "name": self.name,
            "kind": "optimizer",
            "taken_as": self.kind,
            "is": {"layout": self.layout, **(dataclasses.asdict(self.form) if self.known else {})},
            "exact": self.exact,
            "state_shown": self.shown,
            "summary": self.summary,
            "findings": [finding.to_dict() for finding in self.findings],
            "expected": self.expected,
            "departure": self.departure and self.departure.to_dict(),
            "damage": dict(self.damage),
            "faults": list(self.faults),
        }

    @property
    def title(self) -> str:
        """Its name, and what it was taken as."""
        return f"{self.name}: an optimizer, taken as {self.kind}"

    @property
    def table_rows(self) -> Sequence[Finding]:
        """The findings."""
        return self.findings


def counterexample(first: Departure, layout: Layout) -> Counterexample:
    """The first difference from a layout, and the clause that it is of."""
    if "master" in first.what:
        clause = "O-15"
    elif first.what == "weight":
        clause = "O-6"
    elif first.what.startswith("scale"):
        clause = "O-7"
    else:
        clause = "O-8"

    def said(value: Any) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, int):
            return f"0x{value:02X}"
        return f"{show(value)} ({bits_of(value, 'float32')})"

    return Counterexample(
        str(first), said(first.got), f"{said(first.expected)} of layout {layout.name!r}", clause
    )


def findings(
    search: Search, layout: Layout | None, form: Form, exact: bool, *, has_form: bool
) -> list[Finding]:
    """What is compared, and each decision that the form found has, with its evidence."""
    steps = len(search.made)
    elements = sum(w.size for w in search.asked.weights.values())
    shown = "numbers"
    if any(snapshot.m and snapshot.m.scale_inv is not None for snapshot in search.made[0].values()):
        shown = "codes and scales"
    compared = (
        f"weights{' and ' + shown + ' of both moments' if search.shown else ''} of {elements:,} "
        f"elements, {steps} steps"
    )
    findings = [
        Finding(
            "layout",
            None if layout is None else layout.name,
            compared,
            words="" if layout else "none that has a name",
        )
    ]
    count, most = (0, 0.0) if exact or layout is None else search.far(layout, form)
    if exact:
        words = "every bit"
    elif layout is None:
        words = "not explained"
    else:
        words = f"not every bit: the nearest form differs by {most:.3g} ulps at most"
    total = steps * search.asked.weights[PROBE].size
    if exact:
        evidence = compared
    elif layout:
        evidence = f"{count:,} of {total:,} weights of tensor {PROBE} differ"
    else:
        evidence = "no form of a named layout"
    findings.append(Finding("weights", exact, evidence, words=words))
    plain = Form(m=layout.average, v=layout.average) if layout else Form()
    for key, title in FIELDS.items() if has_form else ():
        value = getattr(form, key)
        as_clause = "as clause O"
        if value != getattr(plain, key):
            as_clause = f"clause O: {getattr(plain, key)}"
        formula = None
        if key in ("m", "v"):
            formula = forms.AVERAGES.get(value) or forms.SQUARES.get(value)
        findings.append(
            Finding(title, value, as_clause, words=f"{value}: {formula}" if formula else "")
        )
    return findings


def summary(
    layout: Layout | None, form: Form, exact: bool, nearest: Layout, *, has_form: bool
) -> str:
    """One sentence: the layout, how certain it is, and which steps are not clause O's."""
    if not has_form:
        of = "no layout explains it"
        if layout is not None:
            of = f"its states are those of layout {layout.name!r}, its weights are not"
        return (
            f"{of}: its first step is that of no form of AdamW, nor of Adam, with these "
            "numbers. It is another optimizer, or has other numbers than it is compared with"
        )
    plain = Form(m=layout.average, v=layout.average) if layout else Form()
    others = [
        f"{title} is {getattr(form, key)}"
        for key, title in FIELDS.items()
        if getattr(form, key) != getattr(plain, key)
    ]
    order = "the order of clause O" if not others else f"another form: {', '.join(others)}"
    if layout is None:
        return f"no layout explains every bit; the nearest is {nearest.name!r}, in {order}"
    certain = "its states bit for bit, its weights by no known form exactly"
    if exact:
        certain = "bit for bit"
    faulty = ". It is not AdamW: a bias is not corrected, or a decay is not applied"
    if form.sound:
        faulty = ""
    elif form.decay == "coupled":
        faulty = ". It is Adam, not AdamW: the decay is added to the gradient"
    elif form.count != 1:
        ahead = "its counter is a step ahead, t + 1 at step t, in the correction of biases"
        faulty = f". It is not AdamW: {ahead}"
    return f"layout {layout.name!r}, {certain}, in {order}{faulty}"
