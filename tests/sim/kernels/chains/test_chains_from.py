"""Chains that go on from an accumulator against the plain ones, bit for bit."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim import threads as parallel
from fp8ref.sim.gemm import tensor_core
from fp8ref.sim.gemm.tensor_core import UNITS, TensorCore
from fp8ref.sim.kernels.chains import chains, chains_from
from fp8ref.sim.kernels.chains.loops import ROWS
from fp8ref.sim.kernels.chains.vectors import LANES
from fp8ref.sim.quantize import cast

PAIRS = list(product((E4M3FN, E5M2), repeat=2))
F = np.float32


def codes(rng, shape, fmt, zeros):
    """Codes of any finite numbers of the format, many of them zeros of either sign; some rows have
    nothing else.
    """
    drawn = rng.integers(0, 256, shape, dtype=np.uint8)
    drawn = np.where(
        np.isfinite(cast.decode(drawn, fmt)) & (rng.random(shape) >= zeros), drawn, drawn & 0x80
    )
    return np.where(rng.random((shape[0], 1)) < zeros / 2, drawn & 0x80, drawn).astype(np.uint8)


def accumulators(rng, shape):
    """Any finite float32, half of them about as large as products; the largest and the smallest,
    and zeros of either sign.
    """
    exponents = np.where(
        rng.random(shape) < 0.5, rng.integers(-60, 40, shape), rng.integers(-149, 128, shape)
    )
    drawn = np.ldexp(rng.uniform(1, 2, shape), exponents).astype(F) * rng.choice(
        [F(-1), F(1)], shape
    )
    drawn.reshape(-1)[:4] = np.array([0.0, -0.0, 2.0**-149, np.finfo(F).max], F)[: drawn.size]
    return drawn


def units():
    """Units of every width, at and next to the numbers at which the kernel changes its
    arithmetic.
    """
    return st.builds(
        TensorCore,
        name=st.just("any"),
        fused_width=st.sampled_from([4, 8, 16, 32]),
        fraction_bits=st.sampled_from([1, 12, 13, 14, 15, 17, 18, 19, 23, 25]),
        output_bits=st.sampled_from([1, 12, 13, 14, 22, 23]),
        evidence=st.just("none"),
    )


def agree(a, b, acc, fmt_a, fmt_b, unit):
    left, right = cast.decode(a, fmt_a), cast.decode(b, fmt_b)
    expected = tensor_core.chain_plain(left, right, acc, fmt_a, fmt_b, unit)
    found = acc.copy()
    chains_from.go_on(
        found,
        chains_from.pack(left, fmt_a, unit.fused_width, unit.fraction_bits, unit.output_bits),
        b,
        fmt_b,
    )
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@settings(max_examples=300, deadline=None)
@given(
    unit=st.one_of(st.sampled_from(list(UNITS.values())), units()),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 17)),
    pair=st.sampled_from(PAIRS),
    zeros=st.sampled_from([0.1, 0.9, 0.99]),
    seed=st.integers(0, 2**32 - 1),
)
def test_chains_go_on_as_the_plain_ones(unit, shape, pair, zeros, seed):  # A-9, G-10, G-11
    m, n, steps = shape
    rng = np.random.default_rng(seed)
    a, b = (
        codes(rng, (rows, 32 * steps), fmt, zeros) for rows, fmt in zip((m, n), pair, strict=True)
    )
    agree(a, b, accumulators(rng, (m, n)), *pair, unit)


@pytest.mark.parametrize("unit", UNITS.values(), ids=lambda u: u.name)
def test_accumulators_around_every_limit(unit):  # G-10
    """Every exponent, next to no product, to the smallest one, and to the largest, in the first
    step or the second.
    """
    accumulator = np.ldexp(F(1.9999999), np.arange(-149, 128)).astype(F)[:, None].repeat(6, axis=1)
    a, b = np.zeros((len(accumulator), 64), np.uint8), np.zeros((6, 64), np.uint8)
    a[:] = 1  # the smallest number; its products with b: none, the smallest, the largest
    for row, code in zip(b[1:], (1, 0x81, E4M3FN.max_code, 1, E4M3FN.max_code), strict=True):
        row[0] = code
    b[4:] = np.roll(b[4:], 40, axis=1)
    a[::2, 1] = 0
    for sign in (F(1), F(-1)):
        agree(a, b, sign * accumulator, E5M2, E4M3FN, unit)


@pytest.mark.parametrize("unit", UNITS.values(), ids=lambda u: u.name)
def test_several_tiles_of_columns_and_rows(unit, rng):
    m, n = ROWS + 3, LANES + 5
    agree(
        codes(rng, (m, 64), E4M3FN, 0.5),
        codes(rng, (n, 64), E4M3FN, 0.5),
        accumulators(rng, (m, n)),
        E4M3FN,
        E4M3FN,
        unit,
    )


@pytest.mark.parametrize("sign", [F(1), F(-1)])
def test_accumulators_that_are_apart(sign):
    smallest, largest, ordinary = F(2.0**-41), chains_from.LARGEST, np.ones(100, F)
    within = (F(0), smallest, np.nextafter(largest, F(0)))
    beyond = (F(2.0**-149), np.nextafter(smallest, F(0)), largest, np.finfo(F).max)
    for x in (*within, *beyond):
        acc = ordinary.copy()
        acc[77] = sign * x
        assert chains_from.apart(acc, smallest, largest) == (x in beyond)


def test_more_rows_of_b_are_left_out(rng):
    a, b, acc = (
        codes(rng, (3, 64), E4M3FN, 0.5),
        codes(rng, (LANES, 64), E4M3FN, 0.5),
        accumulators(rng, (3, 7)),
    )
    found, expected, left = (
        acc.copy(),
        acc.copy(),
        chains_from.pack(cast.decode(a, E4M3FN), E4M3FN, 32, 13, 13),
    )
    chains_from.go_on(found, left, b, E4M3FN)
    chains_from.go_on(expected, left, b[:7], E4M3FN)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3, 32), (2, 0, 32)])
def test_no_step_changes_nothing(shape):
    m, n, k = shape
    acc = np.full((m, n), F(1.2345678))
    chains_from.go_on(
        acc,
        chains_from.pack(np.ones((m, k), F), E4M3FN, 32, 13, 13),
        np.ones((n, k), np.uint8),
        E4M3FN,
    )
    np.testing.assert_array_equal(acc, F(1.2345678))


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2])
@pytest.mark.parametrize("unit", UNITS.values(), ids=lambda u: u.name)
def test_rows_of_values_are_those_of_their_codes(unit, fmt, rng):
    drawn, numbers = (
        codes(rng, (5, 96), fmt, 0.2),
        (unit.fused_width, unit.fraction_bits, unit.output_bits),
    )
    found, expected = (
        chains_from.pack(cast.decode(drawn, fmt), fmt, *numbers),
        chains.pack(drawn, fmt, *numbers),
    )
    for x, y in zip(found[:3], expected[:3], strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    assert found.unit == expected.unit


@pytest.mark.parametrize("unit", ["hopper", "blackwell"])
def test_the_rounding_mode_is_to_nearest_afterwards(unit, rng):
    with parallel.using(1):  # in this thread
        agree(
            codes(rng, (3, 64), E4M3FN, 0),
            codes(rng, (4, 64), E4M3FN, 0),
            np.ones((3, 4), F),
            E4M3FN,
            E4M3FN,
            UNITS[unit],
        )
    one = F(1)
    # to nearest: toward zero it would be 1
    assert one + F(0.75 * 2.0**-23) == np.nextafter(one, F(2))
    assert one - F(0.75 * 2.0**-25) == one  # toward zero it would be the number below
