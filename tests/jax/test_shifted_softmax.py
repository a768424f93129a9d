"""Shifted scores in JAX: a step is the simulator's (spec A-26)."""

import jax
import jax.numpy as jnp
import numpy as np

from fp8ref.jax import shifted_softmax
from fp8ref.jax.online_softmax import Rows
from fp8ref.sim import online_softmax
from fp8ref.sim import shifted_softmax as sim


def test_a_step_is_the_simulators():
    rng = np.random.default_rng(0)
    state, mine = online_softmax.start(5), Rows(jnp.full(5, -jnp.inf), jnp.zeros((5, 4)))
    step = jax.jit(lambda s, f, rows, seen: shifted_softmax.step(s, f, rows, seen, 8.807, "stated"))
    for high in (32, 20):
        s, factor = rng.integers(-(2**20), 2**20, (5, 32)).astype(np.float32), rng.uniform(1e-6, 2e-6, (5, 32)).astype(np.float32)
        zeros = np.zeros(5, np.int64)
        p, c = sim.step(s, factor, state, online_softmax.Seen(zeros, np.full(5, high), zeros, np.zeros(32, np.int64)), np.float32(8.807))
        found, of_before, mine = step(s, factor, mine, np.broadcast_to(np.arange(32) < high, (5, 32)))
        for got, wanted in ((found, p), (of_before, c), (mine.maximum, state.maximum), (mine.sums, state.sums)):
            np.testing.assert_array_equal(got, wanted)


def test_last_tiles_are_counted():
    high = np.arange(200) + 1
    assert list(shifted_softmax.last_tiles(high, 200, 128)[[0, 63, 127, 128, 199]]) == [0, 0, 0, 1, 1]
    assert list(shifted_softmax.last_tiles(high, 200, 128)) == (sim.last_tiles(high, 200, 128) // 128).tolist()
