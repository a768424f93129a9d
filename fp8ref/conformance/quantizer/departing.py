"""Which deviation from which policy a quantiser shows, where it is no policy that is known."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from fp8ref import policy as policy_data
from fp8ref.conformance.cast.behaviour import LAYOUTS
from fp8ref.conformance.quantizer import policy_match, queries
from fp8ref.conformance.quantizer.deviations import DEVIATIONS, Deviation, times
from fp8ref.conformance.quantizer.policy_match import Agreement, Candidate
from fp8ref.conformance.quantizer.queries import Asked, Sharing
from fp8ref.formats import Format


def exactly(asked: Sequence[Asked], few: Sequence[Asked], sharing: Sharing, layout: Format) -> Agreement | None:
    """The policy, with a deviation, that agrees at all ordinary amaxes, and most often at the others."""
    found = []
    for policy in policy_data.POLICIES.values():
        plain = Candidate(policy=policy, top=layout, fmt=layout)
        as_is = policy_match.at_ordinary(plain, few, sharing)  # then only decisions at other amaxes are left to deviate
        for deviation in (*DEVIATIONS, *_factor(plain, few, sharing)):
            candidate = dataclasses.replace(plain, deviation=deviation)
            if deviation.concerns(policy) and not (as_is and deviation.ordinary) and policy_match.at_ordinary(candidate, few, sharing):
                agreed = policy_match.agreement(candidate, asked, sharing)
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
            return policy_match.agreement(candidate, asked, sharing), said
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
