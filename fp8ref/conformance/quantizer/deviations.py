"""How a quantiser departs from a policy, where that has a name: another amax, or scales made of it otherwise."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp8ref.formats import BFLOAT16, FLOAT16, Format
from fp8ref.policy import ScalePolicy
from fp8ref.sim import cast, scaling
from fp8ref.sim.scales import Scales, scale_inv_from_scale

Amax = Callable[..., np.ndarray]
Remake = Callable[[Scales, np.ndarray, Format], Scales]


def _own_scales(scales: Scales, amax: np.ndarray, fmt: Format) -> Scales:
    return scales


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One thing done otherwise than by a policy.

    said     completes "policy torchao, but".
    changes  of the policy's decisions.
    amax     as scaling.amax.
    scales   from those of the policy, the amax and the format whose max it scales to.
    ordinary whether it shows at ordinary amaxes.
    """

    said: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    amax: Amax = scaling.amax
    scales: Remake = _own_scales
    ordinary: bool = True

    def of(self, policy: ScalePolicy) -> ScalePolicy:
        return dataclasses.replace(policy, **self.changes) if self.changes else policy

    def concerns(self, policy: ScalePolicy) -> bool:
        """Whether the policy has what is changed: those of e8m0 scales have no eps and a ratio of their own (S-14)."""
        return not self.changes or (policy.e8m0 is None and any(getattr(policy, key) != value for key, value in self.changes.items()))


def _rounded_amax(fmt: Format) -> Amax:
    return lambda x, granularity, axis: cast.round_to(scaling.amax(x, granularity, axis=axis), fmt)


def _rounded_scale(fmt: Format, rounding: cast.Rounding = "nearest_even") -> Remake:
    def scales(scales: Scales, amax: np.ndarray, of: Format) -> Scales:
        scale = cast.round_to(scales.scale, fmt, rounding=rounding)
        return Scales(scale, scale_inv_from_scale(scale))

    return scales


def _one_where(met: Callable[[np.ndarray], np.ndarray]) -> Remake:
    def scales(scales: Scales, amax: np.ndarray, fmt: Format) -> Scales:
        return Scales(*(np.where(met(amax), np.float32(1), s)[()] for s in scales))

    return scales


def _quotient_alone(scales: Scales, amax: np.ndarray, fmt: Format) -> Scales:
    """Of float64 quotients, rounded once."""
    return Scales(scales.scale, (amax.astype(np.float64) / fmt.max).astype(np.float32))


def _power_of_two(rounding: Callable[[np.ndarray], np.ndarray]) -> Remake:
    def scales(scales: Scales, amax: np.ndarray, fmt: Format) -> Scales:
        scale = np.exp2(rounding(np.log2(scales.scale.astype(np.float64)).astype(np.float32)).astype(np.float64)).astype(np.float32)
        return Scales(scale, scale_inv_from_scale(scale))

    return scales


def times(factor: float) -> Deviation:
    def scales(scales: Scales, amax: np.ndarray, fmt: Format) -> Scales:
        scale = scales.scale * np.float32(factor)
        return Scales(scale, scale_inv_from_scale(scale))

    return Deviation(said=f"its scale is {factor:g} times that policy's", scales=scales)


def _without_abs(part: Callable[[np.ndarray, np.float32], np.ndarray]) -> Amax:
    return lambda x, granularity, axis: scaling.amax(part(x, np.float32(0)), granularity, axis=axis)


# What libraries take for the smallest amax that counts: none, powers of ten, the smallest normal numbers and the epsilon of float32 and bfloat16
_EPS = (0.0, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12, 1e-15, 1e-20, 1e-30, 2.0**-126, 2.0**-23, 2.0**-7)

DEVIATIONS = (
    Deviation(said="its amax is the largest element, without abs", amax=_without_abs(np.maximum)),
    Deviation(said="its amax is the smallest element's magnitude, not the largest magnitude", amax=_without_abs(np.minimum)),
    Deviation(said="its amax is rounded to bfloat16", amax=_rounded_amax(BFLOAT16)),
    Deviation(said="its amax is rounded to float16", amax=_rounded_amax(FLOAT16)),
    Deviation(said="its scale is max * (1 / amax), of two roundings, not max / amax", changes={"ratio": "max*(1/amax)"}),
    Deviation(said="an amax of 0 has scale 1", scales=_one_where(lambda amax: amax == 0), ordinary=False),
    Deviation(said="an infinite amax has scale 1", scales=_one_where(np.isinf), ordinary=False),
    Deviation(said="an amax of NaN has scale 1", scales=_one_where(np.isnan), ordinary=False),
    Deviation(said="an amax that is not finite has scale 1", scales=_one_where(lambda amax: ~np.isfinite(amax)), ordinary=False),
    *(Deviation(said=f"its eps is {eps:.9g}", changes={"eps": eps}, ordinary=False) for eps in _EPS),
    Deviation(said="its scale is rounded to bfloat16", scales=_rounded_scale(BFLOAT16)),
    Deviation(said="its scale is cut to bfloat16, not rounded", scales=_rounded_scale(BFLOAT16, "toward_zero")),
    Deviation(said="its scale is rounded to float16", scales=_rounded_scale(FLOAT16)),
    Deviation(said="its scale_inv is amax / max, not the reciprocal of the scale", scales=_quotient_alone),
    Deviation(said="its scale is rounded up to a power of two, not down", scales=_power_of_two(np.ceil)),
    Deviation(said="its scale is rounded to the nearest power of two, by log2", scales=_power_of_two(np.rint)),
)
NONE = Deviation(said="")
