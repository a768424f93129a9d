"""The health of states measured on the devices against the simulator's (spec O-12)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.states.state_layouts import ALL, SHAPES, gradients_of, idle_and_stalling, start
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.jax.states import health, states
from fp8ref.sim.states import health as simulated
from fp8ref.sim.states import states as sim
from fp8ref.spec.states.health import COUNTS


def measured(layout, place=lambda x: x) -> int:
    """How many counts differ from the simulator's over three steps and the tensors of SHAPES;
    figures are checked.
    """
    optimizer = states.adamw(1e-3, layout=layout, seed=7 * layout.stochastic)

    @jax.jit
    def step(g, state, p):
        after = optimizer.update(g, state, p)[1]
        return after, health.measure(g, state, after, layout=layout)

    p = jax.tree.map(lambda x: place(jnp.asarray(x)), start())
    state, expected, differing = (
        optimizer.init(p),
        {name: sim.init(shape, layout) for name, shape in SHAPES.items()},
        0,
    )
    for t in range(3):
        g = gradients_of(t)
        state, found = step(jax.tree.map(lambda x: place(jnp.asarray(x)), g), state, p)
        rows = dict(zip(sorted(SHAPES), health.numbers(found), strict=True))
        for number, name in enumerate(sorted(SHAPES)):
            seed = 7 * layout.stochastic
            optimizer_of_sim = sim.AdamW(learning_rate=1e-3, layout=layout, seed=seed)
            after = sim.step(
                start()[name], g[name], expected[name], optimizer_of_sim, tensor=number
            )[1]
            wanted = simulated.numbers(
                g[name], expected[name], after, b1=0.9, b2=0.95, eps=1e-8, layout=layout
            )
            expected[name] = after
            row, n = rows[name], len(COUNTS)
            differing += int((row[:n] != wanted[:n]).sum())
            # A float32 sum of 16 rows of 256: 272 roundings of 2^-24, and four of each term. A
            # difference of roots errs by the roots too.
            relative = 280 * 2.0**-24
            np.testing.assert_allclose(
                row[[n, n + 2, n + 3, n + 4]], wanted[[n, n + 2, n + 3, n + 4]], rtol=relative
            )
            assert abs(row[n + 1] - wanted[n + 1]) <= relative * wanted[n] + relative * abs(
                wanted[n + 1]
            )
    return differing


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "name", ["sqrt_e4m3", "stochastic", "coat", "previous", "float16", "torchao"]
)
def test_counts_are_the_simulators(name):  # O-12
    assert measured(ALL[name]) == 0


@pytest.mark.parametrize("case", idle_and_stalling())
def test_bounded_and_stalled_have_one_reading(case):  # O-6, O-12
    layout, gradients, counts = idle_and_stalling()[case]
    optimizer, p = states.adamw(1e-3, layout=layout), jnp.ones(gradients.shape[1])
    state = optimizer.init(p)
    for g in gradients:
        before, (_, state) = state, optimizer.update(jnp.asarray(g), state, p)
    (row,) = health.numbers(health.measure(jnp.asarray(g), before, state, layout=layout))
    assert {key: int(row[COUNTS.index(key)]) for key in counts} == counts


@pytest.mark.slow
def test_a_mesh_changes_no_count():  # O-11, O-12
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(x):
        return jax.device_put(
            x, NamedSharding(mesh, P("data") if x.ndim and x.shape[0] % 8 == 0 else P())
        )

    assert measured(ALL["sqrt_e5m2"], place) == 0


def test_states_of_another_layout_are_refused():  # O-12
    optimizer, p = states.adamw(1e-3), {"w": jnp.ones((2, 128))}
    before = optimizer.init(p)
    after = optimizer.update(p, before, p)[1]
    with pytest.raises(
        ValueError, match=r"layout 'coat' has m.scaling = 'divide', saved 'multiply'"
    ):
        health.measure(p, before, after, layout="coat")
    # under jit texts are not known
    with pytest.raises(
        ValueError, match="tree of the parameters for each of codes, scale_inv, exponent, center"
    ):
        jax.jit(lambda before, after: health.measure(p, before, after, layout="coat"))(
            before, after
        )


def test_large_ratios_stay_in_range():  # O-12
    """A lost v divides by eps alone: the square of the ratio is beyond float32."""
    layout = ALL["te"]
    optimizer = states.adamw(1e-3, layout=layout, eps=2.0**-50)
    p = {"w": jnp.ones(2)}
    g = {"w": jnp.array([2.0**50, 2.0**40], jnp.float32)}
    before = optimizer.init(p)
    after = optimizer.update(g, before, p)[1]
    (found,) = health.numbers(health.measure(g, before, after, eps=2.0**-50, layout=layout))
    wanted = simulated.numbers(
        np.asarray(g["w"]),
        sim.init((2,), layout),
        sim.step(
            np.ones(2, np.float32),
            np.asarray(g["w"]),
            sim.init((2,), layout),
            sim.AdamW(learning_rate=1e-3, eps=2.0**-50, layout=layout),
        )[1],
        b1=0.9,
        b2=0.95,
        eps=2.0**-50,
        layout=layout,
    )
    assert found[1] == 1
    assert wanted[-2] > 2.0**128
    np.testing.assert_allclose(found, wanted, rtol=2.0**-20)
