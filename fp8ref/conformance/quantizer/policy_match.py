"""Match a quantizer's scales and codes with every policy, then with every policy that has one known deviation."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from fp8ref import policy as policy_data
from fp8ref.conformance.cast.behaviour import LAYOUTS
from fp8ref.conformance.quantizer import candidates, queries
from fp8ref.conformance.quantizer.candidates import DEVIATIONS, NONE, Agreement, Candidate, Deviation, times
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
            tried = [
                Candidate(policy=policy, top=top, fmt=of, flushes=flushes)
                for flushes in ways
                for policy in policy_data.POLICIES.values()
                for top, of in stage
            ]
            likely = [c for c in tried if candidates.at_ordinary(c, few, sharing)]
            found = [candidates.agreement(c, asked, sharing) for c in likely]  # a few amaxes rule out most
            agreed = [a for a in found if (a.deciding | ~considered).all()]
            if agreed:
                top_score = max(score(a, considered) for a in agreed)
                alike = [a for a in agreed if score(a, considered) == top_score]
                return Matched(agreements=alike, nearest=alike[0], asked=asked, considered=considered, explained=alike[0].both)
            if best is None:
                found = [candidates.agreement(c, asked, sharing) for c in tried]
                best = max(found, key=lambda a: (bool(a.codes[queries.ordinary(asked)].all()), -a.ulps, score(a, considered)))
    assert best is not None
    deviating = exactly(asked, few, sharing, layout)
    if deviating is None or score(deviating, considered) <= score(best, considered):
        nearest, said = about(best, asked, sharing)
        return Matched(agreements=[], nearest=nearest, asked=asked, considered=considered, deviation=said, explained=nearest.both)
    plain = candidates.agreement(dataclasses.replace(deviating.candidate, deviation=NONE), asked, sharing)
    said = deviating.candidate.deviation.said
    return Matched(agreements=[], nearest=plain, asked=asked, considered=considered, deviation=said, explained=deviating.both)


def score(a: Agreement, considered: np.ndarray) -> tuple[int, int]:
    return int((a.deciding & considered).sum()), int((a.both & considered).sum())


def exactly(asked: Sequence[Asked], few: Sequence[Asked], sharing: Sharing, layout: Format) -> Agreement | None:
    """The policy, with a deviation, that agrees at all ordinary amaxes, and most often at the others."""
    found = []
    for policy in policy_data.POLICIES.values():
        plain = Candidate(policy=policy, top=layout, fmt=layout)
        as_is = candidates.at_ordinary(plain, few, sharing)  # then only decisions at other amaxes are left to deviate
        for deviation in (*DEVIATIONS, *_factor(plain, few, sharing)):
            candidate = dataclasses.replace(plain, deviation=deviation)
            if deviation.concerns(policy) and not (as_is and deviation.ordinary) and candidates.at_ordinary(candidate, few, sharing):
                agreed = candidates.agreement(candidate, asked, sharing)
                if agreed.both[queries.ordinary(asked)].all():
                    found.append(agreed)
    return max(found, key=lambda a: int(a.both.sum())) if found else None


def _factor(candidate: Candidate, few: Sequence[Asked], sharing: Sharing) -> list[Deviation]:
    """The power of two that its scales are that many times the candidate's, if it is one for all, and not 1."""
    ratios = _ratios(candidate, few, sharing)
    exact = ratios.size > 0 and np.all(ratios == ratios[0]) and ratios[0] != 1 and np.frexp(ratios[0])[0] == 0.5
    return [times(float(ratios[0]))] if exact else []


def about(best: Agreement, asked: Sequence[Asked], sharing: Sharing) -> tuple[Agreement, str]:
    """The policy whose scales it has about some number of times, and that in words; else the best, and nothing.

    About: of four roundings to float32 in a ratio of scales or of their reciprocals, each is within 2^-24, and so two ratios within 2^-21.
    """
    for policy in policy_data.POLICIES.values():
        candidate = dataclasses.replace(best.candidate, policy=policy)
        ratios = _ratios(candidate, asked, sharing)
        if ratios.size and ratios.max() / ratios.min() < 1 + 2.0**-21 and abs(np.log2(ratios[0])) > 2.0**-20:
            ratio = float(np.median(ratios))
            other = next(
                (f", as of a max of {f.max:g}" for f in LAYOUTS.values() if abs(ratio * candidate.top.max / f.max - 1) < 2.0**-20), ""
            )
            said = f"its scale is about {ratio:.6g} times that policy's{other}"
            return candidates.agreement(candidate, asked, sharing), said
    return best, ""


def _ratios(candidate: Candidate, few: Sequence[Asked], sharing: Sharing) -> np.ndarray:
    """How many times the candidate's scale its own is, at ordinary amaxes; empty where none is returned, or one is 0, infinite or NaN."""
    name = sharing.scale
    if name is None:
        return np.zeros(0)
    found = []
    for a in few:
        expected = np.reshape(getattr(candidate.quantize(a.x, sharing), sharing.kinds[name]), -1)
        with np.errstate(all="ignore"):
            ratio = queries.per_group(a, name, sharing).astype(np.float64) / expected
            found.append((ratio if sharing.kinds[name] == "scale" else 1 / ratio)[a.ordinary])
    ratios = np.concatenate(found)
    return ratios if np.all((ratios > 0) & (ratios < np.inf)) else np.zeros(0)
