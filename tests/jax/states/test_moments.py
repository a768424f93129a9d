"""Moments in JAX: what XLA would change in them is prevented, or seen (spec O-7, O-10)."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.states.jax_states import HYPER, compiled, of_parameter, trained
from helpers.states.state_layouts import differing

from fp8ref.jax.states import moments, states
from fp8ref.sim.quantize import cast as sim_cast
from fp8ref.sim.states import states as sim
from fp8ref.spec.states.layouts import LAYOUTS


def near_ties(layout, rng) -> np.ndarray:
    """A first gradient, a block to a row, whose scaled m is within some ulps of a tie between two
    codes, but for the extremes of each row.
    """
    g = np.exp2(rng.uniform(-12, -4, (32, layout.m.block))).astype(np.float32)
    stored = sim.step(
        np.zeros_like(g), g, sim.init(g.shape, layout), sim.AdamW(learning_rate=0.0, layout=layout)
    )[1].m
    numbers = sim_cast.decode(np.arange(40, 126, dtype=np.uint8), layout.m.fmt).astype(np.float64)
    ties = rng.choice((numbers[:-1] + numbers[1:]) / 2, g.shape)
    inverse, exponent, center = (
        np.ones(1) if part is None else np.float64(part)[:, None]
        for part in (stored.scale_inv, stored.exponent, stored.center)
    )
    m = center * (ties * inverse) ** (1 / exponent)
    near = (m / np.float32(1 - np.float64(0.9))).astype(np.float32)
    near = (near.view(np.int32) + rng.integers(-2, 3, g.shape, np.int32)).view(np.float32)
    least, most = g.min(1, keepdims=True), g.max(1, keepdims=True)
    return np.where((least < near) & (near < most) & (least < g) & (g < most), near, g)


@pytest.mark.parametrize("name", ["torchao", "coat", "sqrt_e4m3"])
def test_quotients_next_to_ties_are_quotients(name):  # O-7, O-10
    """XLA makes a division by one number a row a product with its reciprocal, an ulp off. That
    changes a code in a million, but many of these."""
    layout = LAYOUTS[name]
    g = near_ties(layout, np.random.default_rng(0))
    p = np.zeros_like(g)
    optimizer = states.adamw(1e-3, layout=layout)
    found = compiled(optimizer)(
        {"p": jnp.asarray(g)}, optimizer.init({"p": jnp.asarray(p)}), {"p": jnp.asarray(p)}
    )[1]
    expected = sim.step(
        p, g, sim.init(p.shape, layout), sim.AdamW(learning_rate=1e-3, layout=layout)
    )[1]
    for mine, theirs in (
        (of_parameter(found.m, "p"), expected.m),
        (of_parameter(found.v, "p"), expected.v),
    ):
        assert sum(differing(a, b) for a, b in zip(mine, theirs, strict=True) if b is not None) == 0


# the guard of O's one rounding an operation
def test_a_product_and_a_sum_that_are_fused_are_seen(monkeypatch):
    monkeypatch.setattr(moments, "product", lambda a, b: a * b)
    optimizer = states.adamw(1e-3, layout="float32", **HYPER)
    assert trained(compiled(optimizer), optimizer, LAYOUTS["float32"], 4) > 0


def test_a_quotient_that_is_rewritten_is_seen(monkeypatch):  # O-7
    monkeypatch.setattr(moments, "quotient", lambda a, b: a / b)
    optimizer = states.adamw(1e-3, layout="torchao", **HYPER)
    assert trained(compiled(optimizer), optimizer, LAYOUTS["torchao"], 4) > 0
