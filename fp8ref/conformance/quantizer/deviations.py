"""Mistakes of quantizers that have a name, such as an amax without abs: departures from a policy.

``NAMED`` show at ordinary amaxes. The functions below make those with a number in them, such as
another eps: ``deviation_search`` solves the number from a quantizer's answers.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from fp8ref.conformance.kit.arrays import equal
from fp8ref.formats import BFLOAT16, FLOAT16, Format
from fp8ref.policy import ScalePolicy
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scales import Scales, scale_inv_from_scale

Amax = Callable[..., np.ndarray]
"""A function of x, granularity and axis, as ``scaling.amax``."""

ChangeScales = Callable[[Scales, np.ndarray, Format, ScalePolicy], Scales]
"""A function of a policy's scales, the amax, the format and the policy, which returns other scales.
"""


def _own(value: Any) -> Any:
    """What a policy makes, unchanged."""
    return value


def _own_scales(scales: Scales, amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> Scales:
    """The policy's scales, unchanged."""
    return scales


@dataclass(frozen=True, kw_only=True)
class Limited(Format):
    """A format whose max, to which a tensor is scaled, is another number."""

    limit: float

    @property
    def max(self) -> float:
        """The limit."""
        return self.limit


@dataclass(frozen=True)
class Deviation:
    """One way to depart from a policy, or several, one after another.

    text         completes "policy torchao, but".
    changes      fields of the policy, with other values.
    amax         replaces scaling.amax.
    change_amax  amax -> another amax.
    scales       (policy's scales, amax, format whose max is scaled to, policy) -> scales.
    returned     of the scales that codes are made by, those that are returned.
    limit        the max that is scaled to, in place of the format's.
    parts        how many deviations it is.
    """

    text: str
    _: KW_ONLY
    changes: Mapping[str, Any] = field(default_factory=dict)
    amax: Amax = scaling.amax
    change_amax: Callable[[np.ndarray], np.ndarray] = _own
    scales: ChangeScales = _own_scales
    returned: Callable[[Scales], Scales] = _own
    limit: float | None = None
    parts: int = 1

    def applied_to(self, policy: ScalePolicy) -> ScalePolicy:
        """The policy with the changed fields."""
        return dataclasses.replace(policy, **self.changes) if self.changes else policy

    def limited(self, fmt: Format) -> Format:
        """The format whose max is scaled to."""
        if self.limit is None:
            return fmt
        return Limited(
            **{f.name: getattr(fmt, f.name) for f in dataclasses.fields(Format)}, limit=self.limit
        )

    def then(self, other: "Deviation") -> "Deviation":
        """Both deviations: ``other`` changes the amaxes and scales of this one."""
        return Deviation(
            f"{self.text}, and {other.text}" if self.text else other.text,
            changes={**self.changes, **other.changes},
            amax=self.amax if other.amax is scaling.amax else other.amax,
            change_amax=lambda amax: other.change_amax(self.change_amax(amax)),
            scales=lambda own, *of: other.scales(self.scales(own, *of), *of),
            returned=lambda scales: other.returned(self.returned(scales)),
            limit=other.limit or self.limit,
            parts=self.parts + other.parts,
        )


def _in(
    fmt: Format, rounding: cast.Rounding = "nearest_even"
) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: cast.round_to(x, fmt, rounding=rounding)


def _change(kind: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Scales], Scales]:
    """A change of ``scale`` or ``scale_inv``; the other becomes its reciprocal."""
    other = "scale_inv" if kind == "scale" else "scale"

    def scales(own: Scales) -> Scales:
        before = getattr(own, kind)
        after = change(before)
        kept = equal(after, before)
        reciprocal = np.where(kept, getattr(own, other), scale_inv_from_scale(after))[()]
        return Scales(**{kind: after, other: reciprocal})

    return scales


def _changed(change: Callable[[Scales], Scales]) -> ChangeScales:
    return lambda scales, amax, fmt, policy: change(scales)


def _scales_change(kind: str, change: Callable[[np.ndarray], np.ndarray]) -> ChangeScales:
    """As ``_change``, of the scales that codes are made by."""
    return _changed(_change(kind, change))


