"""Identify the rule of somebody's delayed scaling, from the scales that it shows (H-13)."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fp8ref.conformance.delayed import unnamed
from fp8ref.conformance.delayed.comparison import Asked, departure, same
from fp8ref.conformance.delayed.sequences import DIFFICULTIES, LONGEST, Sequence, fixed
from fp8ref.conformance.delayed.subject import Subject, subject_of
from fp8ref.conformance.kit.finding import Described, Finding, show
from fp8ref.formats import E4M3FN, Format
from fp8ref.policy import POLICIES, ScalePolicy
from fp8ref.shared import package_data
from fp8ref.spec.delayed import DELAYED, DelayedScaling

REMEMBERED = (40, 300, 2100)
"""Steps after which a large amax is looked for, in this order, until it is forgotten."""

_TABLES = package_data.tables(__file__, "identify")

FIELDS: tuple[str, ...] = _TABLES["decisions"]["fields"]
"""The decisions that are identified."""

# The fields that sequences of each difficulty decide, with their values.
_DECIDE: dict[str, dict[str, tuple[str, ...]]] = _TABLES["rule"]

# What a policy may do otherwise, tried where no named policy explains a difficulty's sequences.
_POLICY: dict[str, dict[str, tuple]] = _TABLES["policy"]


@dataclass(frozen=True, kw_only=True)
class DelayedOutcome(Described):
    """Which rule of delayed scaling an implementation follows.

    rule      that explains every scale of the sequences compared; None: no rule does.
    names     of DELAYED that it equals but for history_length, margin and interval.
    fields    each decision and its value, those of FIELDS that could be told.
    others    {decision: other values that explain every scale as well}.
    evidence  what no rule explains, in sentences.
    """

    name: str
    rule: DelayedScaling | None
    names: tuple[str, ...]
    fields: dict[str, Any]
    others: dict[str, tuple]
    evidence: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether a rule explains every scale."""
        return self.rule is not None

    @property
    def message(self) -> str:
        """What it is, in one line."""
        if self.rule is None:
            return f"{self.name} follows no rule of delayed scaling: {'; '.join(self.evidence)}"
        listed = ", ".join(f"{key} {value}" for key, value in self.fields.items())
        return f"{self.name} is {' or '.join(self.names) or 'a rule without a name'}: {listed}"

    def to_dict(self) -> dict[str, Any]:
        """What --json writes."""
        return {
            "ok": self.ok,
            "name": self.name,
            "names": self.names,
            "is": self.fields,
            "others": self.others,
            "evidence": self.evidence,
        }

    @property
    def table_rows(self) -> list[Finding]:
        """Each decision."""
        return [
            Finding(key, value, "", others=self.others.get(key, ()))
            for key, value in self.fields.items()
        ]


def identify_delayed(
    implementation: Any,
    fmt: Format = E4M3FN,
    *,
    made: str = "scale",
    shows: str = "next",
    takes: str = "amax",
    framework: str = "numpy",
) -> DelayedOutcome:
    """Identify the rule of a delayed scaling state; arguments as of ``require_delayed``.

    Raises:   ValueError: a class without the methods; an unknown word.
    """
    asked = Asked(rule=DELAYED["delayed"], fmt=fmt, made=made, shows=shows)
    return identify_subject(subject_of(implementation, takes=takes, framework=framework), asked)


def identify_subject(subject: Subject, asked: Asked) -> DelayedOutcome:
    """The outcome of a subject whose scale is shown as it is asked for, whatever the rule asked."""
    rules, reasons = _ordinary_rules(subject, asked)
    if not rules:
        why = tuple(reasons)
        return DelayedOutcome(
            name=subject.name, rule=None, names=(), fields={}, others={}, evidence=why
        )
    evidence = []
    for difficulty in _DECIDE:
        kept = _explaining(subject, asked, rules, difficulty)
        if kept:
            rules = kept
            continue
        question = dataclasses.replace(asked, rule=_first_named(rules))
        sequences = fixed(difficulty, _length(question.rule))
        mismatch = departure(subject, question, difficulty, sequences)
        again = "run again, they follow one: it does not repeat itself"
        evidence.append(f"no rule explains {DIFFICULTIES[difficulty].words}: {mismatch or again}")
    chosen = _first_named(rules)
    names = tuple(dict.fromkeys(name for rule in rules if (name := _name(rule))))
    others = {}
    for key in FIELDS:
        values = dict.fromkeys(field_of(rule, key) for rule in rules)
        others[key] = tuple(value for value in values if value != field_of(chosen, key))
    rule = dataclasses.replace(chosen, name=names[0] if names else "identified")
    return DelayedOutcome(
        name=subject.name,
        rule=None if evidence else rule,
        names=names,
        fields={key: field_of(chosen, key) for key in FIELDS},
        others={key: values for key, values in others.items() if values},
        evidence=tuple(evidence),
    )


