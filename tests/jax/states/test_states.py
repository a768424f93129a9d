"""AdamW with narrow states in JAX against the simulator: 0 bits differ (spec O)."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from helpers.states.jax_states import (
    HYPER,
    compiled,
    count,
    of_parameter,
    seeded,
    simulated,
    trained,
)
from helpers.states.state_layouts import (
    ALL,
    MASTERED,
    NEAREST,
    SHAPES,
    STOCHASTIC,
    differing,
    gradients_of,
    start,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.jax.quantize import scaling
from fp8ref.jax.states import states
from fp8ref.sim.states import states as sim
from fp8ref.spec.states.layouts import LAYOUTS, WITH_MASTERS


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", ALL)
def test_a_compiled_step_has_the_simulators_bits(name):  # O-2 to O-10
    optimizer = states.adamw(1e-3, layout=ALL[name], **seeded(ALL[name]))
    assert trained(compiled(optimizer), optimizer, ALL[name], 4) == 0


def simulated_masters(layout, steps: int):
    """Masters and states by name before the first and after each step; weights may be bfloat16."""
    p = {name: sim.master(x, layout) for name, x in start().items()}
    state = {name: sim.init(shape, layout) for name, shape in SHAPES.items()}
    yield dict(p), dict(state)
    for t in range(steps):
        g = gradients_of(t)
        for number, name in enumerate(sorted(SHAPES)):
            p[name], state[name] = sim.step(
                p[name],
                g[name],
                state[name],
                sim.AdamW(learning_rate=1e-2, layout=layout, **seeded(layout)),
                tensor=number,
            )
        yield dict(p), dict(state)


def count_masters(state: states.AdamWState, wanted) -> int:
    """How many elements of masters, moments, scales and amaxes differ."""
    total = 0
    for name in SHAPES:
        trees = (
            (state.master, wanted[0][name]),
            (state.m, wanted[1][name].m),
            (state.v, wanted[1][name].v),
        )
        for tree, expected in trees:
            for one, two in zip(of_parameter(tree, name), expected, strict=True):
                assert one is not None or two is None
                total += 0 if two is None else differing(one, two)
    return total


def trained_masters(layout, steps: int, dtype, *, place=lambda x: x) -> int:
    """Elements that differ from the simulator's; the program keeps no parameters from step to
    step.
    """
    optimizer = states.adamw(1e-2, layout=layout, **seeded(layout))

    @jax.jit
    def step(g, state):
        p = states.weights(state, layout, dtype)
        return optimizer.update(g, state, p)[1], p

    state = jax.jit(optimizer.init)(jax.tree.map(lambda x: place(jnp.asarray(x)), start()))
    first, *later = simulated_masters(layout, steps)
    total, before = count_masters(state, first), first
    for t, wanted in enumerate(later):
        state, p = step(jax.tree.map(lambda x: place(jnp.asarray(x)), gradients_of(t)), state)
        total += count_masters(state, wanted)
        for name in SHAPES:
            total += differing(
                p[name], np.asarray(sim.weight(before[0][name], layout).astype(dtype), np.float32)
            )
        before = wanted
    return total


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", MASTERED)
def test_masters_have_the_simulators_bits(name):  # O-14, O-15
    assert trained_masters(MASTERED[name], 4, jnp.bfloat16) == 0


def cut(x):
    """An array on 8 devices, cut by rows if they divide it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(
        x, NamedSharding(mesh, P("data") if x.ndim and x.shape[0] % 8 == 0 else P())
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["msamp_o2", "predicted_half"])
def test_a_mesh_changes_nothing_of_masters(name):  # O-11, O-15
    assert trained_masters(MASTERED[name], 3, jnp.float32, place=cut) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MASTERED)
def test_fifty_steps_of_masters_on_a_mesh(name):  # O-11, O-14, O-15
    assert trained_masters(MASTERED[name], 50, jnp.bfloat16, place=cut) == 0