def _power_of_two(rounding: Callable[[np.ndarray], np.ndarray]) -> ChangeScales:
    # log2 is rounded to float32, as that of libraries is.
    def power(s: np.ndarray) -> np.ndarray:
        log2 = np.log2(s.astype(np.float64)).astype(np.float32)
        return np.exp2(rounding(log2).astype(np.float64)).astype(np.float32)

    return _scales_change("scale", power)


def _without_abs(part: Callable[[np.ndarray, np.float32], np.ndarray]) -> Amax:
    return lambda x, granularity, axis: scaling.amax(part(x, np.float32(0)), granularity, axis=axis)


def factor(kind: str, by: float, words: str) -> Deviation:
    """A scale, or scale_inv, that is ``by`` times the policy's, by a product in float32."""
    return Deviation(
        f"its {kind} is {words} times that policy's",
        scales=_scales_change(kind, lambda s: s * np.float32(by)),
    )


def another_max(limit: float, fmt: Format, words: str) -> Deviation:
    """Another max to scale to than that of the format."""
    ratio = limit / fmt.max
    text = f"its scale is {ratio:g} times that policy's, as of a max of {words}, not {fmt.max:g}"
    return Deviation(
        text if np.frexp(ratio)[0] == 0.5 else f"its max is {words}, not {fmt.max:g}", limit=limit
    )


def floor(eps: float, policy: ScalePolicy, words: str) -> Deviation:
    """Another eps than the policy's."""
    text = f"its eps is {words}, not {policy.eps:.9g}"
    if policy.of_exponents:  # the policy has no eps (S-14)
        return Deviation(text, change_amax=lambda amax: np.maximum(amax, np.float32(eps)))
    return Deviation(text, changes={"eps": eps})


def eps_added(eps: float, policy: ScalePolicy, words: str) -> Deviation:
    """An eps that is added to the amax, in float32, as arrays and a Python number are added."""
    return Deviation(
        f"its eps, {words}, is added to the amax, not the least amax",
        changes={"eps": 0.0} if policy.eps else {},
        change_amax=lambda amax: amax + np.float32(eps),
    )


def bound(kind: str, value: np.float32, *, least: bool) -> Deviation:
    """A scale, or scale_inv, that is at least or at most a number."""
    words = f"its {kind} is at {'least' if least else 'most'} {scale_words(value)}"
    bounded = np.maximum if least else np.minimum
    return Deviation(words, scales=_scales_change(kind, lambda s: bounded(s, value)))


