"""Exponentials, logarithms and hyperbolic tangents are rounded correctly (spec A-5, A-11, A-22)."""

import numpy as np
import pytest

from fp8ref.sim.attention import exponentials as elementary

F = np.float32


def of_float64(x, function, bits: int = 48):
    """(what float64 says, whether its error of 2^-bits could matter)."""
    y = function(x.astype(np.float64))
    below, above = (y * (1 - 2.0**-bits)).astype(F), (y * (1 + 2.0**-bits)).astype(F)
    return below, below != above


@pytest.mark.parametrize(
    ("compiled", "plain"),
    [(elementary.exp2, elementary.exp2_plain), (elementary.exp, elementary.exp_plain)],
)
def test_exponentials_are_their_definitions(compiled, plain):
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.uniform(-152, 16, 150),
            rng.uniform(-2, 2, 60),
            F(2.0) ** -np.arange(1, 40),
            -(F(2.0) ** -np.arange(1, 40)),
        ]
    )
    x = np.concatenate(
        [x, [0, -0.0, 1, -1, -149, -149.5, -150, -126, -103.97208, -104, -np.inf]]
    ).astype(F)
    np.testing.assert_array_equal(compiled(x).view(np.uint32), plain(x).view(np.uint32))


def test_exact_values():
    assert (
        elementary.exp2(np.arange(-149, 17, dtype=F)).tolist()
        == (2.0 ** np.arange(-149, 17)).tolist()
    )
    assert elementary.exp2(F(-np.inf)) == 0
    assert elementary.exp(F(0)) == 1


@pytest.mark.parametrize(("mine", "numpy"), [(elementary.exp2, np.exp2), (elementary.exp, np.exp)])
def test_exponentials_where_float64_decides(mine, numpy):
    x = np.random.default_rng(1).uniform(-103, 16, 1 << 18).astype(F)
    expected, unsure = of_float64(x, numpy)
    assert unsure.mean() < 1e-4
    np.testing.assert_array_equal(mine(x)[~unsure], expected[~unsure])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mine", "plain", "numpy"),
    [
        (elementary.exp2, elementary.exp2_plain, np.exp2),
        (elementary.exp, elementary.exp_plain, np.exp),
    ],
)
def test_all_exponentials(mine, plain, numpy):
    """All float32 from -104 to 16 of magnitude at least 2^-26; below, the result is 1 or its
    neighbor.
    """
    unsure_of = 0
    for sign, first, last in ((0x80000000, F(2.0**-26), F(104)), (0, F(2.0**-26), F(16))):
        for begin in range(int(first.view(np.uint32)), int(last.view(np.uint32)), 1 << 24):
            x = (
                np.arange(begin, min(begin + (1 << 24), int(last.view(np.uint32))), dtype=np.uint32)
                | np.uint32(sign)
            ).view(F)
            expected, unsure = of_float64(x, numpy)
            found = mine(x)
            np.testing.assert_array_equal(found[~unsure], expected[~unsure])
            np.testing.assert_array_equal(found[unsure], plain(x[unsure]))
            unsure_of += unsure.sum()
    assert 10 < unsure_of < 1000


@pytest.mark.parametrize(("mine", "numpy"), [(elementary.log, np.log), (elementary.log2, np.log2)])
def test_logarithms(mine, numpy):
    x = np.exp(np.random.default_rng(2).uniform(-80, 80, 1 << 16)).astype(F)
    x[:4] = 1, 0.5, np.nextafter(F(1), F(2)), np.nextafter(F(1), F(0))
    expected, unsure = of_float64(x, numpy)
    np.testing.assert_array_equal(mine(x)[~unsure], expected[~unsure])
    assert mine(F(0)) == -np.inf


def test_hyperbolic_tangents_are_their_definition():
    rng = np.random.default_rng(3)
    x = np.concatenate(
        [
            rng.normal(size=200),
            rng.uniform(-12, 12, 100),
            F(2.0) ** -np.arange(1, 60),
            -(F(2.0) ** -np.arange(1, 149, 7)),
        ]
    )
    x = np.concatenate(
        [x, [9.01, 9.02, -9.03, 40, 100, -3e38, 1e-45, 2.0**-12, 2.0**-11.5]]
    ).astype(F)
    np.testing.assert_array_equal(
        elementary.tanh(x).view(np.uint32), elementary.tanh_plain(x).view(np.uint32)
    )
    assert elementary.tanh(F(-0.0)).view(np.uint32) == 0x80000000
    assert elementary.tanh(F(20)) == 1
    assert elementary.tanh(F(2.0**-13)) == F(2.0**-13)  # a third of x^3 is less than half a unit


def test_hyperbolic_tangents_where_float64_decides():
    x = (np.random.default_rng(4).normal(size=1 << 16) * 4).astype(F)
    expected, unsure = of_float64(x, lambda v: np.expm1(2 * v) / (np.expm1(2 * v) + 2))
    assert unsure.mean() < 1e-4
    np.testing.assert_array_equal(elementary.tanh(x)[~unsure], expected[~unsure])
