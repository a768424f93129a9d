"""Which policies agree with everything that a quantiser gave."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from fp8ref import policy as policy_data
from fp8ref.conformance.cast.behaviour import LAYOUTS
from fp8ref.conformance.finding import Finding
from fp8ref.conformance.quantizer import departing, policy_match, queries
from fp8ref.conformance.quantizer.deviations import NONE
from fp8ref.conformance.quantizer.policy_match import Agreement, Candidate
from fp8ref.conformance.quantizer.queries import Asked, Sharing
from fp8ref.formats import Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matched:
    """The candidates that agree with all scales, or codes where there are none; and the nearest, which is the first of them if there are.

    deviation  how it departs from the nearest policy, in words; or "".
    explained  of each question, whether that policy, so deviating, gives the answer; what remains wrong has another cause.
    """

    agreements: Sequence[Agreement]
    nearest: Agreement
    asked: Sequence[Asked]
    considered: np.ndarray
    deviation: str = ""
    explained: np.ndarray

    def wrong(self, of: Agreement) -> np.ndarray:
        return ~of.both & self.considered

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(a.candidate.policy.name for a in self.agreements))


def match(asked: Sequence[Asked], sharing: Sharing, layout: Format, considered: np.ndarray, *, fixed: bool, flushing: bool) -> Matched:
    """Of the questions considered, the asked format first; then another's max; then, of uint8 and of values, another format altogether."""
    others = [f for f in LAYOUTS.values() if f is not layout]
    few = [a for a in asked if a.ordinary.any()][:8]
    best: Agreement | None = None
    for stage in ([(layout, layout)], [(f, layout) for f in others], [] if fixed else [(f, f) for f in others]):
        for ways in ((False, True),) if flushing else ((False,), (True,)):
            candidates = [
                Candidate(policy=policy, top=top, fmt=of, flushes=flushes)
                for flushes in ways
                for policy in policy_data.POLICIES.values()
                for top, of in stage
            ]
            likely = [c for c in candidates if policy_match.at_ordinary(c, few, sharing)]
            found = [policy_match.agreement(c, asked, sharing) for c in likely]  # a few amaxes rule out most
            agreed = [a for a in found if (a.deciding | ~considered).all()]
            if agreed:
                top_score = max(score(a, considered) for a in agreed)
                alike = [a for a in agreed if score(a, considered) == top_score]
                return Matched(agreements=alike, nearest=alike[0], asked=asked, considered=considered, explained=alike[0].both)
            if best is None:
                found = [policy_match.agreement(c, asked, sharing) for c in candidates]
                best = max(found, key=lambda a: (bool(a.codes[queries.ordinary(asked)].all()), -a.ulps, score(a, considered)))
    assert best is not None
    deviating = departing.exactly(asked, few, sharing, layout)
    if deviating is None or score(deviating, considered) <= score(best, considered):
        nearest, said = departing.about(best, asked, sharing)
        return Matched(agreements=[], nearest=nearest, asked=asked, considered=considered, deviation=said, explained=nearest.both)
    plain = policy_match.agreement(dataclasses.replace(deviating.candidate, deviation=NONE), asked, sharing)
    said = deviating.candidate.deviation.said
    return Matched(agreements=[], nearest=plain, asked=asked, considered=considered, deviation=said, explained=deviating.both)


def score(a: Agreement, considered: np.ndarray) -> tuple[int, int]:
    return int((a.deciding & considered).sum()), int((a.both & considered).sum())


def policy_finding(matched: Matched, memory: int) -> Finding:
    count, of = score(matched.nearest, matched.considered)[0], int(matched.considered.sum())
    by = (
        "scales"
        if matched.nearest.scales is not None
        else "codes or values: no scale is returned, so that policies of equal codes look alike"
    )
    kept = " Only ordinary amaxes: what it keeps for others one call cannot tell." if memory else ""
    evidence = f"{count} of {of} amaxes have its {by}." + kept
    if matched.agreements:
        flushed = ", with subnormals as zeros (S-12)" if matched.nearest.candidate.flushes else ""
        top = matched.nearest.candidate
        other = f", of max {top.top.max:g}, not {top.fmt.max:g}" if top.top is not top.fmt else ""
        said = matched.names[0] + other + flushed
        same = f", or the same by {', '.join(matched.names[1:])}" if matched.names[1:] else ""
        return Finding(what="policy", value=matched.names[0], words=said + same, evidence=evidence)
    nearest = matched.nearest.candidate.policy.name
    said = f"{nearest}, but {matched.deviation}" if matched.deviation else f"none of them; nearest {nearest}"
    return Finding(what="policy", value=None, words=said, evidence=evidence)