@pytest.mark.parametrize("name", WITH_MASTERS)
def test_copies_are_those_of_a_cast_of_the_weights(name):  # O-16
    """Of exact masters by a pass over the weights, of predicted ones from the amax that they
    keep.
    """
    layout, w = MASTERED[name], start()["ragged"]
    master, state = sim.master(w, layout), sim.init(w.shape, layout)
    optimizer = states.adamw(1e-2, layout=layout, **HYPER)
    p = {"w": jnp.asarray(w)}
    found = optimizer.init(p)
    for t in range(3):
        g = gradients_of(t)["ragged"]
        master, state = sim.step(
            master, g, state, sim.AdamW(learning_rate=1e-2, layout=layout, **HYPER)
        )
        found = jax.jit(optimizer.update)({"w": jnp.asarray(g)}, found, p)[1]
        copy, wanted = (
            jax.jit(lambda s: states.copies(s, layout, "tensorwise"))(found)["w"],
            sim.copy(master, layout, "tensorwise"),
        )
        assert (
            differing(copy.codes, wanted.codes)
            == differing(copy.scale, wanted.scale)
            == differing(copy.scale_inv, wanted.scale_inv)
            == 0
        )
        own = scaling.quantize(states.weights(found, layout)["w"], copy.fmt)
        assert differing(own.codes, wanted.codes) == 0
    with pytest.raises(ValueError, match="recipe 'delayed' does not"):
        states.copies(found, layout, "delayed")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MASTERS)
def test_fifty_steps_of_masters(name):  # O-14, O-15
    assert trained_masters(MASTERED[name], 50, jnp.bfloat16) == 0


@pytest.mark.slow
def test_updates_of_masters_in_train_state():  # O-14
    """optax adds updates to the parameters: what it misses of the master is a rounding of the old
    parameter, and does not add up.
    """
    layout = MASTERED["msamp_o2"]
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), start_arrays())
    trainer = train_state.TrainState.create(
        apply_fn=None, params=params, tx=states.adamw(1e-2, layout=layout, **HYPER)
    )
    before = params
    for t in range(3):
        before, trainer = (
            trainer.params,
            jax.jit(lambda s, g: s.apply_gradients(grads=g))(trainer, gradients_of(t)),
        )
    exact = states.weights(trainer.opt_state, layout, jnp.bfloat16)
    for name in SHAPES:
        found, wanted, old = (
            np.asarray(tree[name], np.float32) for tree in (trainer.params, exact, before)
        )
        # the difference, of at most twice the larger, and the sum are rounded to float32; rounding
        # to bfloat16 at most doubles 3 units
        assert (
            np.abs(found - wanted) <= 6 * 2.0**-24 * np.maximum(np.abs(old), np.abs(wanted))
        ).all()
        assert (found == wanted).mean() > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, *STOCHASTIC])
def test_fifty_steps(name):  # O-2 to O-10
    optimizer = states.adamw(1e-3, b2=0.999, layout=ALL[name], **seeded(ALL[name]))
    assert trained(compiled(optimizer), optimizer, ALL[name], 50, b2=0.999) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["sqrt_e4m3", "torchao", "coat", "predicted", "stochastic", "stochastic_wide"]
)
def test_operation_by_operation(name):  # O-2 to O-10
    optimizer = states.adamw(1e-3, layout=ALL[name], **seeded(ALL[name]))

    def step(g, state, p):
        updates, state = optimizer.update(g, state, p)
        return optax.apply_updates(p, updates), state

    assert trained(step, optimizer, ALL[name], 3) == 0