def constant(
    words: str,
    condition: Callable[[np.ndarray], np.ndarray],
    scales: Mapping[str, np.float32],
    shown: Collection[str],
) -> Deviation:
    """Constant scales, by kind, of some amaxes such as NaN; ``shown``: the kinds returned."""

    def replaced(own: Scales, amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> Scales:
        for kind, s in scales.items():
            changed = np.where(condition(amax), s, getattr(own, kind))[()]
            own = own._replace(**{kind: changed})
        return own

    text = " and ".join(f"{kind} {scale_words(scales[kind])}" for kind in shown)
    return Deviation(f"{words} has {text}", scales=replaced)


def scale_words(value: np.float32) -> str:
    """A scale in words: a power of two far from 1 as such."""
    fraction, exponent = np.frexp(value)
    if fraction == 0.5 and abs(exponent) > 24:
        return f"2^{exponent - 1}"
    return f"{value:.9g}"


def _flush(s: np.ndarray) -> np.ndarray:
    return np.where(s < np.float32(2.0**-126), np.float32(0), s)[()]


FLUSHES = (
    Deviation("its subnormal scales are 0", scales=_scales_change("scale", _flush)),
    Deviation("its subnormal scale_inv are 0", scales=_scales_change("scale_inv", _flush)),
    Deviation(
        "its subnormal scales and scale_inv are 0",
        scales=_changed(lambda s: Scales(*map(_flush, s))),
    ),
    Deviation(
        "the subnormal scale_inv that it returns are 0",
        returned=lambda s: Scales(s.scale, _flush(s.scale_inv)),
    ),
    Deviation(
        "the subnormal scales that it returns are 0",
        returned=lambda s: Scales(_flush(s.scale), s.scale_inv),
    ),
)
"""Scales whose subnormals are zeros, where those of x are kept (S-12)."""


def code_0_deviations(policy: ScalePolicy) -> list[Deviation]:
    """Other scales beside a scale_inv of 2^-127, which is code 0 of e8m0 (S-14)."""
    if policy.e8m0 is None:
        return []
    own = policy.e8m0.scale_of_code_0
    others = {
        2.0**127: "2^127",
        2.0**126: "2^126",
        np.inf: "inf, as if code 0 were 0",
        1.0: "1 or less, so that its codes are zeros",
    }
    return [
        Deviation(
            f"beside a scale_inv of 2^-127 its scale is {words}, not "
            f"{scale_words(np.float32(own))}",
            changes={"e8m0": dataclasses.replace(policy.e8m0, scale_of_code_0=value)},
        )
        for value, words in others.items()
        if value != own
    ]


def overflow_deviations(policy: ScalePolicy) -> list[Deviation]:
    """A scale above float32's range that is infinite, under a policy with a largest scale (S-9)."""
    if policy.overflow == "inf":
        return []
    return [Deviation("a scale above float32's range is inf", changes={"overflow": "inf"})]


def _quotient_alone(scales: Scales, amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> Scales:
    """scale_inv = max(amax, eps) / max, by a float64 quotient rounded once."""
    floored = np.maximum(amax.astype(np.float64), np.float64(np.float32(policy.eps)))
    return Scales(scales.scale, (floored / fmt.max).astype(np.float32))


_UNROUNDED = "its codes are of the float32 one"

_BFLOAT16, _CUT_TO_BFLOAT16 = _in(BFLOAT16), _in(BFLOAT16, "toward_zero")

# What deviates, as a field of Deviation, and how, by its text
_NAMED: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "amax",
        {
            "its amax is the largest element, without abs": _without_abs(np.maximum),
            "its amax is the smallest element's magnitude, not the largest magnitude": (
                _without_abs(np.minimum)
            ),
        },
    ),
    (
        "change_amax",
        {
            "its amax is rounded to bfloat16": _BFLOAT16,
            "its amax is cut to bfloat16, not rounded": _CUT_TO_BFLOAT16,
            "its amax is rounded to float16": _in(FLOAT16),
        },
    ),
    (
        "scales",
        {
            "its scale is cut to bfloat16, not rounded": _scales_change("scale", _CUT_TO_BFLOAT16),
            "its scale is rounded to float16": _scales_change("scale", _in(FLOAT16)),
            "its scale is rounded to bfloat16": _scales_change("scale", _BFLOAT16),
            "its scale_inv is rounded to bfloat16": _scales_change("scale_inv", _BFLOAT16),
        },
    ),
    (
        "returned",
        {
            f"the {kind} that it returns is rounded to bfloat16, and {_UNROUNDED}": (
                _change(kind, _BFLOAT16)
            )
            for kind in ("scale", "scale_inv")
        },
    ),
    (
        "scales",
        {
            "its scale_inv is amax / max, not the reciprocal of the scale": _quotient_alone,
            "its scale is rounded up to a power of two, not down": _power_of_two(np.ceil),
            "its scale is rounded to the nearest power of two, by log2": _power_of_two(np.rint),
        },
    ),
)

NAMED = tuple(
    Deviation(text, **{field: change})
    for field, changes in _NAMED
    for text, change in changes.items()
)
"""The mistakes that have a name and no number, for every policy."""


def named(policy: ScalePolicy) -> list[Deviation]:
    """``NAMED``, and another ratio of a policy whose ratio makes a scale."""
    if policy.makes_scale_inv or policy.ratio == "max*(1/amax)":
        return [*NAMED]
    text = "its scale is max * (1 / amax), of two roundings, not max / amax"
    return [*NAMED, Deviation(text, changes={"ratio": "max*(1/amax)"})]


NO_DEVIATION = Deviation("", parts=0)  # no mistake: the policy as it is
