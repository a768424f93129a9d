"""Multiplying by a power of two: what commutes with it, and the least value where it stops to."""

import numpy as np
import pytest
from hypothesis import strategies as st
from properties.domains import F32, caught, for_all, of_magnitude, tensors

from fp8ref.formats import E4M3FN, E5M2, FP8_FORMATS
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec.gemm import STOCHASTIC

FORMATS = list(FP8_FORMATS.values())
fp8 = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def rounded(x, fmt, rounding="nearest_even"):
    return cast.decode(
        cast.encode(x, fmt, rounding=rounding, seed=5 if rounding in STOCHASTIC else None), fmt
    )


normal = st.sampled_from(FORMATS).flatmap(
    lambda fmt: st.tuples(st.just(fmt), of_magnitude(fmt.smallest_normal, fmt.max))
)


@pytest.mark.grid(3)
@pytest.mark.parametrize("rounding", cast.ROUNDINGS)
@for_all(100, drawn=normal, k=st.integers(-6, 6))
def test_casts_of_normal_values(rounding, drawn, k):
    """Both |x| and |2^k x| from the smallest normal number to max: round(2^k x) = 2^k round(x)
    (C-1, C-2).
    """
    fmt, x = drawn
    y = np.ldexp(x, k)
    inside = (abs(y) >= fmt.smallest_normal) & (abs(y) <= fmt.max)
    np.testing.assert_array_equal(
        rounded(y, fmt, rounding)[inside], np.ldexp(rounded(x, fmt, rounding), k)[inside]
    )


@fp8
def test_doubling_a_subnormal_value_fails_just_above_a_quarter_of_the_smallest(fmt):
    """Below, both are zero.

    Above, 2x passes the tie with the smallest subnormal number, and x does not (C-2).
    """
    x = F32(fmt.smallest_subnormal / 4)
    assert rounded(2 * x, fmt) == 2 * rounded(x, fmt) == 0
    x = np.nextafter(x, F32(1))
    assert rounded(x, fmt) == 0
    assert rounded(2 * x, fmt) == fmt.smallest_subnormal


@fp8
def test_halving_a_normal_value_fails_just_above_the_first_tie(fmt):
    """There x rounds to an odd multiple of the spacing, which the subnormal numbers below cannot
    halve (C-2).
    """
    x = F32(fmt.smallest_normal + fmt.smallest_subnormal / 2)
    assert rounded(x / 2, fmt) == rounded(x, fmt) / 2
    x = np.nextafter(x, F32(1))
    assert rounded(x / 2, fmt) == fmt.smallest_normal / 2
    assert rounded(x, fmt) / 2 == (fmt.smallest_normal + fmt.smallest_subnormal) / 2


def test_doubling_above_half_of_max_fails():  # C-3
    assert rounded(F32(232), E4M3FN) == 224
    assert rounded(F32(2 * 232), E4M3FN) == 448
    assert rounded(F32(2 * 240), E4M3FN) == 448 != 2 * rounded(F32(240), E4M3FN)


# What is equivariant at all, and the exponent of the largest amax: bfloat16 rounds the float32
# above its max to infinity.
EQUIVARIANT = [
    (name, 127)
    for name in (
        "torchao",
        "torchao_mask",
        "te_current",
        "te_delayed",
        "te_block",
        "flax",
        "mx_floor",
        "te_mxfp8",
    )
]
EQUIVARIANT.append(("flax_bf16", 126))


@pytest.mark.grid(3)
@pytest.mark.parametrize(("policy", "high"), EQUIVARIANT)
@for_all(
    60, x=tensors((2, 32)), exponent=st.integers(-39, 127), fmt=st.sampled_from([E4M3FN, E5M2])
)
def test_quantizing(policy, high, x, exponent, fmt):
    """x and 2^k x finite, neither with float32 subnormals, 2^-39 <= amax: equal codes, scales 2^k
    apart (S-3, S-9).

    Also into subnormal codes: what is cast is x * scale, and that does not change.
    """
    top = int(np.floor(np.log2(np.abs(x).max().astype(np.float64))))
    if high < top:
        x, top = np.ldexp(x, high - top), high
    k = min(exponent, high) - top
    granularity = "mx_1x32" if POLICIES[policy].e8m0 else "tensorwise"
    if granularity == "mx_1x32":  # the lesser block, too, stays above 2^-39
        x[:, 0] = np.abs(x).max()
    q, of_multiple = (
        scaling.quantize(v, fmt, granularity=granularity, policy=policy)
        for v in (x, np.ldexp(x, k))
    )
    np.testing.assert_array_equal(of_multiple.codes, q.codes)
    np.testing.assert_array_equal(of_multiple.scale, np.ldexp(q.scale, -k))
    np.testing.assert_array_equal(of_multiple.scale_inv, np.ldexp(q.scale_inv, k))


def codes_of(amax, policy):
    x = np.full((1, 32), amax, F32)
    return int(
        scaling.quantize(
            x,
            E4M3FN,
            granularity="mx_1x32" if POLICIES[policy].e8m0 else "tensorwise",
            policy=policy,
        ).codes[0, 0]
    )


@pytest.mark.parametrize("policy", ["torchao_pow2", "mx_rceil"])
def test_powers_of_two_by_way_of_a_logarithm_are_not(policy):
    """RN32(log2) is as coarse as the exponent is large: 1.7500004 is the least amax in [1, 2) that
    halves to another code (S-4, S-14).

    The scale of an amax up to 1.75 is at least 256, far from the next power of two.
    """
    amaxes = F32(1.75) + np.arange(1 << 10).astype(F32) * F32(2.0**-23)
    scale, of_half = (scaling.scale_from_amax(v, E4M3FN, policy) for v in (amaxes, amaxes / 2))
    first = amaxes[np.argmax(of_half != 2 * scale)]
    assert first == F32(1.75) + 3 * F32(2.0**-23)
    assert [codes_of(v, policy) for v in (first, first / 2)] == [0x76, 0x7E]


def test_eps_breaks_it():
    """From 2^-39 to 2^-40, just below torchao's 1e-12, the scale does not double, and max becomes
    416 (S-3).
    """
    assert codes_of(2.0**-39, "torchao") == 0x7E
    assert codes_of(2.0**-40, "torchao") == 0x7D


def test_an_overflowing_scale_breaks_it():
    """448 / 2^-120 is above float32: its largest number takes 2^-120 to 256 (S-9, S-10)."""
    assert codes_of(2.0**-119, "te_current") == 0x7E
    assert codes_of(2.0**-120, "te_current") == 0x78


def test_planted_faults_are_caught(monkeypatch):
    true_encode, true_scales = cast.encode, scaling.scales_from_amax
    fixed_point = lambda x, fmt, **o: true_encode(np.rint(x * F32(8)) / F32(8), fmt, **o)  # noqa: E731
    monkeypatch.setattr(cast, "encode", fixed_point)
    assert caught(test_casts_of_normal_values, rounding="nearest_even")
    monkeypatch.setattr(
        scaling,
        "scales_from_amax",
        lambda amax, fmt, policy: true_scales(amax + F32(1e-3), fmt, policy),
    )
    assert caught(test_quantizing, policy="torchao", high=127)
