"""Candidate quantizers: a policy, as it is or with one known deviation.

``agreement`` tells for which groups a quantizer's scales and codes are those of a candidate.
``deviations`` has the mistakes that have a name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref import policy as policies
from fp8ref.conformance.cast import behavior
from fp8ref.conformance.cast.behavior import Behavior
from fp8ref.conformance.inputs.dtypes import rounded
from fp8ref.conformance.kit.arrays import equal
from fp8ref.conformance.quantizer import outputs
from fp8ref.conformance.quantizer.deviations import NO_DEVIATION, Deviation
from fp8ref.conformance.quantizer.outputs import Quantizer, QuantizerOutput, Response, ScaleLayout
from fp8ref.formats import Format
from fp8ref.policy import ScalePolicy
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scales import Scales, scales_from_amax
from fp8ref.spec import granularity as granularities


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a quantizer should be: a policy by name, with any granularity and axis; or nothing.

    Raises:    ValueError: an unknown name or axis, or a granularity or axis without a policy.
    """

    name: str | None
    granularity: str | None = None
    axis: int | None = None

    def __post_init__(self) -> None:
        if self.granularity is not None:
            granularities.by_name(self.granularity)
        if self.axis not in (None, -1, 0):
            raise ValueError(
                f"axis is -1, the last axis of x [M, K], or 0, the first; got {self.axis!r}."
            )
        if self.policy is None and (self.granularity is not None or self.axis is not None):
            raise ValueError(
                "an expected granularity or axis needs an expected policy. Name one with --expect."
            )

    @property
    def policy(self) -> ScalePolicy | None:
        """The policy of the name."""
        return None if self.name is None else policies.by_name(self.name)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy, possibly with one deviation, to compare a quantizer with.

    scale_fmt  the format whose max it scales to; fmt: the format of the codes.
    flushes    float32 subnormals are zeros, as under XLA (S-12).
    rounding   the behavior of a cast other than that of S-5, for products of dtype ``source``.
    """

    policy: ScalePolicy
    scale_fmt: Format
    fmt: Format
    flushes: bool = False
    deviation: Deviation = NO_DEVIATION
    rounding: Behavior | None = None
    source: str = "float32"

    def scales(self, x: np.ndarray, scale_layout: ScaleLayout) -> Scales:
        """The scales of x [M, K] that are returned."""
        return self._scales(x, scale_layout, self.deviation)

    def applied(self, x: np.ndarray, scale_layout: ScaleLayout) -> Scales:
        """The scales by which codes are made."""
        return self._scales(x, scale_layout, self.deviation.by_codes)

    def _scales(self, x: np.ndarray, scale_layout: ScaleLayout, by: Deviation) -> Scales:
        granularity, axis = scale_layout.granularity, scale_layout.axis
        x = by.change_x(_flushed(x) if self.flushes else x)
        # The amax is that of x in the policy's own dtype (S-13), the cast that of x itself.
        rounded_x = x
        if self.policy.compute.name != "float32":
            rounded_x = cast.round_to(x, self.policy.compute)
        with np.errstate(all="ignore"):
            return self._amax_scales(by.amax(rounded_x, granularity, axis=axis), by)

    def scales_of_amax(self, amax: np.ndarray) -> Scales:
        """The scales of amaxes, float32 of any shape, that are returned."""
        return self._amax_scales(amax, self.deviation)

    def _amax_scales(self, amax: np.ndarray, by: Deviation) -> Scales:
        policy, scale_fmt = by.applied_to(self.policy), by.limited(self.scale_fmt)
        with np.errstate(all="ignore"):
            amax = by.change_amax(amax)
            own = scales_from_amax(amax, scale_fmt, policy)
            scales = by.scales(own, amax, scale_fmt, policy)
        # an e8m0 scale is no float, and so never flushed
        if self.flushes and self.policy.e8m0 is None:
            scales = Scales(*(_flushed(np.asarray(s)) for s in scales))
        return scales

    def quantize(self, x: np.ndarray, scale_layout: ScaleLayout) -> scaling.Quantized:
        """x [M, K] as this candidate quantizes it."""
        granularity, axis = scale_layout.granularity, scale_layout.axis
        scales, deviation = self.applied(x, scale_layout), self.deviation.by_codes
        returned = self.scales(x, scale_layout)
        x = deviation.change_x(_flushed(x) if self.flushes else x)
        policy = deviation.applied_to(self.policy)
        q = scaling.quantize_with(
            x, scales, self.fmt, granularity=granularity, policy=policy, axis=axis
        )
        if self.rounding is not None:
            multiplies = policy.stored == "scale"
            by = scales.scale if multiplies else scales.scale_inv
            by = scaling.spread(by, x.shape, q.blocks)
            with np.errstate(all="ignore"):
                scaled = np.clip(x * by if multiplies else x / by, -self.fmt.max, self.fmt.max)
            codes = behavior.encode(scaled, self.fmt, self.rounding, source=self.source)
            q = q._replace(codes=codes)
        return q._replace(**returned._asdict())

    @property
    def clause(self) -> str:
        """The clause that decides the policy's scales."""
        return self.policy.clause

    @property
    def words(self) -> str:
        """The policy's name, and the deviation."""
        if self.deviation.text:
            return f"{self.policy.name}, but {self.deviation.text}"
        return self.policy.name


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A quantizer, the candidate that it is compared with, and where its scales are."""

    quantizer: Quantizer
    candidate: Candidate
    scale_layout: ScaleLayout

    @property
    def dtype(self) -> str:
        """The dtype of inputs."""
        return self.quantizer.dtype

    def expected(self, x: np.ndarray) -> scaling.Quantized:
        """x [M, K] as the candidate quantizes it."""
        return self.candidate.quantize(x, self.scale_layout)


def by_group(scales: Scales | scaling.Quantized, kind: str) -> np.ndarray:
    """Scales of a kind, flat: one for each group."""
    return np.reshape(getattr(scales, kind), -1)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """For each group of all responses, whether scales and codes (or values) are the candidate's.

    scales  None if the quantizer returns no scale.
    ulps    the median distance of the scales in float32 numbers; 0 without scales.
    """

    candidate: Candidate
    scales: np.ndarray | None
    codes: np.ndarray
    ulps: float

    @property
    def both(self) -> np.ndarray:
        """For each group, whether scales and codes agree."""
        return self.codes if self.scales is None else self.scales & self.codes

    @property
    def deciding(self) -> np.ndarray:
        """For each group, whether what decides a policy agrees: scales, else codes."""
        return self.codes if self.scales is None else self.scales

    def score(self, considered: np.ndarray) -> tuple[int, int]:
        """Of the groups that count, how many agree in deciding outputs, and how many in all."""
        return int((self.deciding & considered).sum()), int((self.both & considered).sum())


def agreement(
    candidate: Candidate, responses: Sequence[Response], scale_layout: ScaleLayout
) -> Agreement:
    """Compare all outputs with those of the candidate, group by group."""
    scales, codes, off = [], [], [np.zeros(0)]
    for a in responses:
        q = candidate.quantize(a.x, scale_layout)
        wrong = mismatches(a.output, q, candidate)
        # A group agrees if none of its elements is wrong.
        codes.append(np.bincount(a.group.reshape(-1), weights=wrong.reshape(-1)) == 0)
        scales.append(equal_scales(a, q, scale_layout))
        for returned, expected in both_scales(a, q, scale_layout):
            # The bits of positive float32 numbers, as integers, count these numbers.
            distance = returned.view(np.int32).astype(np.int64) - expected.view(np.int32)
            off.append(np.abs(distance)[a.ordinary])
    ulps = np.concatenate(off)
    return Agreement(
        candidate=candidate,
        scales=np.concatenate(scales) if scale_layout.scales else None,
        codes=np.concatenate(codes),
        ulps=float(np.median(ulps)) if ulps.size else 0.0,
    )


def agrees(candidate: Candidate, responses: Sequence[Response], scale_layout: ScaleLayout) -> bool:
    """Whether all groups agree in what decides a policy: scales alone, else codes."""
    if not scale_layout.scales:
        return all(agreement(candidate, [a], scale_layout).codes.all() for a in responses)
    return all(
        equal_scales(a, candidate.scales(a.x, scale_layout), scale_layout).all() for a in responses
    )


def both_scales(
    a: Response, scales: Scales | scaling.Quantized, scale_layout: ScaleLayout
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(found, expected) of each kind of scale in the response, float32 by group."""
    return [
        (outputs.per_group(a, name, scale_layout), by_group(scales, kind))
        for name, kind in scale_layout.scales.items()
    ]


