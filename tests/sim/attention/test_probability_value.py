"""Sums that go on from an accumulator, and promotions (spec A-9)."""

import dataclasses

import numpy as np
import pytest

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2
from fp8ref.sim.attention import probability_value
from fp8ref.sim.attention.probability_value import Product
from fp8ref.sim.gemm import tensor_core
from fp8ref.sim.gemm.accumulate import ACCUMULATIONS
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.variants import VARIANTS

F = np.float32


def numbers(rng, shape, fmt=E4M3FN):
    return cast.round_to(
        (rng.normal(size=shape) * 2.0 ** rng.integers(-8, 5, shape)).astype(F), fmt
    )


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2])
@pytest.mark.parametrize("plan", ["hopper_fast", "ada", "blackwell"])
def test_a_chain_goes_on_from_any_accumulator(plan, fmt):  # A-9, G-10, G-11
    rng = np.random.default_rng(0)
    a, b = numbers(rng, (7, 96), fmt), numbers(rng, (96, 40), fmt)
    acc = (rng.normal(size=(7, 40)) * 2.0 ** rng.integers(-120, 100, (7, 40))).astype(F)
    # steps without a product: the accumulator is cut off by itself
    a[3], b[:, 5], b[:32, 6] = (0, 0, 0)
    acc[0, :4] = 0.0, -0.0, 2.0**-149, -(2.0**-140)
    acc[:, 5] = F(1.2345e-30) * F(2.0) ** np.arange(-7, 0)
    unit = ACCUMULATIONS[plan].unit
    found = probability_value.accumulate(acc, a, b, fmt, ACCUMULATIONS[plan])
    np.testing.assert_array_equal(
        found.view(np.uint32), tensor_core.chain_plain(a, b.T, acc, fmt, fmt, unit).view(np.uint32)
    )


def test_sums_in_order_go_on():  # A-9, G-3
    rng = np.random.default_rng(1)
    a, b, acc = (
        numbers(rng, (3, 20), BFLOAT16),
        numbers(rng, (20, 5), BFLOAT16),
        rng.normal(size=(3, 5)).astype(F),
    )
    expected = acc.copy()
    for k in range(20):
        expected = expected + np.outer(a[:, k], b[k])
    np.testing.assert_array_equal(
        probability_value.accumulate(acc, a, b, BFLOAT16, "f32"), expected
    )


@pytest.mark.parametrize("every", [1, 2, 3, None])
def test_promotions(every):
    """Every n tiles the chain joins a float32 sum; both are rescaled; what is left joins at the
    end.
    """
    rng = np.random.default_rng(2)
    variant = dataclasses.replace(VARIANTS["fa3"], promotion=every)
    o, total, chain, one = (
        Product(4, 6, variant, F(1)),
        np.zeros((4, 6), F),
        np.zeros((4, 6), F),
        F(1),
    )
    for n in range(5):
        p, v, c = (
            abs(numbers(rng, (4, 64))),
            numbers(rng, (64, 6)),
            F(2.0) ** -rng.integers(0, 3, 4).astype(F) * F(0.9),
        )
        o.rescale(c, n)
        o.add(p, v, one)
        total, chain = total * c[:, None], chain * c[:, None]
        chain = tensor_core.chain_plain(p, v.T, chain, E4M3FN, E4M3FN, tensor_core.UNITS["hopper"])
        if every is not None and (n + 1) % every == 0:
            total, chain = total + chain, np.zeros_like(chain)
    np.testing.assert_array_equal(o.end(), total + chain if every is not None else chain)
