"""Mistakes of quantizers that have a name, such as an amax without abs: departures from a policy."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp8ref.formats import BFLOAT16, FLOAT16, Format
from fp8ref.policy import ScalePolicy
from fp8ref.sim import cast, scaling
from fp8ref.sim.scales import Scales, scale_inv_from_scale

Amax = Callable[..., np.ndarray]
"""A function of x, granularity and axis, as ``scaling.amax``."""

ChangeScales = Callable[[Scales, np.ndarray, Format, ScalePolicy], Scales]
"""A function of a policy's scales, the amax, the format and the policy, which returns other scales."""


def _own_scales(scales: Scales, amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> Scales:
    """The policy's scales, unchanged."""
    return scales


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One way to depart from a policy.

    text     completes "policy torchao, but".
    changes  fields of the policy, with other values.
    amax     replaces scaling.amax.
    scales   (policy's scales, amax, format whose max is scaled to, policy) -> scales.
    returned of the scales that codes are made by, those that are returned; None: the same.
    ordinary whether it shows at ordinary amaxes.
    """

    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    amax: Amax = scaling.amax
    scales: ChangeScales = _own_scales
    returned: Callable[[Scales], Scales] | None = None
    ordinary: bool = True

    def applied_to(self, policy: ScalePolicy) -> ScalePolicy:
        """The policy with the changed fields."""
        return dataclasses.replace(policy, **self.changes) if self.changes else policy

    def applies_to(self, policy: ScalePolicy) -> bool:
        """Whether it changes the policy. One of e8m0 scales has no eps (S-14), one that makes scale_inv its own ratio (S-17)."""
        fixed = policy.e8m0 is not None or ("ratio" in self.changes and policy.makes_scale_inv)
        return not self.changes or (not fixed and any(getattr(policy, key) != value for key, value in self.changes.items()))


def _other_amax(change: Callable[[np.ndarray], np.ndarray]) -> Amax:
    return lambda x, granularity, axis: change(scaling.amax(x, granularity, axis=axis))


def _in(fmt: Format, rounding: cast.Rounding = "nearest_even") -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: cast.round_to(x, fmt, rounding=rounding)


def _of_scale(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Scales], Scales]:
    def scales(scales: Scales) -> Scales:
        scale = change(scales.scale)
        return Scales(scale, scale_inv_from_scale(scale))

    return scales


def _of_scale_inv(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Scales], Scales]:
    def scales(scales: Scales) -> Scales:
        scale_inv = change(scales.scale_inv)
        return Scales(scale_inv_from_scale(scale_inv), scale_inv)

    return scales


def _changed(change: Callable[[Scales], Scales]) -> ChangeScales:
    return lambda scales, amax, fmt, policy: change(scales)


def _one_where(condition: Callable[[np.ndarray], np.ndarray]) -> ChangeScales:
    def scales(scales: Scales, amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> Scales:
        return Scales(*(np.where(condition(amax), np.float32(1), s)[()] for s in scales))

    return scales


def _quotient_alone(scales: Scales, amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> Scales:
    """scale_inv = max(amax, eps) / max, by a float64 quotient rounded once."""
    floored = np.maximum(amax.astype(np.float64), np.float64(np.float32(policy.eps)))
    return Scales(scales.scale, (floored / fmt.max).astype(np.float32))


def _power_of_two(rounding: Callable[[np.ndarray], np.ndarray]) -> ChangeScales:
    # log2 is rounded to float32, as that of libraries is.
    return _changed(
        _of_scale(lambda s: np.exp2(rounding(np.log2(s.astype(np.float64)).astype(np.float32)).astype(np.float64)).astype(np.float32))
    )


def scale_times(factor: float) -> Deviation:
    """The deviation of a scale that is ``factor`` times the policy's."""
    return Deviation(
        text=f"its scale is {factor:g} times that policy's", scales=_changed(_of_scale(lambda scale: scale * np.float32(factor)))
    )


def _without_abs(part: Callable[[np.ndarray, np.float32], np.ndarray]) -> Amax:
    return lambda x, granularity, axis: scaling.amax(part(x, np.float32(0)), granularity, axis=axis)


def _eps_added(eps: float) -> Deviation:
    # In float32, as arrays and a Python number are added.
    return Deviation(
        text=f"its eps, {eps:.9g}, is added to the amax, not the least amax",
        changes={"eps": 0.0},
        amax=_other_amax(lambda amax: amax + np.float32(eps)),
        ordinary=False,
    )


# The eps of libraries: none, powers of ten, the smallest normal number, and two epsilons
_EPS = (0.0, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12, 1e-15, 1e-20, 1e-30, 2.0**-126, 2.0**-23, 2.0**-7)

_FLOORS = (
    *(Deviation(text=f"its eps is {eps:.9g}", changes={"eps": eps}, ordinary=False) for eps in _EPS),
    *(_eps_added(eps) for eps in _EPS if eps),
)

_UNROUNDED = "its codes are of the float32 one"
_IN_BFLOAT16 = (
    Deviation(text="its scale is rounded to bfloat16", scales=_changed(_of_scale(_in(BFLOAT16)))),
    Deviation(text="its scale_inv is rounded to bfloat16", scales=_changed(_of_scale_inv(_in(BFLOAT16)))),
    Deviation(text=f"the scale that it returns is rounded to bfloat16, and {_UNROUNDED}", returned=_of_scale(_in(BFLOAT16))),
    Deviation(text=f"the scale_inv that it returns is rounded to bfloat16, and {_UNROUNDED}", returned=_of_scale_inv(_in(BFLOAT16))),
)

DEVIATIONS = (
    Deviation(text="its amax is the largest element, without abs", amax=_without_abs(np.maximum)),
    Deviation(text="its amax is the smallest element's magnitude, not the largest magnitude", amax=_without_abs(np.minimum)),
    Deviation(text="its amax is rounded to bfloat16", amax=_other_amax(_in(BFLOAT16))),
    Deviation(text="its amax is cut to bfloat16, not rounded", amax=_other_amax(_in(BFLOAT16, "toward_zero"))),
    Deviation(text="its amax is rounded to float16", amax=_other_amax(_in(FLOAT16))),
    Deviation(text="its scale is max * (1 / amax), of two roundings, not max / amax", changes={"ratio": "max*(1/amax)"}),
    Deviation(text="an amax of 0 has scale 1", scales=_one_where(lambda amax: amax == 0), ordinary=False),
    Deviation(text="an infinite amax has scale 1", scales=_one_where(np.isinf), ordinary=False),
    Deviation(text="an amax of NaN has scale 1", scales=_one_where(np.isnan), ordinary=False),
    Deviation(text="an amax that is not finite has scale 1", scales=_one_where(lambda amax: ~np.isfinite(amax)), ordinary=False),
    *_FLOORS,
    Deviation(text="its scale is cut to bfloat16, not rounded", scales=_changed(_of_scale(_in(BFLOAT16, "toward_zero")))),
    Deviation(text="its scale is rounded to float16", scales=_changed(_of_scale(_in(FLOAT16)))),
    *_IN_BFLOAT16,
    Deviation(text="its scale_inv is amax / max, not the reciprocal of the scale", scales=_quotient_alone),
    Deviation(text="its scale is rounded up to a power of two, not down", scales=_power_of_two(np.ceil)),
    Deviation(text="its scale is rounded to the nearest power of two, by log2", scales=_power_of_two(np.rint)),
)
"""The mistakes that have a name."""

NO_DEVIATION = Deviation(text="")
"""No mistake: the policy as it is."""


def pairs() -> Iterator[Deviation]:
    """Two mistakes at once: another eps, and scales rounded to bfloat16."""
    for floor, stored in itertools.product(_FLOORS, _IN_BFLOAT16):
        yield dataclasses.replace(stored, text=f"{floor.text}, and {stored.text}", changes=floor.changes, amax=floor.amax)
