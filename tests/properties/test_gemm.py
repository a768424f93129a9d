"""GEMMs: what the order of K, signs and powers of two change, and what they do not.

``mma`` is one instruction, K = 32.
"""

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st
from properties.domains import F32, among, any_float32, caught, for_all, numbers

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.gemm import accumulate, gemm, tensor_core
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized

CODES = np.arange(256, dtype=np.uint8)
PAIRS = list(itertools.product((E4M3FN, E5M2), repeat=2))
UNITS, PLANS = list(tensor_core.UNITS), list(accumulate.ACCUMULATIONS)
WIDTHS = {name: core.fused_width for name, core in tensor_core.UNITS.items()}
each_unit = pytest.mark.parametrize("unit", UNITS)
each_plan = pytest.mark.parametrize("plan", PLANS)
pairs = st.sampled_from(PAIRS)
# All; those finite in both formats, as most sums of all are NaN; those near 1, of either sign,
# whose products overlap.
any_codes = st.one_of(
    *(
        among(CODES[np.isin(CODES & 0x7F, np.arange(*ends))], (3, 96))
        for ends in ((0x00, 0x80), (0x00, 0x7C), (0x30, 0x49))
    )
)
accumulators = st.one_of(any_float32((3, 3)), numbers(E5M2, (3, 3)))
orders = st.permutations(range(32)).map(np.array)


def finite(codes, fmt):
    return np.where(np.isfinite(cast.decode(codes, fmt)), codes, np.uint8(0))


def mma(a, b, c, pair, unit):
    return gemm.mma(a[:, :32], b[:, :32], c, fmt_a=pair[0], fmt_b=pair[1], unit=unit)


def matmul(a, b, pair, how):
    """The accumulator alone: scales of 1."""
    one = np.ones((), F32)
    return gemm.matmul(
        *(
            Quantized(codes, one, one, fmt, "tensorwise", -1)
            for codes, fmt in zip((a, b), pair, strict=True)
        ),
        accumulate=how,
    )


def row(*values, fmt=E4M3FN):
    """One row of codes [1, 64], zeros after the values, which are numbers of fmt."""
    codes = cast.encode(np.array([[*values] + [0] * (64 - len(values))], F32), fmt)
    np.testing.assert_array_equal(cast.decode(codes, fmt)[0, : len(values)], values)
    return codes


def same_bits(x, y):
    np.testing.assert_array_equal(x.view(np.uint32), y.view(np.uint32))


@each_unit
@for_all(60, a=any_codes, b=any_codes, c=accumulators, order=orders, pair=pairs)
def test_the_order_within_a_step_changes_nothing(unit, a, b, c, order, pair):
    """Every code and accumulator, NaN and infinities included; within 32 on hopper and blackwell,
    16 on ada (G-10).
    """
    width = WIDTHS[unit]
    order = np.concatenate([order[(order >= k) & (order < k + width)] for k in range(0, 32, width)])
    same_bits(mma(a[:, order], b[:, order], c, pair, unit), mma(a, b, c, pair, unit))


@each_plan
@for_all(40, a=any_codes, b=any_codes, order=orders, block=st.integers(0, 2), pair=pairs)
def test_the_order_within_a_step_of_a_gemm_changes_nothing(plan, a, b, order, block, pair):
    """Every code; within one of its blocks of 32, or ada's of 16 (G-10, G-12)."""
    width = accumulate.ACCUMULATIONS[plan].unit.fused_width
    order = np.concatenate(
        [
            np.arange(32 * block),
            32 * block + order[order < width],
            np.arange(32 * block + width, 96),
        ]
    )
    same_bits(matmul(a[:, order], b[:, order], pair, plan), matmul(a, b, pair, plan))


@for_all(40, a=any_codes, b=any_codes, order=st.permutations(range(96)), pair=pairs)
def test_no_order_changes_an_exact_sum(a, b, order, pair):
    """Every code, any order (G-2, G-6)."""
    found, expected = matmul(a[:, order], b[:, order], pair, "exact"), matmul(a, b, pair, "exact")
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("how", "apart"),
    [("hopper_fast", 32), ("hopper_slow", 32), ("ada", 16), ("blackwell", 32), ("f32", 1)],
)
def test_the_order_across_steps_changes_the_result(how, apart):
    """2^16 + 2^-10 - 2^16: what is small is lost next to what is large, unless that has canceled in
    the step before (G-3, G-10, G-12).
    """
    between, pair = [0] * (apart - 1), (E4M3FN, E4M3FN)
    lost = matmul(row(256, *between, 2.0**-5, -256), row(256, *between, 2.0**-5, 256), pair, how)
    kept = matmul(row(256, -256, *between, 2.0**-5), row(256, 256, *between, 2.0**-5), pair, how)
    assert (lost, kept) == (0, 2.0**-10)


@each_unit
@for_all(60, a=any_codes, b=any_codes, c=accumulators, pair=pairs)
def test_odd(unit, a, b, c, pair):
    """Every code and accumulator: a and c negated negate the result in value; in bits, unless it is
    zero or NaN (G-10, G-11).
    """
    plus, minus = mma(a, b, c, pair, unit), mma(a ^ 0x80, b, -c, pair, unit)
    np.testing.assert_array_equal(minus, -plus)
    plain = (plus != 0) & ~np.isnan(plus)
    same_bits(minus[plain], -plus[plain])
    same_bits(mma(a ^ 0x80, b ^ 0x80, c, pair, unit), plus)


