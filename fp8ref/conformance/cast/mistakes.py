"""Mistakes of casts that no choice of rounding and overflow explains, found by their codes.

A mistake is a cast of its own. It explains a function if it gives its codes for every finite number
asked; where a number is in it, such as how many fraction bits are read, all numbers are tried.
"""

from collections.abc import Iterator

import numpy as np

from fp8ref.conformance.cast.outputs import Responses
from fp8ref.conformance.kit.finding import show
from fp8ref.formats import Format
from fp8ref.sim.quantize import cast


def name(a: Responses) -> str:
    """The mistake that explains all codes of finite numbers, in words; "" if none does, or if all
    are right."""
    finite = np.isfinite(a.x)
    x, codes = a.x[finite].astype(np.float64), a.codes[finite]
    if np.array_equal(cast.encode(x, a.fmt).astype(np.int64), codes):
        return ""
    for words, expected in _mistakes(x, codes, a.fmt):
        if np.array_equal(expected.astype(np.int64), codes):
            return words
    return ""


def _mistakes(x: np.ndarray, codes: np.ndarray, fmt: Format) -> Iterator[tuple[str, np.ndarray]]:
    """(words, the codes of x by that mistake)."""
    right = cast.encode(x, fmt).astype(np.int64)
    number = np.abs(cast.decode(right.astype(np.uint8), fmt)).astype(np.float64)
    magnitude = np.abs(x)
    over = magnitude > fmt.max
    small = magnitude < fmt.smallest_normal
    for bits in range(fmt.mantissa_bits + 1, 23):
        roundings = {"toward_zero": "are read", "nearest_even": "are kept first"}
        for rounding, verb in roundings.items():
            words = f"only {bits} fraction bits of a number {verb}, whatever follows"
            fewer = cast.encode(_to_bits(x, bits, rounding), fmt)
            yield words, fewer
            yield f"{words}, of normal results", np.where(small, right, fewer)
    twice = cast.encode(_to_bits(x, fmt.mantissa_bits, "nearest_even"), fmt)
    yield "subnormal results are rounded twice, first as if they were normal", twice
    for rounding in ("toward_zero", "nearest_away", "to_odd"):
        other = cast.encode(x, fmt, rounding=rounding)  # type: ignore[arg-type]
        yield f"subnormal results are rounded {rounding}", np.where(small, other, right)
    exponent = np.frexp(np.where(magnitude > 0, magnitude, 1.0))[1] - 1
    carried = (number >= np.exp2(exponent + 1.0)) & (magnitude >= fmt.smallest_normal) & ~over
    low = cast.encode(np.copysign(np.exp2(exponent.astype(np.float64)), x), fmt)
    lost_carry = np.where(carried, low, right)
    yield "the carry of a mantissa that rounds up to 2 is lost", lost_carry
    for bit in range(fmt.mantissa_bits + 1):
        where = "last" if bit == 0 else f"{bit + 1}th last"
        cleared = np.where(over, codes, right & ~(1 << bit))
        yield f"the {where} bit of codes is cleared", cleared
    signs = np.where(np.signbit(x), fmt.sign_bit, 0)
    for code in dict.fromkeys(codes[over & (x > 0)][:1].tolist()):  # of a number above max, if any
        for early in (np.int64(code), code & ~fmt.sign_bit | signs):
            yield "overflow is decided before rounding", np.where(over, early, right)
    yield from _bounds(x, codes, fmt)
    unit = fmt.smallest_normal * 2.0**-23  # of a float32 whose exponent is that of the format
    without_bits = np.trunc(x / unit) * unit
    for lost, shifted in (("", x), (", and bits shifted out are lost", without_bits)):
        for factor, words in ((1.0, "as large as"), (0.5, "half"), (2.0, "twice")):
            scaled = np.where(small, cast.encode(shifted * factor, fmt), right)
            yield f"subnormal results are {words} what they are{lost}", scaled
    if fmt.nan == "negative_zero":
        lost = (x < 0) | ((x == 0) & np.signbit(x))
        yield (
            "negative numbers that round to 0 become NaN",
            np.where(lost & (right == 0), fmt.sign_bit, right),
        )
    yield from _directed(x, fmt)


def _to_bits(x: np.ndarray, bits: int, rounding: str) -> np.ndarray:
    """x rounded to so many fraction bits, of any exponent."""
    fraction, exponent = np.frexp(x)
    scaled = np.ldexp(fraction, bits + 1)
    whole = np.trunc(scaled) if rounding == "toward_zero" else np.rint(scaled)
    return np.ldexp(whole, exponent - bits - 1)


def _bounds(x: np.ndarray, codes: np.ndarray, fmt: Format) -> Iterator[tuple[str, np.ndarray]]:
    """A smaller bound than the format's max, the largest number that any code has."""
    values = np.abs(cast.decode(codes[codes >= 0].astype(np.uint8), fmt))
    bound = float(np.max(values[np.isfinite(values)], initial=0))
    if 0 < bound < fmt.max:
        words = f"numbers are clipped to {show(bound)}, not {show(fmt.max)}"
        yield words, cast.encode(np.clip(x, -bound, bound), fmt)


def _directed(x: np.ndarray, fmt: Format) -> Iterator[tuple[str, np.ndarray]]:
    """Roundings that C-2 does not have: by the sign, away from zero, and other ties."""
    toward = cast.encode(x, fmt, rounding="toward_zero").astype(np.int64)
    inside = np.abs(cast.decode(toward.astype(np.uint8), fmt)).astype(np.float64)
    exact = inside == np.abs(x)
    signs = np.where(np.signbit(x), fmt.sign_bit, 0)
    outward = signs | np.minimum((toward & ~fmt.sign_bit) + 1, fmt.max_code)
    away = np.where(exact, toward, outward)
    outside = np.abs(cast.decode(away.astype(np.uint8), fmt)).astype(np.float64)
    negative = np.signbit(x)
    yield "it rounds up, toward infinity", np.where(negative, toward, away)
    yield "it rounds down, toward minus infinity", np.where(negative, away, toward)
    yield "it rounds away from zero", away
    nearest = np.where(outside - np.abs(x) < np.abs(x) - inside, away, toward)
    tie = (outside - np.abs(x) == np.abs(x) - inside) & ~exact
    yield "ties go toward zero", nearest
    yield "ties go up, toward infinity", np.where(tie & ~negative, away, nearest)
    yield "ties go down, toward minus infinity", np.where(tie & negative, away, nearest)
    odd = np.where(toward & 1, toward, away)
    yield "ties go to the odd code", np.where(tie, odd, nearest)