def test_a_cut_by_columns_rounds_by_the_index_of_the_whole():  # O-8, O-11
    def columns(x):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        return jax.device_put(
            x, NamedSharding(mesh, P(None, "data") if x.shape == SHAPES["blocks"] else P())
        )

    optimizer = states.adamw(1e-3, layout=ALL["stochastic"], **seeded(ALL["stochastic"]))
    assert trained(compiled(optimizer), optimizer, ALL["stochastic"], 2, place=columns) == 0


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", ["sqrt_e4m3", "sqrt_e5m2", "msamp", "predicted", "stochastic"])
def test_a_mesh_changes_nothing(name):  # O-11
    optimizer = states.adamw(1e-3, layout=ALL[name], **seeded(ALL[name]))
    assert trained(compiled(optimizer), optimizer, ALL[name], 4, place=cut) == 0
    p = {"w": cut(jnp.zeros((16, 256)))}
    state = jax.jit(optimizer.init)(p)
    assert optimizer.init(p).m.codes["w"].sharding == p["w"].sharding
    assert state.m.codes["w"].shape == (16, 256)


@pytest.mark.parametrize(
    ("name", "of", "shape"),
    [("sqrt_e4m3", P(None, "x"), (4, 256)), ("coat", P("x", "y"), (4, 130))],
)
def test_explicit_axes_change_nothing(name, of, shape):  # O-11
    """A loop over steps carries equal types, as scales are whole on every device."""
    mesh, p = (
        jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2),
        np.linspace(-1, 1, math.prod(shape)),
    )
    p = p.astype(np.float32).reshape(shape)
    optimizer = states.adamw(1e-3, layout=name, **HYPER)
    wanted = jax.jit(optimizer.update)(
        jnp.asarray(p), optimizer.init(jnp.asarray(p)), jnp.asarray(p)
    )
    with jax.set_mesh(mesh):
        own = jax.device_put(p, NamedSharding(mesh, of))
        state = optimizer.init(own)
        found = jax.jit(optimizer.update)(own, state, own)
        stepped = jax.eval_shape(
            functools.partial(
                states.step, optimizer=states.AdamW(learning_rate=1e-3, layout=name, **HYPER)
            ),
            own,
            own,
            state,
        )
        types = [[jax.typeof(x) for x in jax.tree.leaves(tree)] for tree in ((own, state), found)]
        assert types[0] == types[1]
        assert [x.shape for x in jax.tree.leaves(stepped)] == [x.shape for x in types[0]]
        tx = states.adamw(1e-3, parameters=states.Parameters(stacked=True))
        with pytest.raises(ValueError, match="any dim of a stack but its first; got"):
            tx.init(jax.device_put(p, NamedSharding(mesh, P("x"))))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    assert all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def test_a_step_inside_shard_map():  # O-11
    """Of rows: blocks are whole on a device."""
    mesh, p = (
        jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)),
        jnp.linspace(-1, 1, 2048).reshape(8, 256),
    )

    def step(p):
        return states.step(p, p, states.adamw(1e-3).init(p), states.AdamW(learning_rate=1e-3))[0]

    found = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(p)
    assert np.asarray(found).tobytes() == np.asarray(step(p)).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_fifty_steps_on_a_mesh(name):  # O-2 to O-11
    optimizer = states.adamw(1e-3, b2=0.999, layout=ALL[name], **seeded(ALL[name]))
    assert trained(compiled(optimizer), optimizer, ALL[name], 50, place=cut, b2=0.999) == 0


@pytest.mark.slow
def test_a_loop_over_steps_and_unrolled_steps():  # O-4: a cast and back is not left out
    for name in ("msamp", "sqrt_e4m3", "bfloat16", "float16", "predicted"):
        layout = NEAREST[name]
        optimizer = states.adamw(1e-3, layout=layout, **HYPER)
        step = compiled(optimizer)
        gs = [gradients_of(t) for t in range(3)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *gs)
        begin = (jax.tree.map(jnp.asarray, start()), optimizer.init(start_arrays()))
        looped, _ = jax.lax.scan(
            lambda c, g, step=step: (step(g, c[1], c[0]), None), begin, stacked
        )

        @jax.jit
        def unrolled(carry, step=step, gs=gs):
            for g in gs:
                carry = step(g, carry[1], carry[0])
            return carry

        *_, wanted = simulated(layout, 3)
        assert count(*looped, wanted) == 0, name
        assert count(*unrolled(begin), wanted) == 0, name


