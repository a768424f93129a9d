"""Explain a cast's code or a policy's scale: the rule and the clause that decide it."""

from dataclasses import dataclass, replace

import numpy as np

from fp8ref import policy as policies
from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32, Format
from fp8ref.policy import ScalePolicy
from fp8ref.shared.errors import one_of, require
from fp8ref.sim.quantize import cast

_ROUNDS = {
    "nearest_even": "to the nearest number, and of two to the one with the even code",
    "nearest_away": "to the nearest number, and of two to the larger magnitude",
    "toward_zero": "to the next number toward zero",
    "to_odd": "to itself where it is a number, else to the neighbor with the odd code",
}

ROUNDINGS = tuple(_ROUNDS)
"""The roundings that give each input one code: all of C-2 but ``stochastic``."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a cast is judged; not stochastic rounding, which has several right answers to an input.
    ValueError for unknown rounding.
    """

    rounding: str = "nearest_even"
    saturate: bool = True

    def __post_init__(self) -> None:
        one_of("a rounding that gives each input one code", self.rounding, ROUNDINGS)
        text = f"saturate is True or False; got {self.saturate!r}."
        require(isinstance(self.saturate, bool | np.bool_), text)

    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray:
        """The specified codes. Few elements are cast by the definition, which compiles nothing:
        tests of many examples have deadlines.
        """
        encode = cast.encode_plain if np.size(x) <= 1 << 16 else cast.encode
        return encode(x, fmt, rounding=self.rounding, saturate=self.saturate)  # type: ignore[arg-type]

    def differ(self, x: np.ndarray, codes: np.ndarray, fmt: Format) -> np.ndarray:
        """Where codes are not those specified. All NaN codes count as equal (C-5); any code of a
        NaN does in a format without NaN (C-9).
        """
        return (cast.canonical_nans(codes, fmt) != self.encode(x, fmt)) & has_code(x, fmt)

    def rule(self, kind: str, fmt: Format) -> str:
        """The rule, and its clause, that decides the code of an input of one of ``kinds.CASTS``."""
        if kind == "NaN":
            return f"NaN becomes 0x{fmt.nan_code:02X} (C-5)"
        if not fmt.signed and kind in ("zero", "negative"):
            return f"zero and negative values have no code in {fmt}: NaN (C-7)"
        if kind in ("infinite", "above max"):
            return self._rule_above_max(kind, fmt)
        if not fmt.signed:
            return (
                "to the nearest power of two, halfway upwards, and no lower than "
                f"{fmt.smallest_normal:g} (C-7)"
            )
        positive = not fmt.negative_zero
        if kind == "zero":
            return (
                f"both zeros become +0 in {fmt} (C-6)" if positive else "zero keeps its sign (C-6)"
            )
        if kind == "number":
            return "a number of the format is its own code (C-1)"
        sentence = f"rounded once, {_ROUNDS[self.rounding]} (C-1, C-2)"
        if kind == "underflow":
            sentence += f"; an underflow {'is +0' if positive else 'keeps its sign'} (C-6)"
        if kind == "subnormal":
            sentence += f"; numbers below {fmt.smallest_normal:g} are subnormal, and kept (F-1)"
        return sentence

    def _rule_above_max(self, kind: str, fmt: Format) -> str:
        if kind == "above max" and self.rounding in ("toward_zero", "to_odd"):
            return (
                f"rounding {self.rounding} keeps finite values at max, 0x{fmt.max_code:02X}, or "
                "below (C-4)"
            )
        if self.saturate:
            return f"saturating, a value that rounds above max, {fmt.max:g}, becomes max (C-3)"
        over = "Inf" if fmt.inf_code is not None else "NaN"
        return f"not saturating, a value that rounds above max, {fmt.max:g}, becomes {over} (C-4)"

    def guess(self, x: np.ndarray, codes: np.ndarray, fmt: Format) -> list[str]:
        """Other rules that give exactly the codes found for x, by name, the likeliest first."""
        expected = self.encode(x, fmt)
        others = {
            f"rounding {other}": replace(self, rounding=other).encode(x, fmt)
            for other in (ROUNDINGS if fmt.signed else ("nearest_even", "toward_zero"))
            if other != self.rounding
        }
        if fmt.has_nan:
            name = "not saturating" if self.saturate else "saturating"
            others[name] = replace(self, saturate=not self.saturate).encode(x, fmt)
        others |= {
            f"rounding to {first} first": self.encode(cast.round_to(x, first), fmt)
            for first in (BFLOAT16, FLOAT16, FLOAT32)
        }
        if fmt.signed:
            magnitude = expected & ~np.uint8(fmt.sign_bit)
            sign = expected & np.uint8(fmt.sign_bit)
            subnormal = (magnitude > 0) & (magnitude < 1 << fmt.mantissa_bits)
            others["flushing subnormals to zero"] = np.where(subnormal, sign, expected)
            others["flushing subnormals to +0"] = np.where(subnormal, 0, expected)
            others["losing the sign"] = magnitude
            others["losing the sign of zero"] = np.where(magnitude == 0, 0, expected)
            others["negating"] = expected ^ np.uint8(fmt.sign_bit)
        others["NaN"] = np.full_like(expected, fmt.nan_code)
        others["zero"] = np.zeros_like(expected)
        codes = cast.canonical_nans(codes, fmt)
        return [
            name
            for name, other in others.items()
            if np.array_equal(cast.canonical_nans(other.astype(np.uint8), fmt), codes)
        ]

    def note(self, x: np.ndarray, codes: np.ndarray, fmt: Format) -> str:
        """A sentence: which other rule gives all codes found, or all wrong ones; '' if none."""
        x, codes = np.atleast_1d(x), np.atleast_1d(codes)
        wrong = self.differ(x, codes, fmt)
        for which, what in ((slice(None), "All codes are"), (wrong, "All that differ are")):
            if guess := self.guess(x[which], codes[which], fmt):
                return f"{what} what {' or '.join(guess)} gives."
        return ""


