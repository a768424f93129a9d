"""Which policy's scales and codes a quantiser has."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.cast import behaviour
from fp8ref.conformance.cast.behaviour import Behaviour
from fp8ref.conformance.counterexample import rounded
from fp8ref.conformance.quantizer import queries
from fp8ref.conformance.quantizer.deviations import NONE, Deviation
from fp8ref.conformance.quantizer.outputs import Reading
from fp8ref.conformance.quantizer.queries import Asked, Sharing
from fp8ref.formats import Format
from fp8ref.policy import ScalePolicy
from fp8ref.sim import cast, scaling
from fp8ref.sim.scales import Scales, scales_from_amax


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy, the format whose max it scales to, the format of the codes, whether float32 subnormals are zeros (S-12), and any deviation.

    rounding  that of its cast, of products of dtype ``source``, where it is not that of S-5.
    """

    policy: ScalePolicy
    top: Format
    fmt: Format
    flushes: bool = False
    deviation: Deviation = NONE
    rounding: Behaviour | None = None
    source: str = "float32"

    def quantize(self, x: np.ndarray, sharing: Sharing) -> scaling.Quantized:
        granularity, axis = sharing.granularity, sharing.axis
        x = _flushed(x) if self.flushes else x
        given = x if self.policy.compute.name == "float32" else cast.round_to(x, self.policy.compute)
        amax = self.deviation.amax(given, granularity, axis=axis)
        with np.errstate(all="ignore"):
            scales = self.deviation.scales(scales_from_amax(amax, self.top, self.deviation.of(self.policy)), amax, self.top)
        if self.flushes and self.policy.e8m0 is None:  # e8m0 codes are no floats, and none is flushed
            scales = Scales(*(_flushed(np.asarray(s)) for s in scales))
        q = scaling.quantize_with(x, scales, self.fmt, granularity=granularity, policy=self.policy, axis=axis)
        return q if self.rounding is None else q._replace(codes=self._codes(x, scales, sharing, self.rounding))

    def _codes(self, x: np.ndarray, scales: Scales, sharing: Sharing, rounding: Behaviour) -> np.ndarray:
        by = scales.scale if self.policy.stored == "scale" else scales.scale_inv
        by = scaling.spread(by, x.shape, sharing.granularity, sharing.axis)
        with np.errstate(all="ignore"):
            scaled = x * by if self.policy.stored == "scale" else x / by
        return behaviour.encode(np.clip(scaled, -self.fmt.max, self.fmt.max), self.fmt, rounding, source=self.source)

    @property
    def clause(self) -> str:
        return self.policy.clause


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Of each question, whether scales and codes (or values) are the candidate's; None where no scales came.

    ulps  by how many float32 numbers the scales are off, the median; 0 where no scales came.
    """

    candidate: Candidate
    scales: np.ndarray | None
    codes: np.ndarray
    ulps: float

    @property
    def both(self) -> np.ndarray:
        return self.codes if self.scales is None else self.scales & self.codes

    @property
    def deciding(self) -> np.ndarray:
        """What tells the policy: its scales, where there are any."""
        return self.codes if self.scales is None else self.scales


def agreement(candidate: Candidate, asked: Sequence[Asked], sharing: Sharing) -> Agreement:
    """Compare everything that came with the candidate's."""
    scales, codes, off = [], [], [np.zeros(0)]
    for a in asked:
        q = candidate.quantize(a.x, sharing)
        wrong = unlike(a.reading, q, candidate)
        codes.append(np.bincount(a.group.reshape(-1), weights=wrong.reshape(-1)) == 0)
        equal = np.ones(a.amax.size, bool)
        for name, kind in sharing.kinds.items():
            if kind != "amax":
                found, expected = queries.per_group(a, name, sharing), np.reshape(getattr(q, kind), -1)
                equal &= (found == expected) | (np.isnan(found) & np.isnan(expected))
                off.append(np.abs(found.view(np.int32).astype(np.int64) - expected.view(np.int32))[a.ordinary])
        scales.append(equal)
    has_scales = any(kind != "amax" for kind in sharing.kinds.values())
    ulps = np.concatenate(off)
    return Agreement(
        candidate=candidate,
        scales=np.concatenate(scales) if has_scales else None,
        codes=np.concatenate(codes),
        ulps=float(np.median(ulps)) if ulps.size else 0.0,
    )


def at_ordinary(candidate: Candidate, asked: Sequence[Asked], sharing: Sharing) -> bool:
    """Whether it decides as the candidate at every ordinary amax; looks no further than the first where it does not."""
    return all(agreement(candidate, [a], sharing).deciding[a.ordinary].all() for a in asked)


def unlike(reading: Reading, q: scaling.Quantized, candidate: Candidate) -> np.ndarray:
    """Where codes, NaNs being one, or values are not those of q; values by S-8 or as quotients by the scale, rounded to their dtype."""
    if reading.codes is not None:
        return cast.canonical_nans(reading.codes, q.fmt) != cast.canonical_nans(q.codes, q.fmt)
    assert reading.values is not None
    decoded = cast.decode(q.codes, q.fmt)
    with np.errstate(all="ignore"):
        spread = [scaling.spread(s, q.codes.shape, q.granularity, q.axis) for s in (q.scale_inv, q.scale)]
        results = [decoded * spread[0], decoded / spread[1]]
    differs = []
    for expected in results:
        expected = rounded(_flushed(expected) if candidate.flushes else expected, reading.dtype)
        differs.append(~((reading.values == expected) | (np.isnan(reading.values) & np.isnan(expected))))
    return min(differs, key=lambda d: int(d.sum()))


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x).astype(np.float32)[()]
