"""Scaling into range: max is reached and never passed, under which policies, and from which amax
on.
"""

import numpy as np
import pytest
from hypothesis import strategies as st
from properties.domains import F32, caught, for_all, of_magnitude, tensors

from fp8ref.formats import E4M3FN, E5M2, FP8_FORMATS
from fp8ref.sim.quantize import cast, scaling

FORMATS = list(FP8_FORMATS.values())
FLOAT32_MAX = float(np.finfo(F32).max)
any_format = st.sampled_from(FORMATS)


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "mx_1x32"])
@pytest.mark.parametrize("policy", ["torchao", "te_current", "te_delayed", "flax"])
@for_all(30, x=tensors((3, 64)), fmt=any_format)
def test_every_group_reaches_max_and_nothing_overflows(policy, granularity, x, fmt):
    """Finite tensors, amax of a group from torchao's eps to float32's largest: its code is max's,
    no code is special (S-3, S-5, S-9).
    """
    x[:, ::32] = np.maximum(x[:, ::32], F32(2.0**-39))
    q = scaling.quantize(x, fmt, granularity=granularity, policy=policy)
    values = cast.decode(q.codes, fmt)
    assert np.isfinite(values).all()
    assert (scaling.amax(values, granularity) == fmt.max).all()


@for_all(200, amax=of_magnitude(float(F32(1e-12)), FLOAT32_MAX), fmt=any_format)
def test_a_product_passes_max_by_an_ulp_at_most(amax, fmt):
    """amax in [1e-12, largest float32]: amax * scale is max or a float32 neighbor of it (S-3, S-5).

    scale is within 2^-24 of the quotient, so the product is within max * 2^-24 of max, less than an
    ulp of float32 there; and then rounded.
    """
    product = abs(amax) * scaling.scale_from_amax(abs(amax), fmt)
    top = F32(fmt.max)
    assert (np.nextafter(top, F32(0)) <= product).all()
    assert (product <= np.nextafter(top, F32(np.inf))).all()
    # even unclipped
    np.testing.assert_array_equal(cast.encode(product, fmt, saturate=False), fmt.max_code)


@pytest.mark.parametrize(
    ("fmt", "first"), [(E4M3FN, 13), (E5M2, 13), (FP8_FORMATS["e4m3fnuz"], 19)], ids=str
)
def test_amax_times_scale_can_exceed_max(fmt, first):
    """The least integer whose product does, by an ulp (S-5)."""
    amax = np.arange(1, first + 1).astype(F32)
    product = amax * scaling.scale_from_amax(amax, fmt)
    assert (product[:-1] <= fmt.max).all()
    assert product[-1] == np.nextafter(F32(fmt.max), F32(np.inf))


def test_a_rounding_that_goes_up_needs_the_clip():
    """13 * scale = 448 + 2^-15: nearest rounding forgives it; stochastic rounding makes NaN of one
    in 2^20 (S-5, C-4).
    """
    product = np.full(1 << 22, F32(13) * scaling.scale_from_amax(F32(13), E4M3FN))
    codes = cast.encode(product, E4M3FN, rounding="stochastic", saturate=False, seed=0)
    assert set(codes) == {0x7E, 0x7F}
    # 4 expected; a Poisson count of mean 4 exceeds 20 with probability 1e-9
    assert (codes == 0x7F).sum() < 20
    clipped = cast.encode(
        product.clip(-448, 448), E4M3FN, rounding="stochastic", saturate=False, seed=0
    )
    np.testing.assert_array_equal(clipped, 0x7E)


@pytest.mark.parametrize(
    "policy", ["torchao_pow2", "torchao_mask", "te_block", "msamp", "te_mxfp8", "mx_rceil"]
)
@for_all(60, x=tensors((2, 32), high=124), fmt=st.sampled_from([E4M3FN, E5M2]))
def test_a_power_of_two_scale_reaches_half_of_max(policy, x, fmt):
    """Finite tensors, 2^-39 <= amax < 2^125: amax lands in [max / 2, max], nothing overflows even
    unclipped (S-4, S-9, S-14, S-15).
    """
    x[:, 0] = np.abs(x).max()
    granularity = "mx_1x32" if policy in ("te_mxfp8", "mx_rceil") else "tensorwise"
    q = scaling.quantize(x, fmt, granularity=granularity, policy=policy)
    top = np.abs(cast.decode(q.codes, fmt)).max(axis=-1)
    assert (top >= fmt.max / 2).all()
    assert np.isfinite(cast.decode(cast.encode(x * q.scale, fmt, saturate=False), fmt)).all()
    assert (np.frexp(q.scale)[0] == 0.5).all()


def test_a_power_of_two_scale_need_not_reach_max():
    """Of integers, 1: its scale is 256 (S-4)."""
    assert (
        cast.decode(scaling.quantize(np.ones(1, F32), E4M3FN, policy="torchao_mask").codes, E4M3FN)
        == 256
    )


@pytest.mark.parametrize(("fmt", "last"), [(E4M3FN, 1.2695339e-36), (E5M2, 1.5648182e-34)], ids=str)
def test_where_a_bounded_scale_no_longer_reaches_max(fmt, last):
    """te_current: the largest amax whose code is not max's; float32's largest number takes it to
    the last tie, 432 or 53248 (S-9, S-10).
    """
    for amax, code in (
        (F32(last), fmt.max_code - 1),
        (np.nextafter(F32(last), F32(1)), fmt.max_code),
    ):
        assert scaling.quantize(amax[None], fmt, policy="te_current").codes == code


def test_where_an_infinite_scale_makes_nan():
    """flax: the largest amax with an infinite scale: itself max, a zero next to it NaN (S-10)."""
    x = np.array([448 / FLOAT32_MAX, 0], F32)
    assert scaling.quantize(
        np.nextafter(x, F32(1)) * F32([1, 0]), E4M3FN, policy="flax"
    ).codes.tolist() == [0x7E, 0]
    below = np.nextafter(x, F32(0))
    assert scaling.quantize(below, E4M3FN, policy="flax").codes.tolist() == [0x7E, 0x7F]


@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_planted_faults_are_caught(factor, monkeypatch):
    def wrong(amax, fmt, policy="torchao"):
        scales = true_scales(amax, fmt, policy)
        return scales._replace(scale=scales.scale * F32(factor))

    true_scales = scaling.scales_from_amax
    monkeypatch.setattr(scaling, "scales_from_amax", wrong)
    monkeypatch.setattr(scaling, "scale_from_amax", lambda amax, fmt: wrong(amax, fmt).scale)
    assert caught(test_a_product_passes_max_by_an_ulp_at_most)
    # What the clip would hide: only a scale too small shows in the codes.
    assert caught(
        test_every_group_reaches_max_and_nothing_overflows, policy="torchao", granularity="rowwise"
    ) == (factor < 1)