def has_code(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Where a cast of x to fmt has a right code: not at a NaN, if fmt has no NaN (C-9)."""
    return np.full(np.shape(x), True) if fmt.has_nan else ~np.isnan(cast.exact(x))


def simplicity(x: np.ndarray) -> np.ndarray:
    """Flat indices of x, the simplest values first.

    Order:    finite, infinities, NaNs; zeros first, then significant bits, nearness to 1, sign.
    """
    value = cast.exact(x).reshape(-1)
    finite = np.isfinite(value)
    fraction, exponent = np.frexp(np.where(finite, value, 1.0))
    whole = np.ldexp(np.abs(fraction), 53).astype(np.int64)
    # whole & -whole is the lowest set bit: the bits from it up to the 53rd are significant
    significant = (
        53 - np.log2(np.where(whole == 0, 1, whole & -whole)) * (whole != 0) - 53 * (whole == 0)
    )
    return np.lexsort(
        (np.signbit(value), np.abs(exponent - 1), significant, np.isnan(value), ~finite)
    )


def simplest(x: np.ndarray, among: np.ndarray) -> int:
    """The flat index of the simplest value of x among those where ``among`` is true."""
    places = np.flatnonzero(among)
    return int(places[simplicity(x.reshape(-1)[places])[0]])


def code(value: int, fmt: Format) -> str:
    """A code and its value.

    >>> from fp8ref.formats import E4M3FN
    >>> code(0x7E, E4M3FN)
    '0x7E (448)'
    """
    return f"0x{value:02X} ({decimal(cast.decode(np.uint8(value), fmt))})"


def decimal(value) -> str:
    """The shortest decimal that tells a value from its neighbors in its dtype."""
    value = np.asarray(value)[()]
    if np.isnan(value):
        return "NaN"
    text = str(value)
    return text[:-2] if text.endswith(".0") else text


def scale_rule(kind: str, policy: str | ScalePolicy) -> str:
    """The rule, with its clause, that decides an amax's scale, by ``kinds.AMAXES``."""
    policy = policies.by_name(policy)
    if policy.two_level is not None:
        whose = {"tensorwise": "the tensor's", "rowwise": "the row's"}[
            policy.two_level.tensor_granularity
        ]
        formula = {
            "encode": f"RN32(amax * RN32(S * RN32(1/6))) in e4m3fn, S = RN32(2688 / {whose} amax)",
            "decode": "RN32(RN32(amax / 6) / T) in e4m3fn, T = RN32(the tensor's amax / 2688)",
            "none": "RN32(amax / 6) in e4m3fn",
        }[policy.two_level.tensor]
        floor = ""
        if policy.two_level.error:
            limit = 6 * policy.two_level.largest
            formula = "RN32(RN32(amax / 6) * S) or RN32(1.5 of it) in e4m3fn, "
            formula += f"S = RN32({limit} / {whose} amax)"
        if policy.two_level.smallest:
            floor = f", at least {policy.two_level.smallest:g}"
        return f"policy {policy.name}: scale_inv of a block = {formula}{floor} ({policy.clause})"
    if policy.e8m0 is not None:
        return f"policy {policy.name}: an e8m0 scale_inv, 2^k ({policy.clause})"
    if policy.makes_scale_inv:
        ratio = "RN32(amax / max)"
        if policy.ratio == "amax*(1/max)":
            ratio = "RN32(amax * RN32(1 / max))"
        floor = f", amax at least {policy.eps:g}" if policy.eps else ""
        floor += f", 1 below {policy.one_below:g}" if policy.one_below else ""
        floor += f", times {policy.factor:.6g}" if policy.factor != 1 else ""
        floor += f", in {policy.scale_dtype}" if policy.scale_dtype.name != "float32" else ""
        if policy.power_of_two:
            floor += f", then a power of two by {policy.power_of_two}"
        return (
            f"policy {policy.name}: scale_inv = {ratio}{floor}, and scale = RN32(1 / "
            f"scale_inv) ({policy.clause})"
        )
    special = {"NaN": policy.nan, "infinite": policy.infinite, "zero": policy.zero}.get(
        kind, "compute"
    )
    if special == "compute" or (kind == "zero" and policy.eps):
        sentence = (
            f"policy {policy.name}: "
            f"RN32({'max * RN32(1 / amax)' if policy.ratio == 'max*(1/amax)' else 'max / amax'})"
        )
        sentence += f", amax at least {policy.eps:g}" if policy.eps else ""
        if policy.power_of_two:
            sentence += f", then the power of two, by {policy.power_of_two} (S-4)"
        clause = "S-15" if policy.clause == "S-15" else "S-9"
        clause = "S-3" if policy.floored_quotient else clause
        return f"{sentence} ({clause}{', S-12' if kind == 'subnormal' else ''})"
    kept = {
        "one": "scale 1",
        "keep": "the previous scale, here 1",
        "keep_inverse": "the inverse of the previous scale, here 1",
    }[special]
    return (
        f"policy {policy.name} gives {kept} for such an amax "
        f"(S-9{'' if special == 'one' else ', S-11'})"
    )
