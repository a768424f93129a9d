"""MX scales: rounding the scale down clips 14 % of blocks, rounding it up none (spec S-14)."""

import math

import numpy as np
import pytest
from hypothesis import strategies as st
from properties.domains import F32, caught, for_all, of_magnitude, tensors

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.quantize import cast, scaling

# The tie above max over the power of two below it: a block whose amax has such a mantissa, or more,
# loses its largest elements. e4m3's tie, 464, still goes to 448, whose code is even; e5m2's, 61440,
# goes to infinity.
TIES = {E4M3FN: 464 / 256, E5M2: 61440 / 32768}
formats = pytest.mark.parametrize("fmt", TIES, ids=str)


def overflows(x, fmt, policy):
    """Which blocks have an element that an unsaturated cast would take out of the finite range
    (Q-3).
    """
    scale = scaling.scale_from_amax(scaling.amax(x, "mx_1x32"), fmt, policy)
    values = cast.decode(cast.encode(x * np.repeat(scale, 32, axis=-1), fmt, saturate=False), fmt)
    return ~np.isfinite(values).reshape(*scale.shape, 32).all(axis=-1)


def clipping(mantissa, fmt):
    return mantissa > TIES[fmt] if fmt is E4M3FN else mantissa >= TIES[fmt]


@for_all(
    100,
    x=tensors((8, 32), low=-98),
    fmt=st.sampled_from(list(TIES)),
    near=of_magnitude(1.75, np.nextafter(F32(2), F32(0)), 8),
)
def test_floor_clips_a_block_exactly_above_the_tie(x, fmt, near):
    """Finite blocks, 2^-98 <= amax < 2^128, where no clip of the exponent interferes: by the
    mantissa of amax alone (S-14).
    """
    x[:, 0] = np.copysign(np.ldexp(abs(near), np.frexp(np.abs(x).max())[1] - 1), near)
    mantissa = 2 * np.frexp(scaling.amax(x, "mx_1x32"))[0]
    np.testing.assert_array_equal(overflows(x, fmt, "mx_floor"), clipping(mantissa, fmt))


@pytest.mark.parametrize("policy", ["mx_rceil", "te_mxfp8"])
@for_all(50, x=tensors((4, 32), low=-98, high=126), fmt=st.sampled_from(list(TIES)))
def test_rounding_up_clips_none(policy, x, fmt):
    """Finite blocks, 2^-98 <= amax < 2^127 (S-14)."""
    x[:, 0] = np.maximum(np.abs(x).max(axis=-1), F32(2.0**-98))
    assert not overflows(x, fmt, policy).any()


@formats
def test_how_many_amaxes_clip(fmt):
    """14 % for e4m3, 9 % for e5m2: of amaxes whose *logarithm* is uniform, which over many binades
    it nearly is.

    The mantissa then must be in [tie, 2) with probability log2(2 / tie). Uniform in value, it is 2
    - tie: 18.75 and 12.5 %. The 19 % that is quoted too, log2(2 / 1.75), counts every amax above
      max, of which those below the tie lose no more than any rounding takes.
    """
    step = 2.0**-16
    m = 1 + np.arange(1 << 16) * step  # a binade's amaxes of 17 bits
    scale = scaling.scale_from_amax(m.astype(F32), fmt, "mx_floor")
    clipped = ~np.isfinite(
        cast.decode(cast.encode(m.astype(F32) * scale, fmt, saturate=False), fmt)
    )
    by_logarithm, by_value = np.log2((m + step) / m)[clipped].sum(), clipped.mean()
    # the tie's own amax, at most 1.5 steps of log2, is on one side or the other
    assert abs(by_logarithm - math.log2(2 / TIES[fmt])) < 1.5 * step
    assert abs(by_value - (2 - TIES[fmt])) < 1.5 * step
    assert round(100 * by_logarithm, 1) == {E4M3FN: 14.2, E5M2: 9.3}[fmt]
    assert round(100 * math.log2(2 / 1.75), 1) == 19.3


@formats
def test_how_many_gaussian_blocks_clip(fmt, rng):
    """13.4 % for e4m3, 9.5 % for e5m2, of blocks of 32: their amax spans little more than two
    binades.
    """

    def below(v):  # the probability that all 32 of a block are
        return math.erf(v / math.sqrt(2)) ** 32

    p = sum(below(2.0 ** (k + 1)) - below(TIES[fmt] * 2.0**k) for k in range(-20, 10))
    assert round(100 * p, 1) == {E4M3FN: 13.4, E5M2: 9.5}[fmt]
    n = 1 << 14
    found = overflows(rng.standard_normal((n, 32)).astype(F32), fmt, "mx_floor").mean()
    # a binomial share: six standard deviations
    assert abs(found - p) < 6 * math.sqrt(p * (1 - p) / n)


@for_all(50, x=tensors((8, 32), low=-98, high=124), fmt=st.sampled_from(list(TIES)))
def test_what_floor_loses_of_an_amax(x, fmt):
    """Finite blocks, 2^-98 <= amax < 2^125: less than an eighth, 1 - 448/512, where a cast in range
    loses 1/17 at most for e4m3 (S-14).
    """
    x[:, 0] = np.copysign(np.abs(x).max(axis=-1).clip(F32(2.0**-98)), x[:, 0])
    back = np.abs(
        scaling.dequantize(scaling.quantize(x, fmt, granularity="mx_1x32", policy="mx_floor"))
    ).max(axis=-1)
    amax = np.abs(x).max(axis=-1).astype(np.float64)
    lost = amax - back  # exact, and so are its small multiples
    assert (lost * 8 < amax).all()
    if fmt is E4M3FN:
        assert (lost * 17 <= amax)[~clipping(2 * np.frexp(amax)[0], fmt)].all()


def test_that_eighth_is_approached():
    """The largest float32 below 2 reads back as 1.75 (S-14); under rounding up, as 2."""
    x = np.full((1, 32), np.nextafter(F32(2), F32(0)))
    back = [
        scaling.dequantize(scaling.quantize(x, E4M3FN, granularity="mx_1x32", policy=p))[0, 0]
        for p in ("mx_floor", "mx_rceil")
    ]
    assert back == [1.75, 2]


def test_rounding_up_can_leave_amax_above_max():
    """torchao's logarithm takes 448 * 2^5 and the float32 above it for one: amax * scale is 448 +
    2^-15, which rounds to max (S-14).
    """
    amax = np.nextafter(F32(448 * 2.0**5), F32(np.inf))
    assert amax * scaling.scale_from_amax(amax, E4M3FN, "mx_rceil") == 448 + 2.0**-15
    assert amax * scaling.scale_from_amax(amax, E4M3FN, "te_mxfp8") == 224 + 2.0**-16


def test_planted_faults_are_caught(monkeypatch):
    true_scale = scaling.scale_from_amax
    swap = {"mx_floor": "mx_rceil", "mx_rceil": "mx_floor", "te_mxfp8": "mx_floor"}
    monkeypatch.setattr(
        scaling, "scale_from_amax", lambda amax, fmt, policy: true_scale(amax, fmt, swap[policy])
    )
    assert caught(test_floor_clips_a_block_exactly_above_the_tie)
    assert caught(test_rounding_up_clips_none, policy="te_mxfp8")
