"""Kinds of inputs, against their definitions in exact fractions, and their clauses, against the
rules that are given for them.
"""

import re
from fractions import Fraction

import numpy as np
import pytest

from fp8ref.conformance.inputs import dtypes, kinds
from fp8ref.conformance.kit import explain
from fp8ref.conformance.vectors.cast import Cast
from fp8ref.conformance.vectors.scale import Scale
from fp8ref.formats import E8M0FNU, FP8_FORMATS
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize import cast

# the clauses that state the formula of some policy
FORMULA = {f"S-{n}" for n in (3, 4, 9, 14, 15, 17, 20)}


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
        return "next to a tie"
    least = Fraction(fmt.smallest_subnormal)
    return (
        "underflow"
        if magnitude < least / 2
        else "subnormal"
        if magnitude < Fraction(fmt.smallest_normal)
        else "in range"
    )


@pytest.mark.grid(2)
@pytest.mark.parametrize("fmt", [*FP8_FORMATS.values(), E8M0FNU], ids=str)
@pytest.mark.parametrize("source", dtypes.SOURCES)
def test_kinds_of_casts(fmt, source):
    question, of = Cast(format=fmt.name, source=source, count=300), dtypes.by_name(source)
    values = cast.decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt).astype(np.float64)
    numbers = [Fraction(v) for v in values if v > 0]
    # half of e8m0's smallest number is a tie to nothing
    below = Fraction(0) if fmt.signed else numbers[0] / 2
    ties = [(a + b) / 2 for a, b in zip([below, *numbers], numbers, strict=False)]
    bits = question.inputs()[:: 1 if fmt.signed else 7]
    x, found = dtypes.values(bits, of), question.kinds(bits)
    with np.errstate(invalid="ignore"):
        finite = np.where(np.isfinite(x), x, 1)
    for value, step, k in zip(cast.exact(x), dtypes.spacing(finite, of), found, strict=True):
        if not np.isfinite(value):
            assert kinds.CASTS[k] == ("NaN" if np.isnan(value) else "infinite")
        elif fmt.signed or abs(value) >= fmt.smallest_normal or value <= 0:
            assert kinds.CASTS[k] == kind(
                float(value), Fraction(float(step)), fmt, numbers, ties
            ), value


@pytest.mark.parametrize("policy", ["torchao", "te_current", "mx_rceil"])
def test_kinds_of_amaxes(policy):
    question = Scale(format="e4m3fn", policy=policy, count=400)
    bits = question.inputs()
    amax, names = (
        bits.astype(np.uint32).view(np.float32),
        np.array(kinds.AMAXES)[question.kinds(bits)],
    )
    finite = np.isfinite(amax) & (amax > 0)
    named = dict(zip(amax[finite].tolist(), names[finite].tolist(), strict=True))
    assert named[1.0] == "power of two"
    assert named[float(np.nextafter(np.float32(1), np.float32(2)))] == "next to a power of two"
    assert named[float(np.nextafter(np.float32(1), np.float32(0)))] == "next to a power of two"
    assert named[7.0] == "max times a power of two"
    assert (
        named[float(np.nextafter(np.float32(7), np.float32(8)))]
        == "next to max times a power of two"
    )
    eps = POLICIES[policy].eps
    assert {k for v, k in named.items() if v < eps} == ({"below eps"} if eps else set())
    assert {k for v, k in named.items() if eps <= v < 2.0**-126} == (
        set() if eps else {"subnormal"}
    )
    assert set(names[amax == 0]) == {"zero"}
    assert set(names[np.isinf(amax)]) == {"infinite"}
    assert set(names[np.isnan(amax)]) == {"NaN"}
    assert {"in range"} <= set(names)


def clauses(rule: str) -> set[str]:
    return set(re.findall(r"[A-Z]-\d+", rule))


@pytest.mark.parametrize("kind", [k for k in kinds.CASTS if k != "negative"])
def test_the_clauses_of_a_cast_are_those_of_its_rules(kind):
    ways = [
        (fmt, rounding, saturate)
        for fmt in FP8_FORMATS.values()
        for rounding in ("nearest_even", "to_odd")
        for saturate in (True, False)
    ]
    cited = {
        c
        for fmt, rounding, saturate in ways
        for c in clauses(explain.Rules(rounding=rounding, saturate=saturate).rule(kind, fmt))
    }
    assert cited == clauses(kinds.CAST_CLAUSES[kind])


def test_the_clause_of_a_negative_value_to_an_unsigned_format():
    rule = explain.Rules().rule("negative", E8M0FNU)
    assert clauses(rule) == clauses(kinds.CAST_CLAUSES["negative"])


@pytest.mark.parametrize("kind", kinds.AMAXES)
def test_the_clauses_of_an_amax_are_among_those_of_its_rules(kind):
    cited = {c for policy in POLICIES for c in clauses(explain.scale_rule(kind, policy))}
    assert clauses(kinds.AMAX_CLAUSES[kind]) <= cited
    assert cited <= clauses(kinds.AMAX_CLAUSES[kind]) | FORMULA


def test_coarse_kinds_of_a_cast_are_kinds():
    assert set(kinds.CAST_RANGES) <= set(kinds.CASTS)