@pytest.mark.parametrize("how", [*PLANS, "exact", "f32"])
@for_all(40, a=any_codes, b=any_codes, pair=pairs)
def test_gemms_are_odd(how, a, b, pair):
    """Every code, in value (G-2, G-3, G-12)."""
    np.testing.assert_array_equal(matmul(a ^ 0x80, b, pair, how), -matmul(a, b, pair, how))


@each_unit
def test_a_zero_is_never_negative(unit):
    """Where oddness in bits ends: 0 and its negation are both +0, canceled or never there
    (G-11).
    """
    zero = np.zeros((1, 1), F32)
    for a, c in ((row(0), zero), (row(1, -1), zero), (row(-1), zero + F32(1))):
        for result in (
            mma(a, row(1, 1), c, (E4M3FN, E4M3FN), unit),
            mma(a ^ 0x80, row(1, 1), -c, (E4M3FN, E4M3FN), unit),
        ):
            assert result.view(np.uint32) == 0


def doubled(codes, fmt):
    """Codes of a normal number or zero whose double is one too, and the doubles' codes."""
    magnitude = codes & 0x7F
    step = 1 << fmt.mantissa_bits
    kept = np.where((magnitude >= step) & (magnitude + step <= fmt.max_code), codes, codes & 0x80)
    return kept, np.where(kept & 0x7F, kept + np.uint8(step), kept)


def ordinary(c):
    """c, or zero where 2^-100 <= |c| <= 2^100 does not hold: twice the result then is neither
    subnormal nor infinite.
    """
    return np.where((abs(c) >= 2.0**-100) & (abs(c) <= 2.0**100), c, F32(0))


@each_unit
@for_all(60, a=any_codes, b=any_codes, c=accumulators, pair=pairs)
def test_scaling_by_two_with_normals(unit, a, b, c, pair):
    """a of normal numbers and zeros, their doubles normal too; b any finite; c zero or ordinary:
    every exponent grows by one (G-10).
    """
    (a, twice), b, c = doubled(a, pair[0]), finite(b, pair[1]), ordinary(c)
    same_bits(mma(twice, b, 2 * c, pair, unit), 2 * mma(a, b, c, pair, unit))


@pytest.mark.parametrize("how", ["exact", "f32"])
@for_all(40, a=any_codes, b=any_codes, pair=pairs)
def test_scaling_by_two_without_a_tensor_core(how, a, b, pair):
    """Every finite code of a whose double is a number of the format, subnormals among them (G-2,
    G-3).
    """
    values = 2 * cast.decode(finite(a, pair[0]), pair[0])
    a = np.where(abs(values) <= pair[0].max, finite(a, pair[0]), np.uint8(0))
    twice = cast.encode(2 * cast.decode(a, pair[0]), pair[0])
    same_bits(
        matmul(twice, finite(b, pair[1]), pair, how), 2 * matmul(a, finite(b, pair[1]), pair, how)
    )


@pytest.mark.parametrize(
    ("unit", "fmt", "a", "b", "once", "twice"),
    [
        ("hopper", E4M3FN, (2.0**-9, 2.0**-6), (256, 2.0**-6), 0.5, 1 + 2.0**-11),
        ("ada", E4M3FN, (2.0**-9, 2.0**-6), (256, 2.0**-6), 0.5, 1 + 2.0**-11),
        (
            "blackwell",
            E5M2,
            (2.0**-16, -(2.0**-16), 2.0**-14),
            (2.0**15, 2.0**15, 2.0**-11),
            0,
            2.0**-24,
        ),
    ],
)
def test_scaling_by_two_with_subnormals_fails(unit, fmt, a, b, once, twice):
    """The smallest subnormal counts as the smallest normal, and so does its double: the step's
    quantum stays, and a product half as large as it, doubled, is no longer cut off. Blackwell has
    two bits below its output's: the large terms cancel to show it (G-10).
    """
    zero = np.zeros((1, 1), F32)
    for factor, expected in ((1, once), (2, twice)):
        found = mma(
            row(*(factor * v for v in a), fmt=fmt), row(*b, fmt=fmt), zero, (fmt, fmt), unit
        )
        assert found == expected
    assert twice != 2 * once


def test_planted_faults_are_caught(monkeypatch):
    true_step = tensor_core.step_plain
    narrow = tensor_core.UNITS["ada"]

    def floor(a, b, c, fmt_a, fmt_b, unit, scales=None):
        return np.floor(true_step(a, b, c, fmt_a, fmt_b, unit, scales) * 2.0**6) / 2.0**6

    monkeypatch.setattr(tensor_core, "step_plain", floor)
    assert caught(test_odd, unit="hopper")
    assert caught(test_scaling_by_two_with_normals, unit="hopper")
    monkeypatch.undo()
    monkeypatch.setitem(tensor_core.UNITS, "hopper", narrow)
    assert caught(test_the_order_within_a_step_changes_nothing, unit="hopper")
