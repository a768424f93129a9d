"""What a GEMM takes codes for: numbers, subnormals, NaN, Inf; each product of two alone."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.gemm.grade.stimuli import Stimulus
from fp8ref.conformance.gemm.grade.structure import Cause, first_of
from fp8ref.conformance.kit.arrays import equal
from fp8ref.formats import FLOAT16, FP8_FORMATS, Format
from fp8ref.sim.quantize import cast


class Reading(NamedTuple):
    """What codes are taken for: in words, and the numbers of all codes, in their order."""

    name: str
    table: np.ndarray


def readings(fmt: Format) -> Iterator[Reading]:
    """Readings of a format's codes that are tried, first the right one."""
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    right = cast.decode(codes, fmt)
    yield Reading("", right)
    small = (np.abs(right) < fmt.smallest_normal) & np.isfinite(right)
    yield Reading("subnormal codes of {} are taken for 0", np.where(small, np.float32(0), right))
    counted = _numbers(fmt, codes)
    yield Reading("NaN and infinities of {} are taken for numbers", counted)
    yield Reading("NaN of {} is taken for 0", np.where(np.isnan(right), np.float32(0), right))
    yield Reading("the sign of {} is ignored", np.abs(right))
    for other in FP8_FORMATS.values():
        if other != fmt:
            yield Reading(f"codes of {{}} are read as {other}", cast.decode(codes, other))


RANGE = "products outside of float16's range are lost"
"""The name of a cause that a float16 accumulator or output has; how it rounds may be known better.
"""


def judge(samples: list[tuple[Stimulus, np.ndarray]], out: Format) -> Cause | None:
    """The cause if products of codes are wrong: two readings, RANGE, or what is seen."""
    kinds = [
        [(name.format(who), table) for name, table in readings(fmt)]
        for who, fmt in zip("ab", (samples[0][0].a.fmt, samples[0][0].b.fmt), strict=True)
    ]
    right = kinds[0][0][1], kinds[1][0][1]
    wrong = [(s, results, _products(s, *right, out)) for s, results in samples]
    wrong = [(s, f, g) for s, f, g in wrong if not np.array_equal(f, g, equal_nan=True)]
    if not wrong:
        return None
    stimulus, results, expected = wrong[0]
    differ = ~equal(results, expected)
    count = sum(int((~equal(f, g)).sum()) for _, f, g in wrong)
    evidence = f"{count} of {sum(f.size for _, f in samples)} products of two codes differ"
    name = "products of codes"
    pairs = sorted(itertools.product(*kinds), key=lambda pair: sum(bool(one[0]) for one in pair))
    for (name_a, table_a), (name_b, table_b) in pairs:
        read = ((_products(s, table_a, table_b, out), f) for s, f in samples)
        if all(np.array_equal(g, f, equal_nan=True) for g, f in read):
            name = ", and ".join(part for part in (name_a, name_b) if part)
            evidence = f"all products have the bits of it; {evidence}"
            break
    else:
        name = RANGE
        if not all(_out_of_range(f, g) for _, f, g in wrong):
            name = _seen(stimulus, differ)
    return Cause(name, evidence, "wrong", first_of(stimulus, results, expected, differ, "G-6"))


def _products(s: Stimulus, table_a: np.ndarray, table_b: np.ndarray, out: Format) -> np.ndarray:
    with np.errstate(all="ignore"):
        products = np.outer(table_a[s.a.codes[:, 0]], table_b[s.b.codes[:, 0]])
        return cast.round_to(products, out) + np.float32(0)


def _out_of_range(results: np.ndarray, expected: np.ndarray) -> bool:
    """Whether results are wrong only where float16 has no normal number."""
    differ = ~equal(results, expected)
    size = np.abs(expected[differ])
    outside = (size > FLOAT16.max) | (size < FLOAT16.smallest_normal)
    return bool((np.isfinite(size) & outside).all())


def _numbers(fmt: Format, codes: np.ndarray) -> np.ndarray:
    """Codes as numbers, as if none were special."""
    field = (codes & (fmt.sign_bit - 1)) >> fmt.mantissa_bits
    mantissa = codes & ((1 << fmt.mantissa_bits) - 1)
    normal = (1 + mantissa / 2.0**fmt.mantissa_bits) * 2.0 ** (field.astype(np.float64) - fmt.bias)
    value = np.where(field == 0, mantissa * fmt.smallest_subnormal, normal)
    return np.where(codes & fmt.sign_bit, -value, value).astype(np.float32)


def _seen(s: Stimulus, differ: np.ndarray) -> str:
    i, j = np.argwhere(differ)[0]
    return (
        f"the product of code 0x{int(s.a.codes[i, 0]):02X} of a and code "
        f"0x{int(s.b.codes[j, 0]):02X} of b"
    )