def _first_named(rules: list[DelayedScaling]) -> DelayedScaling:
    return next((rule for rule in rules if _name(rule)), rules[0])


def _ordinary_rules(subject: Subject, asked: Asked) -> tuple[list[DelayedScaling], list[str]]:
    """The rules that explain ordinary amaxes; or none, and why, in sentences."""
    if raised := [reading.raised for reading in subject.run(((2.0,), (8.0,))) if reading.raised]:
        return [], [f"it raises {raised[0]}"]
    if shared := unnamed.remembers(subject):
        return [], [shared]
    if early := _changes_at_once(subject):
        return [], [early]
    interval, steps = _interval(subject), _remembered(subject)
    if steps is None:
        return [], [unnamed.unforgotten(subject, REMEMBERED[-1])]
    tried = _ordinary(subject, asked, interval, steps)
    rules = _kept(subject, asked, tried, "ordinary")
    if rules:
        return rules, []
    reductions = unnamed.reductions(subject, asked.fmt, asked.made)
    return [], [*reductions, "no rule explains ordinary amaxes"]


def _explaining(
    subject: Subject, asked: Asked, rules: list[DelayedScaling], difficulty: str
) -> list[DelayedScaling]:
    """The rules with any decisions about a difficulty that explain it; if there are none, those
    with other policies too.
    """
    decided = _DECIDE[difficulty]
    tried = [
        dataclasses.replace(rule, **dict(zip(decided, values, strict=True)))  # type: ignore[arg-type]
        for rule in rules
        for values in itertools.product(*decided.values())
    ]
    others = (
        dataclasses.replace(rule, policy=policy)
        for rule in tried
        for policy in _variations(rule.policy, difficulty)
    )
    for some in (tried, others):
        if kept := _kept(subject, asked, some, difficulty):
            return kept
    return []


def _kept(
    subject: Subject, asked: Asked, rules: Iterable[DelayedScaling], difficulty: str
) -> list[DelayedScaling]:
    asked_of = ((rule, dataclasses.replace(asked, rule=rule)) for rule in rules)
    return [rule for rule, one in asked_of if _explains(subject, one, difficulty)]


def _explains(subject: Subject, asked: Asked, difficulty: str) -> bool:
    """Whether a rule gives every scale of the fixed sequences of a difficulty; short ones first."""
    sequences = sorted(fixed(difficulty, _length(asked.rule)), key=len)
    for _, group in itertools.groupby(
        sequences, key=lambda sequence: (len(sequence) > 2) + (len(sequence) > 5)
    ):
        some = list(group)
        for sequence, scales in zip(some, asked.scales(some), strict=True):
            if any(
                shown.raised or not same(shown.scale, scale)
                for shown, scale in zip(subject.run(sequence), scales, strict=False)
            ):
                return False
    return True


def _length(rule: DelayedScaling) -> int:
    """How many steps of a history sequences exceed: beyond LONGEST the measured length is taken."""
    return min(rule.history_length * rule.interval, LONGEST)


def _ordinary(subject: Subject, asked: Asked, interval: int, steps: int) -> list[DelayedScaling]:
    """Rules that may explain ordinary amaxes, with other decisions as fp8ref's own."""
    scale = subject.run(((1.0,), (1.0,), (1.0,)))[-1].scale
    gain = (scale if asked.made == "scale" else 1 / scale) if scale > 0 else 1.0
    # whole binades below max; a power of two may add up to one, and a reciprocal an ulp
    margin = math.floor(math.log2(asked.fmt.max / gain) + 1e-6) if 0 < gain < math.inf else 0
    rules: list[DelayedScaling] = []
    for timing, policy in itertools.product(
        ("update", "use") if interval == 1 else ("update",), _policies(margin)
    ):
        # the scale stored under timing ``use`` is a step behind; an interval delays the forgetting
        late = int(timing == "use" and asked.shows == "stored")
        for length in range(max(1, steps - late - interval + 1), steps - late + 1):
            rule = dataclasses.replace(
                DELAYED["delayed"],
                history_length=length,
                interval=interval,
                timing=timing,  # type: ignore[arg-type]
                policy=policy,
            )
            rules.append(rule)
            if length == 1:
                rules.append(dataclasses.replace(rule, amax_compute="most_recent"))
    return rules


