"""A tensor core's result as a function of its accumulator: not monotone, and from how many products
on.
"""

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st
from properties.domains import F32, among, caught, for_all

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.gemm import gemm, tensor_core
from fp8ref.sim.quantize import cast

PAIRS = list(itertools.product((E4M3FN, E5M2), repeat=2))
# The fewest products with which a larger accumulator can give a smaller result.
FEWEST = {"hopper": 3, "ada": 3, "blackwell": 6}
each_unit = pytest.mark.parametrize("unit", FEWEST)
N = 8  # the M and N of an instruction: 64 sums for each example
EVERY, NEAR_ONE = np.arange(256, dtype=np.uint8), np.arange(0x34, 0x40, dtype=np.uint8)


def factors(pair):
    """(pair, a, b): every code; numbers near 1; small odd integers and ones, where each product is
    one quantum's odd multiple.
    """
    odd, one = (
        cast.encode(np.array(v, F32), fmt) for v, fmt in zip(([1, 3, 5, 7], [1]), pair, strict=True)
    )
    kinds = ((EVERY, EVERY), (NEAR_ONE, NEAR_ONE), (odd, one))
    return st.one_of(
        *(st.tuples(st.just(pair), among(a, (N, 32)), among(b, (N, 32))) for a, b in kinds)
    )


# Some 13 or 25 above the exponents of numbers near 1, as the units' fraction bits are, or any.
POWERS = np.concatenate(
    [np.tile(np.arange(12, 16), 10), np.tile(np.arange(25, 28), 14), np.arange(-40, 41, 3)]
)
OFFSETS = np.array([0, 0, 0, 1, 1, 1, 2, 8])


@st.composite
def rising(draw):
    """float32 c < d [N, N]: c at most 8 ulps below a power of two and d about as far above, or 8^7,
    a quarter of a binade; both signs, and zero.
    """
    at, below, above = (
        draw(among(values, (N, N))) for values in (np.ldexp(1.0, POWERS), OFFSETS, OFFSETS)
    )
    at = at.astype(F32).view(np.uint32).astype(np.int64)
    exponent = draw(among(np.array([1, 1, 7]), (N, N)))
    c, d = (
        (at + offset).astype(np.uint32).view(F32)
        for offset in (-(below**exponent), above**exponent + (below == 0))
    )
    c = np.where(draw(among(np.arange(16), (N, N))) == 0, F32(0), c)
    negative = draw(among(np.array([False, True]), (N, N)))
    return np.where(negative, -d, c), np.where(negative, -c, d)


def mma(a, b, c, pair, unit):
    c = np.broadcast_to(np.asarray(c, F32), (len(a), len(b)))
    return gemm.mma(a, b, c, fmt_a=pair[0], fmt_b=pair[1], unit=unit)


def few(codes, fmt, count, first):
    """The codes of count finite numbers from ``first`` on; zeros elsewhere."""
    place = np.arange(32)
    kept = (place >= first) & (place < first + count) & np.isfinite(cast.decode(codes, fmt))
    return np.where(kept, codes, np.uint8(0))


@pytest.mark.grid(2)
@each_unit
@pytest.mark.parametrize("more", [0])
@for_all(
    100, drawn=st.sampled_from(PAIRS).flatmap(factors), ends=rising(), first=st.integers(0, 26)
)
def test_monotone_with_few_products(unit, more, drawn, ends, first):
    """At most 2 products that are not zero (blackwell: 5), every finite one, and finite
    accumulators c < d (G-10).

    From c to d the quantum q of a step may grow to 2q, and each positive product lose up to q. The
    accumulator's own part grows by q at least, as c ends below the power of two that d reaches:
    with two products q may be lost in all, and on hopper and ada a sum one q above a multiple of 2q
    is cut off to it. Blackwell keeps 25 bits of a 24-bit accumulator, whose part so grows by 4q.
    """
    pair, a, b = drawn
    a, b = few(a, pair[0], FEWEST[unit] - 1 + more, first), few(b, pair[1], 32, 0)
    assert (mma(a, b, ends[0], pair, unit) <= mma(a, b, ends[1], pair, unit)).all()


def ones(*values):
    return cast.encode(np.array([[*values] + [0] * (32 - len(values))], F32), E4M3FN)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("unit", "products", "c", "d", "falls"),
    [
        ("hopper", (1, 1, 1), 2**14 - 1, 2**14, (2**14 + 2, 2**14)),
        ("ada", (1, 1, 1), 2**14 - 1, 2**14, (2**14 + 2, 2**14)),
        ("blackwell", (1, 1, 1, 1, 1, 7), 2**26 - 4, 2**26, (2**26 + 8, 2**26)),
    ],
)
def test_not_monotone_in_the_accumulator(unit, products, c, d, falls, sign):
    """One ulp more in c, at a power of two, and products that were kept whole are cut off: the
    result falls by two (G-10).

    With the other sign it rises as c falls. One product fewer, and nothing happens.
    """
    assert len(products) == FEWEST[unit]
    factors, one, pair = (
        ones(*(sign * v for v in products)),
        ones(*[1] * len(products)),
        (E4M3FN, E4M3FN),
    )
    found = tuple(mma(factors, one, sign * v, pair, unit) for v in (c, d))
    assert found == tuple(sign * v for v in falls)
    fewer = ones(*(sign * v for v in products[1:]))
    assert sign * mma(fewer, one, sign * c, pair, unit) <= sign * mma(
        fewer, one, sign * d, pair, unit
    )


@each_unit
def test_the_property_finds_it(unit):
    """With one product more than its domain has, the property is false, and its search finds
    that.
    """
    assert caught(test_monotone_with_few_products, unit=unit, more=1)


def test_a_planted_fault_is_caught(monkeypatch):
    """A result that is not cut off shows the quantum lost with two products."""
    wide = tensor_core.TensorCore(
        name="wide", fused_width=32, fraction_bits=13, output_bits=23, evidence="none"
    )
    monkeypatch.setitem(tensor_core.UNITS, "hopper", wide)
    assert caught(test_monotone_with_few_products, unit="hopper", more=0)
