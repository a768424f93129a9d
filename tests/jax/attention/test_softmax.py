"""The online softmax of given scores has the simulator's bits (spec A-5, A-7, A-11)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.jax.attention import softmax as online_softmax
from fp8ref.sim.attention import attention as sim_attention
from fp8ref.sim.attention import softmax as sim
from fp8ref.spec.attention.variants import VARIANTS

F = np.float32
NAMES = [name for name in VARIANTS if name != "exact"]
LAGGING = {"lagging": dataclasses.replace(VARIANTS["cudnn"], threshold=2.0)}


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", [*NAMES, "lagging"])
def test_tiles(name):
    """Three tiles, of which the first hides all keys from row 0, and all tiles do from row 1."""
    variant = (VARIANTS | LAGGING)[name]
    rng, raw = np.random.default_rng(0), variant.scores == "raw"
    rows = keys = 64
    factor = F(0.37) if raw else F(1)
    mine, other = online_softmax.start(jnp.zeros(rows), variant.sum_order), sim.start(rows)
    step = jax.jit(
        lambda s, rows, seen: online_softmax.step(
            s, rows, seen, variant, jnp.float32(factor) if raw else None, "stated"
        )
    )
    for n in range(3):
        s = (rng.standard_normal((rows, keys)) * 4).astype(F)
        low, high = np.zeros(rows, np.int64), np.full(rows, keys)
        high[0], high[1], low[2], high[3] = (0, keys, keys)[n], 0, 7, 50
        seen = sim.Seen(low, high, np.zeros(rows, np.int64), np.zeros(keys, np.int64))
        p, c = sim.step_plain(s, other, seen, variant, np.empty(0, F), factor)
        visible = (np.arange(keys) >= low[:, None]) & (np.arange(keys) < high[:, None])
        found, of_before, mine = step(s, mine, visible)
        np.testing.assert_array_equal(found, p)
        np.testing.assert_array_equal(of_before, c)
        np.testing.assert_array_equal(mine.maximum, other.maximum)
    total = sim.total(other, variant.sum_order)
    np.testing.assert_array_equal(online_softmax.total(mine, variant.sum_order), total)
    lse = jax.jit(
        lambda m, total: online_softmax.log_sum(
            m, total, jnp.float32(factor) if raw else None, variant
        )
    )(mine.maximum, total)
    np.testing.assert_array_equal(lse, sim_attention.log_sum(other.maximum, total, factor, variant))
    assert lse[1] == -np.inf


def test_probabilities_again():
    s, lse = F([[1, 2, 3], [4, 5, 6]]), F([3, -np.inf])
    seen = jnp.asarray([[True, True, False], [False] * 3])
    found = online_softmax.again(jnp.asarray(s), jnp.asarray(lse), seen, None, "stated")
    np.testing.assert_array_equal(found, F([[np.exp(-2.0), np.exp(-1.0), 0], [0, 0, 0]]))
    raw = online_softmax.again(
        jnp.asarray(s), jnp.zeros(2), jnp.full((2, 3), True), jnp.float32(2), "stated"
    )
    np.testing.assert_array_equal(raw, F(2.0) ** (2 * s))
