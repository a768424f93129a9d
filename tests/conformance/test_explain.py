"""Kinds of inputs, against their definitions in exact fractions; the simplest of several."""

from fractions import Fraction

import numpy as np
import pytest

from fp8ref.conformance import explain
from fp8ref.conformance.inputs import dtypes
from fp8ref.conformance.vectors.cast import Cast
from fp8ref.conformance.vectors.scale import Scale
from fp8ref.formats import E8M0FNU, FP8_FORMATS
from fp8ref.policy import POLICIES
from fp8ref.sim import cast


def kind(x: float, spacing: Fraction, fmt, numbers: list[Fraction], ties: list[Fraction]) -> str:
    """What decides a cast of x, which is finite, by the format's positive numbers and ties."""
    magnitude = abs(Fraction(x))
    if magnitude == 0:
        return "zero"
    if x < 0 and not fmt.signed:
        return "negative"
    if magnitude > numbers[-1]:
        return "above max"
    if magnitude in numbers:
        return "number"
    if magnitude in ties:
        return "tie"
    if min(abs(magnitude - tie) for tie in ties) <= spacing:
        return "beside a tie"
    least = Fraction(fmt.smallest_subnormal)
    return "underflow" if magnitude < least / 2 else "subnormal" if magnitude < Fraction(fmt.smallest_normal) else "in range"


@pytest.mark.parametrize("fmt", [*FP8_FORMATS.values(), E8M0FNU], ids=str)
@pytest.mark.parametrize("source", dtypes.SOURCES)
def test_kinds_of_casts(fmt, source):
    question, of = Cast(format=fmt.name, source=source, count=300), dtypes.by_name(source)
    values = cast.decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt).astype(np.float64)
    numbers = [Fraction(v) for v in values if v > 0]
    below = Fraction(0) if fmt.signed else numbers[0] / 2  # half of e8m0's smallest number is a tie to nothing
    ties = [(a + b) / 2 for a, b in zip([below, *numbers], numbers, strict=False)]
    bits = question.inputs()[:: 1 if fmt.signed else 7]
    x, found = dtypes.values(bits, of), question.kinds(bits)
    with np.errstate(invalid="ignore"):
        finite = np.where(np.isfinite(x), x, 1)
    for value, step, k in zip(cast.exact(x), dtypes.spacing(finite, of), found, strict=True):
        if not np.isfinite(value):
            assert explain.CASTS[k] == ("NaN" if np.isnan(value) else "infinite")
        elif fmt.signed or abs(value) >= fmt.smallest_normal or value <= 0:
            assert explain.CASTS[k] == kind(float(value), Fraction(float(step)), fmt, numbers, ties), value


def test_a_spacing_is_that_of_numpy():
    x = np.float32([1, 1.5, 2, 3e38, 1e-40, 0, 2.0**-126])
    np.testing.assert_array_equal(dtypes.spacing(x, dtypes.by_name("float32")), np.spacing(x).astype(np.float64))


@pytest.mark.parametrize("policy", ["torchao", "te_current", "mx_rceil"])
def test_kinds_of_amaxes(policy):
    question = Scale(format="e4m3fn", policy=policy, count=400)
    bits = question.inputs()
    amax, kinds = bits.astype(np.uint32).view(np.float32), np.array(explain.SCALES)[question.kinds(bits)]
    finite = np.isfinite(amax) & (amax > 0)
    named = dict(zip(amax[finite].tolist(), kinds[finite].tolist(), strict=True))
    assert named[1.0] == "power of two"
    assert named[float(np.nextafter(np.float32(1), np.float32(2)))] == "beside a power of two"
    assert named[float(np.nextafter(np.float32(1), np.float32(0)))] == "beside a power of two"
    assert named[7.0] == "max times a power of two"
    assert named[float(np.nextafter(np.float32(7), np.float32(8)))] == "beside max times a power of two"
    eps = POLICIES[policy].eps
    assert {k for v, k in named.items() if v < eps} == ({"below eps"} if eps else set())
    assert {k for v, k in named.items() if eps <= v < 2.0**-126} == (set() if eps else {"subnormal"})
    assert set(kinds[amax == 0]) == {"zero"}
    assert set(kinds[np.isinf(amax)]) == {"infinite"}
    assert set(kinds[np.isnan(amax)]) == {"NaN"}
    assert {"in range"} <= set(kinds)


def test_the_simplest_comes_first():
    x = np.float32([np.nan, np.inf, 3.14159, -1.0, 1.0, 2.0, 0.0, 1.5, -0.0, 1e30, 2.0**60])
    ordered = x[explain.simplicity(x)]
    expected = np.float32([0.0, -0.0, 1.0, -1.0, 2.0, 2.0**60, 1.5, 3.14159, 1e30, np.inf, np.nan])
    np.testing.assert_array_equal(ordered, expected)
    assert explain.simplest(x, np.isin(x, [3.14159, 2.0**60])) == 10


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1"), (np.float32(0.1), "0.1"), (np.nan, "NaN"), (-np.inf, "-inf"), (-0.0, "-0"), (2.0**70, "1.1805916207174113e+21")],
)
def test_decimals(value, text):
    assert explain.decimal(value) == text