def _policies(margin: int) -> list[ScalePolicy]:
    """The policies that make float32 scales, those of delayed scaling first, under that margin.

    Not those of S-20: none is of delayed scaling.
    """
    first = ["te_delayed", "flax"]
    ordered = [
        POLICIES[name] for name in (*first, *(name for name in POLICIES if name not in first))
    ]
    margin, policies = margin if 0 <= margin <= 64 else 0, []
    for policy in ordered:
        special = policy.name == "flax_bf16" or policy.clause == "S-20"
        if policy.e8m0 is None and not special:
            own = policy.makes_scale_inv
            policy = policy if own else dataclasses.replace(policy, margin=margin)
            policies.append(policy)
    return policies


def _variations(policy: ScalePolicy, difficulty: str) -> list[ScalePolicy]:
    """The policy with other decisions about amaxes of a difficulty, named after what differs."""
    free, policies = _POLICY.get(difficulty, {}), []
    for values in [] if policy.makes_scale_inv else itertools.product(*free.values()):
        other = dataclasses.replace(policy, **dict(zip(free, values, strict=True)))
        changed = [
            f"{key} {value}"
            for key, value in zip(free, values, strict=True)
            if value != getattr(policy, key)
        ]
        if changed:
            name = f"{policy.name} with {', '.join(changed)}"
            policies.append(dataclasses.replace(other, name=name))
    return policies


def _remembered(subject: Subject) -> int | None:
    """After how many more steps a large amax has no effect; None: after none that was tried."""
    for count in REMEMBERED:
        sequence: Sequence = ((64.0,), *((1.0,),) * count)
        scales = [reading.scale for reading in subject.run(sequence)]
        changes = [i for i, scale in enumerate(scales) if scale != scales[-1]]
        steady = len(scales) - 1 - changes[-1] if changes else len(scales)
        if 2 < steady < len(scales) - 1:
            return len(scales) - steady - 1
    return None


def _interval(subject: Subject) -> int:
    """The commonest number of steps between two changes of the scale, while amaxes rise."""
    powers = tuple((2.0**i,) for i in range(-30, 31))
    scales = [reading.scale for reading in subject.run(powers)]
    changes = [i for i in range(1, len(scales)) if scales[i] != scales[i - 1]]
    gaps = collections.Counter(b - a for a, b in itertools.pairwise(changes[1:]))
    return gaps.most_common(1)[0][0] if gaps else 1


def _changes_at_once(subject: Subject) -> str:
    """A sentence if a step's own amax changes its scale; else ""."""
    for i, reading in enumerate(subject.run(((2.0,), (8.0,), (1.0,)))):
        if reading.observed is not None and reading.observed != reading.scale:
            return (
                f"the scale of step {i + 1} changes from {show(reading.scale)} to "
                f"{show(reading.observed)} when its own tensor is observed (H-1)"
            )
    return ""


def _name(rule: DelayedScaling) -> str:
    """The name in DELAYED of a rule of these decisions, of any length, margin and interval."""
    for name, named in DELAYED.items():
        if named.policy.makes_scale_inv:
            policy = named.policy
        else:
            policy = dataclasses.replace(named.policy, margin=rule.policy.margin)
        if named.timing == "use" and rule.interval > 1:
            continue
        alike = dataclasses.replace(
            named,
            name=rule.name,
            policy=policy,
            history_length=rule.history_length,
            interval=rule.interval,
            amax_compute=rule.amax_compute,
        )
        if alike == rule:
            return name
    return ""


def field_of(rule: DelayedScaling, key: str) -> Any:
    """A decision of a rule; of its policy ``policy``, its name, and ``margin``."""
    return {"policy": rule.policy.name, "margin": rule.policy.margin}.get(
        key, getattr(rule, key, None)
    )
