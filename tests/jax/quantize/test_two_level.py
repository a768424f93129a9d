"""Two levels of scales in JAX: codes and scales are the simulator's, bit for bit (S-22)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.formats import E2M1FN, E4M3FN
from fp8ref.jax.quantize import philox, scales, scaling
from fp8ref.policy import FP4_POLICIES
from fp8ref.sim.quantize import scaling as sim

POLICIES = {name: p.two_level for name, p in FP4_POLICIES.items() if p.two_level.tensorwise}
GRANULARITIES = ("nvfp4_1x16", "nvfp4_16x16")


def tensors(rng) -> list[np.ndarray]:
    """Wide, near each other, tiny, zero; with an infinity, with a NaN; [40, 64]."""
    shape = (40, 64)
    wide = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))
    near = rng.uniform(-6, 6, shape)
    each = [wide, near, wide * 1e-9, np.zeros(shape), wide.copy(), wide.copy()]
    each[4][3, 5], each[5][7, 60] = np.inf, np.nan
    return [x.astype(np.float32) for x in each]


def check(q, expected):
    """Every array of q is the simulator's."""
    np.testing.assert_array_equal(np.asarray(q.code_bits), expected.codes)
    for key in ("scale", "scale_inv", "tensor_scale_inv"):
        own, wanted = getattr(q, key), getattr(expected, key)
        assert (own is None) == (wanted is None), key
        if wanted is not None:
            np.testing.assert_array_equal(np.asarray(own), wanted, err_msg=key)
    np.testing.assert_array_equal(np.asarray(scaling.dequantize(q)), sim.dequantize(expected))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_codes_and_scales_are_the_simulators(policy, granularity, rng):  # S-22
    about = {"granularity": granularity, "policy": policy}
    quantize = jax.jit(lambda x: scaling.quantize(x, E2M1FN, **about))
    for x in tensors(rng):
        check(quantize(x), sim.quantize(x, E2M1FN, **about))


@pytest.mark.parametrize("rounding", ["stochastic", "stochastic_8"])
def test_stochastic_codes_along_either_axis_are_the_simulators(rounding, rng):  # C-2, S-24
    x = tensors(rng)[1][:32].astype(jnp.bfloat16)
    about = {"granularity": "nvfp4_1x16", "policy": "te_nvfp4"}
    seed = 0xF00D_0000_0007
    draws = philox.Random(philox.halves(seed), 8 if rounding == "stochastic_8" else 48)
    q = jax.jit(lambda x: scaling.quantize(x, E2M1FN, random=draws, **about))(x)
    check(q, sim.quantize(x, E2M1FN, rounding=rounding, seed=seed, **about))
    # the flat index counts with the reduced axis last
    index = jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape[::-1]).T
    draws = philox.Random(draws.key, draws.bits, index)
    q = jax.jit(lambda x: scaling.quantize(x, E2M1FN, axis=0, random=draws, **about))(x)
    expected = sim.quantize(x.T, E2M1FN, rounding=rounding, seed=seed, **about)
    np.testing.assert_array_equal(np.asarray(q.code_bits).T, expected.codes)


def test_a_policy_of_two_levels_needs_both_amaxes_and_e2m1fn():  # S-22
    with pytest.raises(ValueError, match="policy 'te_nvfp4' needs the amax of the tensor too"):
        scales.scales_from_amax(jnp.ones(()), E2M1FN, "te_nvfp4")
    for fmt, policy, message in (
        (E4M3FN, "te_nvfp4", "scales of two levels are of e2m1fn; got e4m3fn"),
        (E2M1FN, "te_nvfp4_row", "got policy 'te_nvfp4_row'"),
    ):
        with pytest.raises(ValueError, match=message):
            scaling.quantize(jnp.ones((16, 16)), fmt, granularity="nvfp4_1x16", policy=policy)
