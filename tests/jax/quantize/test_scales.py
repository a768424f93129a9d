import jax
import ml_dtypes
import numpy as np
import pytest

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax.quantize import scales
from fp8ref.policy import POLICIES, ScalePolicy
from fp8ref.sim.quantize import scales as sim

AMAX_BF16 = np.arange(0x7F81, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
FLOORED = [p for p in POLICIES.values() if p.in_backends and p.eps and not p.e8m0] + [
    ScalePolicy(name="small_eps", eps=1e-27)
]
E8M0 = [p for p in POLICIES.values() if p.in_backends and p.e8m0]
formats = pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)


def amaxes(fmt, rng):
    """Every bfloat16, a million float32, and the neighbors of each eps, below which an amax counts
    as eps, and of fmt.max * 2^k, where scales pass a power of two; and NaNs."""
    random = rng.integers(0, 0x7F800001, 1 << 20, dtype=np.uint32).view(np.float32)
    k = np.arange(-118, 160)
    with np.errstate(over="ignore"):
        powers = (fmt.max * 2.0 ** -k[:, None]).astype(np.float32)
    eps = np.unique([policy.eps for policy in FLOORED]).astype(np.float32)
    centers = np.concatenate([powers[np.isfinite(powers)], eps]).view(np.int32)
    near = (centers[:, None] + np.arange(-100, 101)).clip(0, 0x7F800000)
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32).view(np.float32)
    return np.concatenate([AMAX_BF16, random, near.astype(np.int32).view(np.float32).ravel(), nans])


@pytest.mark.parametrize("policy", FLOORED, ids=lambda p: p.name)
@formats
def test_scales_equal_the_simulators(policy, fmt, rng):  # S-3, S-4, S-17
    """scale_inv where it is a normal number: XLA on a CPU flushes subnormals."""
    amax = amaxes(fmt, rng)
    found = jax.jit(lambda a: scales.scales_from_amax(a, fmt, policy))(amax)
    expected = sim.scales_from_amax(amax, fmt, policy)
    np.testing.assert_array_equal(np.asarray(found.scale), expected.scale)
    normal = ~(expected.scale_inv < 2.0**-126)
    np.testing.assert_array_equal(np.asarray(found.scale_inv)[normal], expected.scale_inv[normal])


@pytest.mark.grid(3)
@pytest.mark.parametrize("policy", E8M0, ids=lambda p: p.name)
@formats
def test_e8m0_scales_equal_the_simulators(policy, fmt, rng):  # S-14
    """All bits of both, 2^-127 included, a subnormal."""
    amax = amaxes(fmt, rng)
    found = jax.jit(lambda a: scales.scales_from_amax(a, fmt, policy))(amax)
    expected = sim.scales_from_amax(amax, fmt, policy)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(
            np.where(np.isnan(mine), -1, np.asarray(mine).view(np.int32)),
            np.where(np.isnan(theirs), -1, theirs.view(np.int32)),
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", E8M0, ids=lambda p: p.name)
@formats
def test_e8m0_scales_equal_the_simulators_for_every_amax(policy, fmt):  # S-14
    compare = jax.jit(lambda a: scales.scales_from_amax(a, fmt, policy).scale_inv)
    for start in range(0, 0x7F800001, 1 << 24):
        amax = np.arange(start, min(start + (1 << 24), 0x7F800001), dtype=np.uint32).view(
            np.float32
        )
        np.testing.assert_array_equal(
            np.asarray(compare(amax)).view(np.int32),
            sim.scales_from_amax(amax, fmt, policy).scale_inv.view(np.int32),
        )


def test_the_inverse_of_a_scale_is_a_second_rounding(rng):  # S-3
    """XLA would compute 1 / (448 / amax) as amax / 448: half of these differ."""
    amax = rng.uniform(0.1, 3, 1000).astype(np.float32)
    found = jax.jit(lambda a: scales.with_inverse(np.float32(448) / a))(amax)
    scale = np.float32(448) / amax
    np.testing.assert_array_equal(np.asarray(found.scale), scale)
    np.testing.assert_array_equal(np.asarray(found.scale_inv), np.float32(1) / scale)


def test_a_product_with_the_least_e8m0_scale_is_not_zero(rng):  # S-14
    """2^-127 is a subnormal, which XLA reads as 0; powers of two round nothing."""
    x = np.ldexp(rng.uniform(-2, 2, 1000), rng.integers(2, 127, 1000)).astype(np.float32)
    for scale in (2.0**-127, 2.0**-126, 1.0):
        found = jax.jit(scales.times_e8m0)(x, np.float32(scale))
        normal = abs(x * scale) >= 2.0**-126
        assert normal.sum() > 900
        np.testing.assert_array_equal(np.asarray(found)[normal], (x * scale)[normal])


def test_errors():
    with pytest.raises(ValueError, match=r"'flax'.*fp8ref.sim"):
        scales.scale_from_amax(np.float32(1), E4M3FN, "flax")
    with pytest.raises(ValueError, match=r"eps >= 1e-27"):
        scales.implemented(ScalePolicy(name="mine", eps=1e-28))
    with pytest.raises(ValueError, match=r"eps >= 1e-27.*got policy 'sglang_token'"):
        scales.implemented("sglang_token")


def test_subnormals_underflow_in_every_format_under_every_eps_that_is_taken():  # S-3
    """2^-126 bounds the subnormals of float32; below half a format's smallest subnormal they round
    to zero.
    """
    for largest, smallest_subnormal in [
        (448.0, 2.0**-9),
        (57344.0, 2.0**-16),
        (240.0, 2.0**-10),
        (57344.0, 2.0**-17),
    ]:
        assert 2.0**-126 * largest / 1e-27 < smallest_subnormal / 2
        assert np.isfinite(np.float32(largest / 1e-27))


@pytest.mark.parametrize("policy", ["mx_rceil", "te_mxfp8", "te_mxfp8_2.13"])
def test_quotients_below_the_table_have_the_least_exponent(policy):  # S-14
    """RN32(amax / 448) from the least subnormal number to 2^-127: k is -127, whose bits are
    00400000.
    """
    quotients = np.append(
        np.arange(1, 1 << 22, 4099, dtype=np.uint32).view(np.float32), np.float32(2.0**-127)
    )
    amaxes = (quotients.astype(np.float64) * 448).astype(np.float32)
    amaxes = amaxes[(amaxes.astype(np.float64) / 448).astype(np.float32) <= np.float32(2.0**-127)]
    assert len(amaxes) > 1000
    found = np.asarray(scales.scales_from_amax(jax.numpy.asarray(amaxes), E4M3FN, policy).scale_inv)
    assert (found.view(np.uint32) == 0x00400000).all()
