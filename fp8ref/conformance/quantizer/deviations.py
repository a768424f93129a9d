"""Mistakes of quantizers that have a name, such as an amax without abs: departures from a policy.

``NAMED`` show at ordinary amaxes. The functions below make those with a number in them, such as
another eps: ``deviation_search`` solves the number from a quantizer's answers.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, get_args

import numpy as np

from fp8ref.conformance.kit.arrays import equal
from fp8ref.formats import BFLOAT16, E8M0FNU, FLOAT16, Format
from fp8ref.policy import POLICIES, PowerOfTwo, ScalePolicy
from fp8ref.shared import package_data
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scales import Scales, scale_inv_from_scale

Amax = Callable[..., np.ndarray]
"""A function of x, granularity and axis, as ``scaling.amax``."""

ChangeScales = Callable[[Scales, np.ndarray, Format, ScalePolicy], Scales]
"""(a policy's scales, the amax, the format, the policy) -> other scales."""


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
    change_x     x -> another tensor, before all else.
    codes        departs in place of this one where codes are made; the scales returned stay.
    limit        the max that is scaled to, in place of the format's.
    parts        how many deviations it is.
    """

    text: str
    _: KW_ONLY
    changes: Mapping[str, Any] = field(default_factory=dict)
    amax: Amax = scaling.amax
    change_amax: Callable[[np.ndarray], np.ndarray] = _own
    scales: ChangeScales = _own_scales
    change_x: Callable[[np.ndarray], np.ndarray] = _own
    codes: "Deviation | None" = None
    limit: float | None = None
    parts: int = 1

    def applied_to(self, policy: ScalePolicy) -> ScalePolicy:
        """The policy with the changed fields."""
        return dataclasses.replace(policy, **self.changes) if self.changes else policy

    @property
    def rounds_x(self) -> bool:
        """Whether x goes through another dtype first."""
        return self.change_x is not _own

    @property
    def by_codes(self) -> "Deviation":
        """The deviation of the scales that codes are made by."""
        return self.codes or self

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
            change_x=other.change_x if other.change_x is not _own else self.change_x,
            codes=self.by_codes.then(other.by_codes) if self.codes or other.codes else None,
            limit=other.limit or self.limit,
            parts=self.parts + other.parts,
        )


NO_DEVIATION = Deviation("", parts=0)  # no mistake: the policy as it is


def _in(
    fmt: Format, rounding: cast.Rounding = "nearest_even"
) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: cast.round_to(x, fmt, rounding=rounding)


def _change(kind: str, change: Callable[[np.ndarray], np.ndarray]) -> ChangeScales:
    """A change of ``scale`` or ``scale_inv``; the other becomes its reciprocal."""
    other = "scale_inv" if kind == "scale" else "scale"

    def scales(own: Scales, amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> Scales:
        before = getattr(own, kind)
        after = change(before)
        kept = equal(after, before)
        reciprocal = np.where(kept, getattr(own, other), scale_inv_from_scale(after))[()]
        return Scales(**{kind: after, other: reciprocal})

    return scales


def _power_of_two(rounding: Callable[[np.ndarray], np.ndarray]) -> ChangeScales:
    # log2 is rounded to float32, as that of libraries is.
    def power(s: np.ndarray) -> np.ndarray:
        log2 = np.log2(s.astype(np.float64)).astype(np.float32)
        return np.exp2(rounding(log2).astype(np.float64)).astype(np.float32)

    return _change("scale", power)


def _without_abs(part: Callable[[np.ndarray, np.float32], np.ndarray]) -> Amax:
    return lambda x, granularity, axis: scaling.amax(part(x, np.float32(0)), granularity, axis=axis)


def factor(kind: str, by: float, words: str) -> Deviation:
    """A scale, or scale_inv, that is ``by`` times the policy's, by a product in float32."""
    return Deviation(
        f"its {kind} is {words} times that policy's",
        scales=_change(kind, lambda s: s * np.float32(by)),
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
    return Deviation(words, scales=_change(kind, lambda s: bounded(s, value)))


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


_FLUSHED = {"scales": _change("scale", _flush), "scale_inv": _change("scale_inv", _flush)}

FLUSHES = (
    *(Deviation(f"its subnormal {kind} are 0", scales=to) for kind, to in _FLUSHED.items()),
    Deviation(
        "its subnormal scales and scale_inv are 0",
        scales=lambda own, *of: Scales(*map(_flush, own)),
    ),
    *(
        Deviation(
            f"the subnormal {kind}{'s' * (kind == 'scale')} that it returns are 0",
            scales=lambda s, *of, kind=kind: s._replace(**{kind: _flush(getattr(s, kind))}),
            codes=NO_DEVIATION,
        )
        for kind in ("scale_inv", "scale")
    ),
)
"""Scales whose subnormals are zeros, where those of x are kept (S-12)."""


def code_0_deviations(policy: ScalePolicy, last: np.float32) -> list[Deviation]:
    """Other scales beside a scale_inv of 2^-127, which is code 0 of e8m0 (S-14), or beside those up
    to ``last``, as where they are flushed.
    """
    if policy.e8m0 is None or not 2.0**-127 <= last <= 2.0**-120:
        return []
    own = np.float32(policy.e8m0.scale_of_code_0)
    at, instead = "a scale_inv of 2^-127", f", not {scale_words(own)}"
    if last > 2.0**-127:
        at, instead = f"scale_inv of at most {scale_words(last)}", ""

    def beside(value: float, least: float) -> ChangeScales:
        def scales(s: Scales, amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> Scales:
            low = (s.scale_inv <= last) & (amax >= least)
            return Scales(np.where(low, np.float32(value), s.scale)[()], s.scale_inv)

        return scales

    return [
        Deviation(f"beside {at} its scale is {words}{instead}", scales=beside(value, least))
        for value, least, words in (
            (2.0**127, 0, "2^127"),
            (2.0**126, 0, "2^126"),
            (np.inf, 0, "inf, as if code 0 were 0"),
            (np.inf, 1e-45, "inf, as if flushed to 0 (a block of zeros aside)"),
            (1.0, 0, "1 or less, so that its codes are zeros"),
        )
        if value != own or not instead
    ]


OVERFLOW = Deviation("a scale above float32's range is inf", changes={"overflow": "inf"})
"""A scale above float32's range that is infinite, under a policy with a largest scale (S-9)."""


def _quotient_alone(scales: Scales, amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> Scales:
    """scale_inv = max(amax, eps) / max, by a float64 quotient rounded once."""
    floored = np.maximum(amax.astype(np.float64), np.float64(np.float32(policy.eps)))
    return Scales(scales.scale, (floored / fmt.max).astype(np.float32))


def _nearest_power(code: Callable[[np.ndarray], np.ndarray]) -> ChangeScales:
    """scale_inv as a power of two whose e8m0 code is a function of RN32(amax / max)."""

    def scales(own: Scales, amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> Scales:
        quotient = np.asarray(_quotient_alone(own, amax, fmt, policy).scale_inv)
        codes = np.clip(np.nan_to_num(code(quotient), posinf=254), 0, 254).astype(np.uint8)
        powers = np.where(np.isnan(quotient), own.scale_inv, cast.decode(codes, E8M0FNU))
        kept = equal(powers, own.scale_inv)
        return Scales(np.where(kept, own.scale, np.float32(1) / powers)[()], powers[()])

    return scales


_NUMBERS = {
    "rounded to bfloat16": _in(BFLOAT16),
    "cut to bfloat16, not rounded": _in(BFLOAT16, "toward_zero"),
    "rounded to float16": _in(FLOAT16),
}
"""What numbers may go through, where the specification has float32."""

_KINDS = ("scale", "scale_inv")

NAMED = (
    *(
        Deviation(f"its amax is the {text}", amax=_without_abs(part))
        for text, part in (
            ("largest element, without abs", np.maximum),
            ("smallest element's magnitude, not the largest magnitude", np.minimum),
        )
    ),
    *(Deviation(f"its amax is {text}", change_amax=to) for text, to in _NUMBERS.items()),
    *(
        Deviation(f"its {kind} is {text}", scales=_change(kind, to))
        for kind in _KINDS
        for text, to in _NUMBERS.items()
    ),
    *(
        Deviation(
            f"the {kind} that it returns is {text}, and its codes are of the float32 one",
            scales=_change(kind, to),
            codes=NO_DEVIATION,
        )
        for kind in _KINDS
        for text, to in _NUMBERS.items()
    ),
    *(
        Deviation(f"x is rounded to {fmt} before its amax", change_x=_in(fmt))
        for fmt in (BFLOAT16, FLOAT16)
    ),
    *(
        Deviation(text, scales=to)
        for text, to in (
            ("its scale_inv is amax / max, not the reciprocal of the scale", _quotient_alone),
            ("its scale is rounded up to a power of two, not down", _power_of_two(np.ceil)),
            ("its scale is rounded to the nearest power of two, by log2", _power_of_two(np.rint)),
        )
    ),
)
"""The mistakes that have a name and no number, for every policy."""

_POWERS = {
    "the nearest power of two": lambda q: (q.view(np.uint32) + np.uint32(0x400000)) >> 23,
    "the nearest power of two, by log2": lambda q: np.rint(np.log2(q)) + 127,
    "a power of two, rounded down": lambda q: q.view(np.uint32) >> 23,
}

_FIELDS: dict[str, dict[Any, str]] = dict(package_data.tables(__file__, "deviations"))
_FIELDS["power_of_two"] = {None: "its scales are no powers of two"}
_FIELDS["power_of_two"] |= {
    by: f"its scales are powers of two, by {by}" for by in get_args(PowerOfTwo)
}
"""Other values of a policy's fields, in words."""


def named(policy: ScalePolicy) -> list[Deviation]:
    """``NAMED``, other values of the policy's fields, and other powers of two of an e8m0 one."""
    others, ratios = [*NAMED], _FIELDS["ratio"]
    # of an inverse of its own the scale alone would be a power of two
    fields = _FIELDS if policy.inverse == "reciprocal" else {"stored": _FIELDS["stored"]}
    for field_name, values in fields.items():
        own = getattr(policy, field_name)
        for value, text in values.items():
            with contextlib.suppress(ValueError):  # a value that the other fields contradict
                if value != own and dataclasses.replace(policy, **{field_name: value}):
                    instead = f", not {ratios[own].split(' is ')[1]}" if own in ratios else ""
                    others.append(Deviation(text + instead, changes={field_name: value}))
    if policy.e8m0 is not None:
        others += [
            Deviation(f"its scale_inv is amax / max as {text}", scales=_nearest_power(code))
            for text, code in _POWERS.items()
        ]
    return others


def other_codes(policy: ScalePolicy) -> list[Deviation]:
    """Codes that are made otherwise than by the scales that are returned."""
    fields_first = sorted(named(policy), key=lambda d: not d.changes)
    others = {d.text: d for d in (*fields_first, *FLUSHES)}
    for other in POLICIES.values():
        changed = {f.name: getattr(other, f.name) for f in dataclasses.fields(other)}
        others[f"by {other.name}"] = Deviation("", changes=changed)
    return [
        d
        if "stored" in d.changes and len(d.changes) == 1
        else Deviation(f"its codes are made by other scales than it returns, as if {text}", codes=d)
        for text, d in others.items()
    ]
