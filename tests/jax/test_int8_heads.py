"""INT8 q and k in JAX: which elements share a scale, and what is not a number (spec A-26)."""

import jax
import jax.numpy as jnp
import numpy as np

from fp8ref.formats import E4M3FN
from fp8ref.jax import int8_heads
from fp8ref.sim import int8_heads as sim


def test_codes_and_scales_are_the_simulators():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, n, t, 8)).astype(np.float32) for n, t in ((4, 37), (2, 130), (2, 130)))
    k += 3
    v[:, :, :, 2] = 0
    wanted = sim.quantize(q, k, v, E4M3FN)
    found, taken = jax.jit(lambda q, k, v: (int8_heads.quantize(q, k, v, E4M3FN), int8_heads.taken(q, k)))(q, k, v)
    for role, one in wanted.items():
        mine = found[role]
        np.testing.assert_array_equal(np.asarray(mine.codes).view(np.uint8), one.codes.view(np.uint8), err_msg=role)
        for name in ("amax", "scale", "scale_inv"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(one, name), err_msg=f"{role} {name}")
    np.testing.assert_array_equal(taken, sim.taken(q, k))


def test_a_nan_reaches_its_group():
    q = jnp.ones((1, 1, 32, 4)).at[0, 0, 3, 1].set(jnp.nan)
    found = jax.jit(lambda q, k: int8_heads.quantize(q, k, k, E4M3FN))(q, jnp.ones((1, 1, 4, 4)))
    assert np.flatnonzero(np.isnan(found["q"].scale_inv[0, 0, :, 0])).tolist() == [3]