def start_arrays():
    return jax.tree.map(jnp.asarray, start())


@pytest.mark.slow
def test_schedules_masks_and_moments_read_back():  # O-3, O-4
    schedule = optax.linear_schedule(1e-2, 0.0, 4)
    rates = [float(schedule(t)) for t in range(5)]
    optimizer = states.adamw(schedule, layout="sqrt_e4m3", **HYPER)
    assert (
        trained(
            compiled(optimizer),
            optimizer,
            LAYOUTS["sqrt_e4m3"],
            5,
            learning_rate=lambda t: rates[t],
        )
        == 0
    )
    decays = states.Parameters(mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    matrices = states.adamw(1e-2, layout="sqrt_e4m3", parameters=decays, **HYPER)
    p = {"w": jnp.ones((2, 128)), "b": jnp.ones(128)}
    g = jax.tree.map(jnp.zeros_like, p)
    updates, state = matrices.update(g, matrices.init(p), p)
    assert (updates["w"] == -np.float32(1e-2) * np.float32(0.1)).all()
    assert (updates["b"] == 0).all()
    _, state = matrices.update(p, state, p)
    m, v = states.decode(state)
    np.testing.assert_allclose(m["w"], 0.1, rtol=1e-6)
    np.testing.assert_allclose(v["b"], 0.05, rtol=1e-6)


@pytest.mark.slow
def test_in_optaxs_chain_train_state_and_multi_steps():
    chain = optax.chain(
        optax.clip_by_global_norm(1e6), states.adamw(1e-3, layout="sqrt_e4m3", **HYPER)
    )
    trainer = train_state.TrainState.create(apply_fn=None, params=start_arrays(), tx=chain)
    trainer = jax.jit(lambda t, g: t.apply_gradients(grads=g))(trainer, gradients_of(0))
    *_, wanted = simulated(LAYOUTS["sqrt_e4m3"], 1)
    assert sum(differing(trainer.params[name], wanted[0][name]) for name in SHAPES) == 0
    several = optax.MultiSteps(states.adamw(1e-3, layout="sqrt_e4m3", **HYPER), 2)
    state, p = several.init(start_arrays()), start_arrays()
    for _ in range(2):
        updates, state = jax.jit(several.update)(gradients_of(0), state, p)
        p = optax.apply_updates(p, updates)
    assert sum(differing(p[name], wanted[0][name]) for name in SHAPES) == 0


@pytest.mark.parametrize("jitted", [False, True])
def test_a_learning_rate_that_optax_injects(jitted):  # O-3
    static = ("b1", "b2", "eps", "weight_decay", "seed")
    tx = optax.inject_hyperparams(states.adamw, static_args=static)(
        learning_rate=1e-3, weight_decay=0.1
    )
    update, p = jax.jit(tx.update) if jitted else tx.update, {"w": jnp.ones((2, 128))}
    g, state = {"w": jnp.full((2, 128), 0.5)}, tx.init(p)
    wanted, of_sim = np.ones((2, 128), np.float32), sim.init((2, 128))
    for rate in (1e-3, 5e-2):
        state.hyperparams["learning_rate"] = jnp.float32(rate)
        updates, state = update(g, state, p)
        p = optax.apply_updates(p, updates)
        wanted, of_sim = sim.step(
            wanted, np.asarray(g["w"]), of_sim, sim.AdamW(learning_rate=rate, **HYPER)
        )
        assert differing(p["w"], wanted) == 0
        assert differing(state.inner_state.m.codes["w"], of_sim.m.codes) == 0
    with pytest.raises(
        ValueError,
        match=r"is a Python number; got a jax array\. .* name b1, b2, eps, weight_decay and seed "
        r"in static_args",
    ):
        optax.inject_hyperparams(states.adamw)(learning_rate=1e-3).init(p)


def test_a_mask_may_be_a_prefix_of_the_parameters():
    p = {"layer": {"w": jnp.ones((2, 128)), "b": jnp.ones(3)}, "norm": jnp.ones(3)}
    g = jax.tree.map(jnp.zeros_like, p)
    decays = states.Parameters(mask={"layer": True, "norm": False})
    optimizer = states.adamw(1e-2, weight_decay=0.5, parameters=decays)
    updates, _ = optimizer.update(g, optimizer.init(p), p)
    moved = jax.tree.map(lambda x: bool((x != 0).all()), updates)
    assert moved == {"layer": {"w": True, "b": True}, "norm": False}
    decays = states.Parameters(mask={"layer": True})
    wrong = states.adamw(1e-2, weight_decay=0.5, parameters=decays)
    with pytest.raises(
        ValueError,
        match="mask is a tree of booleans, of the parameters' structure or a prefix of it; got",
    ):
        wrong.update(g, wrong.init(p), p)


def test_masked_and_several_optimizers():
    """optax puts nodes without leaves where a parameter is another optimizer's."""
    p = {"w": jnp.ones((2, 128)), "b": jnp.ones(3)}
    g = jax.tree.map(lambda x: 0.5 * x, p)
    parts = {"states": states.adamw(1e-3), "rest": optax.sgd(1.0)}
    tx = optax.multi_transform(parts, {"w": "states", "b": "rest"})
    updates, _ = tx.update(g, tx.init(p), p)
    wanted, _ = sim.step(
        np.ones((2, 128), np.float32),
        np.full((2, 128), 0.5, np.float32),
        sim.init((2, 128)),
        sim.AdamW(learning_rate=1e-3),
    )
    assert differing(p["w"] + updates["w"], wanted) == 0
    assert (updates["b"] == -0.5).all()


def test_states_of_a_chain_and_of_others_are_refused():  # O-4, O-14
    p = {"w": jnp.ones((2, 128))}
    state, theirs = states.adamw(1e-3).init(p), optax.adamw(1e-3).init(p)
    for found in (theirs, optax.chain(states.adamw(1e-3)).init(p)):
        with pytest.raises(
            ValueError,
            match=r"a state is an AdamWState of fp8ref\.jax\.states; got tuple\. From an optax\.chain use its part",
        ):
            states.adamw(1e-3).update(p, found, p)
        with pytest.raises(ValueError, match="a state is an AdamWState"):
            states.decode(found)
    with pytest.raises(
        ValueError, match="a state of layout 'msamp_o2' has masters; got one without"
    ):
        states.weights(state, "msamp_o2")
    with pytest.raises(
        ValueError, match="a state of layout 'msamp_o2' has masters; got one without"
    ):
        states.copies(state, "msamp_o2", "tensorwise")


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", ["sqrt_e4m3", "sqrt_e4m3_f16"])
def test_a_step_is_an_update_and_its_sum(name):  # O-6, O-14
    """With a factor of the gradients, and without a step that is not finite."""
    layout = {**LAYOUTS, **WITH_MASTERS}[name]
    optimizer, p, g = states.adamw(1e-3, layout=layout, **HYPER), start_arrays(), gradients_of(0)
    twice = jax.tree.map(lambda x: np.asarray(x) * np.float32(2), g)
    by = states.AdamW(learning_rate=1e-3, layout=layout, **HYPER)
    step = jax.jit(
        lambda p, g, state, finite: states.step(p, g, state, by, factor=0.5, finite=finite)
    )
    state = optimizer.init(p)
    updates, wanted = jax.jit(optimizer.update)(g, state, p)
    new = (
        states.weights(wanted, layout, jnp.float32)
        if layout.keeps_master
        else optax.apply_updates(p, updates)
    )
    taken, kept = (step(p, twice, state, jnp.bool_(finite)) for finite in (True, False))
    for found, expected in ((taken, (new, wanted)), (kept, (p, state))):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        assert all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


@pytest.mark.parametrize("jitted", [True, False])
def test_a_step_of_an_ensemble(jitted):
    """The kernel of GPUs is not batched: XLA's step is, with the same bits."""
    p, g = (
        jnp.stack([jnp.full((2, 128), x) for x in (1.0, 3.0)]),
        jnp.linspace(-1, 1, 512).reshape(2, 2, 128),
    )
    one = functools.partial(states.step, optimizer=states.AdamW(learning_rate=1e-3, **HYPER))
    optimizer = states.adamw(1e-3, **HYPER)
    found = (jax.vmap(jax.jit(one)) if jitted else jax.vmap(one))(p, g, jax.vmap(optimizer.init)(p))
    for i in range(2):
        wanted = one(p[i], g[i], optimizer.init(p[i]))
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
        assert all(np.asarray(x[i]).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


@pytest.mark.slow
def test_what_is_not_finite_is_nan():  # O-2
    p = {"w": jnp.ones((2, 256))}
    for name, layout in NEAREST.items():
        optimizer = states.adamw(1e-3, layout=layout)
        g = jnp.ones((2, 256)).at[0, 3].set(jnp.inf)
        updates, state = jax.jit(optimizer.update)({"w": g}, optimizer.init(p), p)
        assert jnp.isnan(updates["w"]).sum() == 1, name
        _, wanted = sim.step(
            np.ones((2, 256), np.float32),
            np.asarray(g),
            sim.init((2, 256), layout),
            sim.AdamW(learning_rate=1e-3, layout=layout),
        )
        assert (
            differing(state.m.codes["w"], wanted.m.codes) == 0 or wanted.m.codes.dtype != np.uint8
        ), name


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", ["te", "msamp_o2"])
@pytest.mark.parametrize("row", [0, 7, 15])
def test_what_is_not_finite_reaches_all_devices(name, row):  # O-2, O-11, P-3
    """Of one device's rows: a collective's maximum may drop a NaN.

    The moments of all elements share a scale, and are NaN.
    """
    layout, g, w = (
        {**LAYOUTS, **WITH_MASTERS}[name],
        np.ones((16, 256), np.float32),
        np.ones((16, 256), np.float32),
    )
    g[row, 3] = np.nan
    tx = states.adamw(1e-3, layout=layout)
    state = tx.init({"w": cut(jnp.asarray(w))})
    state = jax.jit(tx.update)({"w": cut(jnp.asarray(g))}, state, {"w": cut(jnp.asarray(w))})[1]
    m, v = states.decode(state, layout)
    assert np.isnan(np.asarray(m["w"])).all()
    assert np.isnan(np.asarray(v["w"])).all()
    if layout.keeps_master:
        assert np.isnan(np.asarray(states.weights(state, layout)["w"], np.float32)).all()


@pytest.mark.parametrize("name", ["sqrt_e4m3", "msamp_o2"])
def test_a_schedule_that_leaves_the_range_makes_nan(name):  # O-2
    """Of its second rate; a rate that is known before is refused."""
    tx = states.adamw(lambda count: jnp.where(count == 0, 1e-3, 1025.0), layout=name)
    p, g = {"w": jnp.ones((1, 128))}, {"w": jnp.full((1, 128), 0.5)}
    update = jax.jit(tx.update)
    updates, state = update(g, tx.init(p), p)
    assert np.isfinite(np.asarray(updates["w"])).all()
    updates, state = update(g, state, p)
    assert np.isnan(np.asarray(updates["w"])).all()
    assert all(np.isfinite(np.asarray(x)).all() for x in states.decode(state, name)[0].values())
    negative = jax.jit(
        lambda rate: states.step(p, g, tx.init(p), states.AdamW(learning_rate=rate, layout=name))[0]
    )
    assert np.isnan(np.asarray(negative(-1e-3)["w"])).all()
    for rate in (-1e-3, 1025.0, np.float32(np.nan)):
        for given in (rate, jnp.float32(rate)):
            with pytest.raises(ValueError, match=r"learning_rate is in \[0, 1024\]; got"):
                states.adamw(given, layout=name)


def test_bad_input_is_refused_by_name():  # O-1, O-2, O-4
    with pytest.raises(ValueError, match="layout is a Layout or one of"):
        states.adamw(1e-3, layout="adam8bit")
    with pytest.raises(ValueError, match="eps is in"):
        states.adamw(1e-3, eps=0.0)
    with pytest.raises(ValueError, match="learning_rate is in"):
        states.adamw(-1e-3)
    with pytest.raises(ValueError, match="bounded"):
        states.adamw(1e-3, b1=0.99, b2=0.9)
    with pytest.raises(
        ValueError, match="'sqrt_e4m3' rounds to nearest and has no use for a seed; got seed=1"
    ):
        states.adamw(1e-3, seed=1)
    for wrong in (None, "1e-3", jnp.ones(2), np.ones(1)):
        with pytest.raises(
            ValueError,
            match=r"learning_rate is a number, an array of shape \(\) or a schedule; got",
        ):
            states.adamw(wrong)
    with pytest.raises(ValueError, match="weight_decay is a number; got <function"):
        states.adamw(1e-3, weight_decay=optax.constant_schedule(0.1))
    optimizer, p = states.adamw(1e-3), {"w": jnp.ones((4, 4))}
    rates = states.adamw(lambda count: jnp.full((4, 1), 1e-3))  # a rate of each row
    with pytest.raises(
        ValueError,
        match=r"a schedule gives a number or an array of shape \(\); got one of shape \(4, 1\)",
    ):
        rates.update(p, rates.init(p), p)
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update(p, optimizer.init(p))
    with pytest.raises(ValueError, match="takes non-empty float32 parameters; got bfloat16"):
        optimizer.init({"w": jnp.ones(4, jnp.bfloat16)})
    with pytest.raises(ValueError, match="non-empty"):
        optimizer.init({"w": jnp.ones((0, 4))})
    halves = states.adamw(1e-3, layout="msamp_o2")
    with pytest.raises(
        ValueError, match="takes non-empty float32 or bfloat16 parameters; got float16"
    ):
        halves.init({"w": jnp.ones(4, jnp.float16)})
    with pytest.raises(
        ValueError, match="a state of layout 'msamp_o2' has masters; got one without"
    ):
        halves.update(p, states.adamw(1e-3, layout="msamp").init(p), p)
    with pytest.raises(ValueError, match="masters of layout 'msamp' are the parameters themselves"):
        states.weights(halves.init(p), "msamp")
    with pytest.raises(
        ValueError, match=r"a gradient has its parameter's shape, \(4, 4\); got \(4,\)"
    ):
        optimizer.update({"w": jnp.ones(4)}, optimizer.init(p), p)
    other = states.adamw(1e-3, layout="msamp").init(p)
    with pytest.raises(
        ValueError,
        match=r"layout 'sqrt_e4m3' has m.scaling = 'multiply', saved 'power_of_two'; .* States "
        r"of another layout",
    ):
        optimizer.update(p, other, p)
    with pytest.raises(
        ValueError,
        match=r"under layout 'sqrt_e4m3' is .* States of another layout are not converted",
    ):
        jax.jit(optimizer.update)(p, other, p)
    with pytest.raises(ValueError, match="States of another layout"):
        states.decode(other)


def test_b1_of_zero_and_a_bound_that_is_none():  # O-3
    free = dataclasses.replace(LAYOUTS["sqrt_e4m3"], bounded=False, name="free")
    for b1, b2 in ((0.0, 0.9), (0.99, 0.9)):
        optimizer = states.adamw(1e-3, b1, b2, layout=free, **HYPER)
        assert trained(compiled(optimizer), optimizer, free, 3, b1=b1, b2=b2) == 0