def equal_scales(
    a: Response, scales: Scales | scaling.Quantized, scale_layout: ScaleLayout
) -> np.ndarray:
    """For each group, whether all its scales are these; true without scales."""
    alike = np.ones(a.amax.size, bool)
    for returned, expected in both_scales(a, scales, scale_layout):
        alike &= equal(returned, expected)
    return alike


def mismatches(output: QuantizerOutput, q: scaling.Quantized, candidate: Candidate) -> np.ndarray:
    """Where the codes (all NaN codes being one), or else the values, are not those of q.

    Values are decoded * scale_inv (S-8) or decoded / scale, in their dtype: whichever agrees more.
    """
    if output.codes is not None:
        return cast.canonical_nans(output.codes, q.fmt) != cast.canonical_nans(q.codes, q.fmt)
    if output.values is None:  # scales alone
        return np.zeros(q.codes.shape, bool)
    decoded = cast.decode(q.codes, q.fmt)
    with np.errstate(all="ignore"):
        spread = [scaling.spread(s, q.codes.shape, q.blocks) for s in (q.scale_inv, q.scale)]
        results = [decoded * spread[0], decoded / spread[1]]
    if candidate.flushes:  # XLA flushes the product too.
        results = [_flushed(values) for values in results]
    differs = [~equal(output.values, rounded(values, output.dtype)) for values in results]
    return min(differs, key=np.sum)


def _flushed(x: np.ndarray) -> np.ndarray:
    """x with float32 subnormals as zeros of their sign."""
    subnormal = np.abs(x) < np.float32(2.0**-126)
    return np.where(subnormal, np.copysign(np.float32(0), x), x).astype(np.float32)[()]
