"""What codes are taken for: tables of numbers that a wrong decoder, or a wrong GEMM, reads."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.kit.arrays import same_bits
from fp8ref.formats import FORMATS, Format
from fp8ref.sim.quantize import cast


class Reading(NamedTuple):
    """What some codes are taken for.

    name    in words, with {} for the format.
    table   the numbers of all codes, in their order, float32.
    codes   which codes the name speaks of, bool.
    """

    name: str
    table: np.ndarray
    codes: np.ndarray


def numbers(fmt: Format) -> np.ndarray:
    """Codes as numbers, as if none were special, float32."""
    codes = np.arange(1 << fmt.bits)
    field = (codes & (fmt.sign_bit - 1 if fmt.signed else -1)) >> fmt.mantissa_bits
    mantissa = codes & ((1 << fmt.mantissa_bits) - 1)
    with np.errstate(over="ignore"):
        normal = (1 + mantissa / 2.0**fmt.mantissa_bits) * 2.0 ** (field - float(fmt.bias))
        low = mantissa * fmt.smallest_subnormal if fmt.signed else normal
        value = np.where(field == 0, low, normal)
        return np.where(codes & fmt.sign_bit, -value, value).astype(np.float32)


def right_numbers(fmt: Format) -> np.ndarray:
    """The number of each code, float32 (F-1)."""
    return cast.decode(np.arange(1 << fmt.bits, dtype=np.uint8), fmt)


def readings(fmt: Format) -> Iterator[Reading]:
    """Wrong readings that are tried, those of all codes first."""
    codes = np.arange(1 << fmt.bits)
    right, counted = right_numbers(fmt), numbers(fmt)
    every, sign = np.ones(codes.shape, bool), np.where(codes & fmt.sign_bit, -1, 1)
    for other in FORMATS.values():
        if other.bits == fmt.bits and other != fmt:
            yield Reading(f"codes of {{}} are read as {other}", right_numbers(other), every)
    if fmt.signed:
        yield Reading("the sign of {} is ignored", np.abs(right), every)
        yield Reading("the sign of {} is inverted", -right, every)
    signed = ((codes ^ fmt.sign_bit) - fmt.sign_bit).astype(np.float32)
    yield Reading("codes of {} are read as integers", codes.astype(np.float32), every)
    yield Reading("codes of {} are read as signed integers", signed, every)
    small = (np.abs(right) < fmt.smallest_normal) & np.isfinite(right)
    zero, zeros = right == 0, np.zeros_like(right)
    mantissa = (codes & ((1 << fmt.mantissa_bits) - 1)) / 2.0**fmt.mantissa_bits
    one = (sign * (1 + mantissa) * 2.0**-fmt.bias).astype(np.float32)
    small_codes = "subnormal codes of {}"
    words = small_codes + " are "
    yield Reading(words + "taken for 0", np.copysign(zeros, right), small & ~zero)
    yield Reading(words + "taken for +0", zeros, small & ~zero)
    yield Reading(small_codes + " and zero are read as normal numbers", one, small)
    yield Reading(words + "read as normal numbers", one, small & ~zero)
    for factor, times in ((2.0, "twice"), (0.5, "half")):
        with np.errstate(over="ignore"):
            table = right * np.float32(factor)
        yield Reading(f"{words}{times} what they are", table, small & ~zero)
    yield Reading("-0 of {} is taken for +0", zeros, zero & (codes != 0))
    yield Reading("-0 of {} is taken for NaN", zeros * np.nan, zero & (codes != 0))
    kinds = (("NaN", np.isnan(right)), ("infinities", np.isinf(right)))
    both = np.isnan(right) | np.isinf(right)
    if np.isinf(right).any():
        yield Reading("NaN and infinities of {} are taken for numbers", counted, both)
    largest = np.where(sign < 0, -fmt.max, fmt.max).astype(np.float32)
    infinite = (sign * np.inf).astype(np.float32)
    for name, special in kinds:
        verb = "is" if name == "NaN" else "are"
        if np.isfinite(counted[special]).all():
            yield Reading(f"{name} of {{}} {verb} taken for numbers", counted, special)
        yield Reading(f"{name} of {{}} {verb} taken for 0", zeros, special)
        yield Reading(f"{name} of {{}} {verb} taken for the largest number", largest, special)
    yield Reading("NaN of {} is taken for infinity", np.abs(infinite), np.isnan(right))
    yield Reading("NaN of {} is taken for infinity of its sign", infinite, np.isnan(right))
    yield Reading("infinities of {} are taken for NaN", zeros * np.nan, np.isinf(right))
    top = np.abs(counted) >= 2.0 ** np.floor(np.log2(np.max(np.abs(counted[np.isfinite(counted)]))))
    ieee = np.where((codes & ((1 << fmt.mantissa_bits) - 1)) == 0, infinite, np.float32(np.nan))
    if fmt.nan in ("top_code", None) and fmt.signed:
        yield Reading("the largest exponent of {} is read as infinities and NaN", ieee, top)
        yield Reading("the largest exponent of {} is read as NaN", zeros * np.nan, top)
    if not fmt.signed:
        with np.errstate(over="ignore"):
            for bits in (8, 6, 5):  # of a shift count, whose last bit may be a sign
                count = codes & ((1 << bits) - 1)
                power = np.exp2(count.astype(np.float64)).astype(np.float32)
                for table in (power, np.where(count == (1 << bits) - 1, -power, power)):
                    yield Reading("{} is read as a power of two without its bias", table, every)
        yield Reading("code 0 of {} is taken for 0", zeros, codes == 0)


def names(table: np.ndarray, fmt: Format) -> tuple[list[str], np.ndarray]:
    """(readings that together explain the numbers found for all codes, the codes left, bool).

    A factor of all numbers, as of another bias, is one of them.
    """
    right = right_numbers(fmt)
    left = ~same_bits(table, right)
    if not left.any():
        return [], left
    wrong = list(readings(fmt))
    whole = any(r.codes.all() and same_bits(table, r.table).all() for r in wrong)
    explained, factor = list[str](), 1.0 if whole else _factor(table, right)
    if factor != 1:
        explained = [f"numbers of {fmt} are {factor:g} times what they are"]
        table = table / np.float32(factor)
        left = ~same_bits(table, right)
    for reading in wrong:
        same = same_bits(table, reading.table)
        if (left & reading.codes).any() and same[reading.codes].all():
            explained.append(reading.name.format(fmt))
            left = left & ~reading.codes
    return explained, left


def _factor(table: np.ndarray, right: np.ndarray) -> float:
    """The factor of more than half of the numbers; 1 without one."""
    with np.errstate(all="ignore"):
        ratios = (table / right)[np.isfinite(right) & (right != 0)]
    factor = float(np.median(ratios))
    common = np.isfinite(factor) and factor > 0 and (ratios == factor).mean() > 0.5
    return factor if common else 1.0
