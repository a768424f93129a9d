import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.training.histories import CONFIGS, ROLES, margin, recipe_of

from fp8ref.formats import BFLOAT16, FLOAT32
from fp8ref.jax import delayed
from fp8ref.jax.flax import flax_recipe
from fp8ref.jax.linear import linear
from fp8ref.recipe import RECIPES
from fp8ref.sim import delayed as sim
from fp8ref.sim import linear as sim_linear
from fp8ref.spec.delayed import DELAYED, DelayedScaling


def seen_of(use: sim.Observation) -> np.ndarray:
    return np.stack(
        [np.where(use.seen & ~use.non_finite, use.amax, 0), use.non_finite & use.seen, use.seen],
        axis=-1,
    ).astype(np.float32)


def assert_states_equal(ours, theirs):
    for name, value in theirs._asdict().items():
        np.testing.assert_array_equal(np.asarray(getattr(ours, name)), value, err_msg=name)


@pytest.mark.grid(2)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_states_equal_the_simulators(config, rng):  # H-1 to H-6, H-9
    """8 layers, 40 steps: amaxes over 60 binades, zeros, tiny and subnormal ones, non-finite ones,
    and layers not used.
    """
    recipe, layers = recipe_of(config), 8
    states, expected = (
        delayed.init(recipe, (layers,)),
        {role: sim.init(config, (layers,)) for role in ROLES},
    )
    advance = jax.jit(lambda state, seen: delayed.update(state, seen, recipe=recipe))
    for _ in range(40):
        amax = (2.0 ** rng.uniform(-30, 30, layers)).astype(np.float32)
        amax = np.select(
            [rng.random(layers) < p for p in (0.1, 0.1, 0.1)],
            [np.float32(0), np.float32(1e-37), np.float32(3e-41)],
            amax,
        ).astype(np.float32)
        use = sim.observe(amax, non_finite=rng.random(layers) < 0.2, seen=rng.random(layers) < 0.8)
        states = advance(states, {role: jnp.asarray(seen_of(use)) for role in ROLES})
        for role, fmt in ROLES.items():
            expected[role] = sim.update(expected[role], use, config=config, fmt=fmt)
            assert_states_equal(states[role], expected[role])


def test_flaxs_states_equal_the_simulators(rng):  # H-10
    """As above, but by flax's decisions, in its arithmetic, where subnormals are flushed; an
    infinity is recorded, a NaN as one.
    """
    config = dataclasses.replace(DELAYED["flax"], history_length=3, reuse="max", unused="keep")
    recipe, layers = recipe_of(config), 8
    states, expected = (
        delayed.init(recipe, (layers,)),
        {role: sim.init(config, (layers,)) for role in ROLES},
    )
    advance = jax.jit(lambda state, seen: delayed.update(state, seen, recipe=recipe))
    used = jax.jit(lambda state: delayed.scales(state, recipe))
    for _ in range(40):
        amax = (2.0 ** rng.uniform(-30, 30, layers)).astype(np.float32)
        amax = np.select(
            [rng.random(layers) < p for p in (0.1, 0.1, 0.1)],
            [np.float32(0), np.float32(1e-36), np.float32(np.inf)],
            amax,
        )
        use = sim.observe(amax.astype(np.float32), seen=rng.random(layers) < 0.8)
        seen = seen_of(
            use._replace(amax=np.where(np.isinf(amax), 0, use.amax), non_finite=np.isinf(amax))
        )
        for role, fmt in ROLES.items():
            np.testing.assert_array_equal(
                used(states)[role], sim.scales(expected[role], config, fmt).scale_inv
            )
            expected[role] = sim.update(expected[role], use, config=config, fmt=fmt)
        states = advance(states, {role: jnp.asarray(seen) for role in ROLES})
        for role in ROLES:
            assert_states_equal(states[role], expected[role])


@pytest.fixture
def steps(rng):
    """Five steps' x [2, 24, 64], w [32, 64], g [2, 24, 32] for which every sum is exact in any
    order; their magnitudes grow and shrink.
    """
    shapes = ((2, 24, 64), (32, 64), (2, 24, 32))
    return [
        [
            rng.integers(-7, 8, shape).astype(np.float32) * np.float32(s * 2.0**k)
            for shape, s in zip(shapes, (1, 2.0**-6, 2.0**-10), strict=True)
        ]
        for k in (0, 3, -2, 0, 5)
    ]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_training_steps_equal_the_simulator(steps, dtype):  # H-1 to H-4, L-2, L-3, L-6
    """Outputs and gradients are compared under power-of-two scales, where all sums are exact; the
    state under any.
    """
    config = DelayedScaling(name="mine", history_length=3, policy=margin(0))
    recipe, state = recipe_of(config), delayed.init(recipe_of(config))
    expected = {role: sim.init(config) for role in ROLES}

    @jax.jit
    def step(x, w, g, state, seen):
        def apply(x, w, seen):
            return linear.apply(x, w, recipe=recipe, state=state, seen=seen)

        (y, forward), vjp = jax.vjp(apply, x, w, seen)
        return y, forward, vjp((g, jax.tree.map(jnp.zeros_like, forward)))

    out = BFLOAT16 if dtype == jnp.bfloat16 else FLOAT32
    for x, w, g in steps:
        power = {role: 2.0 ** np.floor(np.log2(np.asarray(s.stored))) for role, s in state.items()}
        state = {role: s._replace(stored=jnp.float32(power[role])) for role, s in state.items()}
        expected = {
            role: s._replace(stored=np.float32(power[role])) for role, s in expected.items()
        }
        y, forward, (grad_input, grad_weight, backward) = step(
            *(jnp.asarray(v, dtype) for v in (x, w, g)), state, delayed.unseen(recipe)
        )
        scales = {role: sim.scales(expected[role], config, fmt) for role, fmt in ROLES.items()}
        np.testing.assert_array_equal(
            np.asarray(y, np.float32),
            sim_linear.forward(x, w, recipe, scales=scales, out_dtype=out),
        )
        dx, dw = sim_linear.backward(g, x, w, recipe, scales=scales, out_dtype=out)
        np.testing.assert_array_equal(np.asarray(grad_input, np.float32), dx)
        np.testing.assert_array_equal(np.asarray(grad_weight, np.float32), dw)
        state = delayed.update(state, delayed.merge(forward, backward), recipe=recipe)
        for (role, fmt), value in zip(ROLES.items(), (x, w, g), strict=True):
            expected[role] = sim.update(
                expected[role], sim.observe(np.abs(value).max()), config=config, fmt=fmt
            )
            assert_states_equal(state[role], expected[role])


X, W = (
    np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    for shape in ((4, 24, 64), (32, 64))
)
DELAYED_RECIPE = RECIPES["delayed"]


def one(x, w, seen, state=None):
    state = delayed.init("delayed") if state is None else state
    y, seen = linear.apply(x, w, recipe="delayed", state=state, seen=seen)
    return y, seen


def observed(function, x=X, w=W, seen=None):
    """What a step over function(x, w, seen) -> (y, seen) observes, whose loss is a sum of
    squares.
    """

    def loss(w, seen):
        y, seen = function(jnp.asarray(x), w, seen)
        return (y**2).sum(), seen

    given = delayed.unseen("delayed") if seen is None else seen
    (_, forward), (_, backward) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        jnp.asarray(w), given
    )
    return {role: np.asarray(v) for role, v in delayed.merge(forward, backward).items()}


def microbatches(x, w, seen):
    seen, y = jax.lax.scan(lambda seen, x: one(x, w, seen)[::-1], seen, x)
    return y, seen


def remat(x, w, seen):
    return jax.checkpoint(one)(x, w, seen)


def reused(x, w, seen):
    first, seen = one(x[:2], w, seen)
    second, seen = one(x[2:], w, seen)
    return jnp.concatenate([first, second]), seen


def mapped(x, w, seen):
    return jax.vmap(one, in_axes=(0, None, None), out_axes=(0, None))(x, w, seen)


def mapped_twice(x, w, seen):
    halves = x.reshape(4, 2, 12, 64)
    return jax.vmap(mapped, in_axes=(0, None, None), out_axes=(0, None))(halves, w, seen)


def chosen(x, w, seen):
    return jax.lax.cond(
        w[0, 0] < 100, lambda: one(x, w, seen), lambda: (jnp.zeros((4, 24, 32)), seen)
    )


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "way", [microbatches, remat, reused, mapped, mapped_twice, chosen], ids=lambda f: f.__name__
)
def test_a_step_is_one_observation_however_it_is_cut(way):  # H-4
    """Scale 1 at first, under which every cut gives the same output, and so the same gradients to
    observe.
    """
    whole, parts = observed(one), observed(way)
    assert whole["input"].tolist() == [np.abs(X).max(), 0, 1]
    assert whole["weight"].tolist() == [np.abs(W).max(), 0, 1]
    assert whole["grad_output"][1:].tolist() == [0, 1]
    for role in ROLES:
        # An element's sum over K may run in another order: 64 terms, each up to |a b| <= 5 * 5, at
        # 2^-24 each; all of it twice in the loss.
        np.testing.assert_allclose(
            parts[role], whole[role], rtol=64 * 25 * 2.0**-24 if role == "grad_output" else 0
        )


def test_a_branch_not_taken_is_not_seen():  # H-5
    def skipped(x, w, seen):
        return jax.lax.cond(
            w[0, 0] > 100, lambda: one(x, w, seen), lambda: (jnp.zeros((4, 24, 32)), seen)
        )

    seen = observed(skipped)
    assert all(not v.any() for v in seen.values())
    state = jax.tree.map(lambda v: v + 3, delayed.init("delayed"))
    kept = delayed.update(
        state, {role: jnp.asarray(v) for role, v in seen.items()}, recipe="delayed"
    )
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), kept, state))


def test_layers_in_a_stack_observe_each_their_own():
    """vmap and scan over layers, where seen has their axis: nothing is merged between them."""
    xs, ws = X[:3], np.stack([W, 4 * W, 0.5 * W])
    state, unseen = delayed.init("delayed", (3,)), delayed.unseen("delayed", (3,))

    def by_vmap(x, w, seen):
        return jax.vmap(one)(x, w, seen, state)

    def by_scan(x, w, seen):
        _, (y, seen) = jax.lax.scan(lambda _, layer: (None, one(*layer)), None, (x, w, seen, state))
        return y, seen

    for way in (by_vmap, by_scan):
        seen = observed(way, xs, ws, unseen)
        np.testing.assert_array_equal(seen["input"][:, 0], np.abs(xs).max((1, 2)))
        np.testing.assert_array_equal(seen["weight"][:, 0], np.abs(ws).max((1, 2)))
        assert len(set(seen["grad_output"][:, 0].tolist())) == 3
        assert all(v[:, 2].all() for v in seen.values())


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_value_that_is_not_finite_keeps_the_state(bad):  # H-5
    x = X.copy()
    x[1, 2, 3] = bad
    seen = observed(one, x=x)
    assert seen["input"].tolist() == [0, 1, 1]
    # an infinity is cast to max, and the output is finite (S-5); a NaN goes through
    assert seen["grad_output"][1] == np.isnan(bad)
    state = delayed.update(
        delayed.init("delayed"), {r: jnp.asarray(v) for r, v in seen.items()}, recipe="delayed"
    )
    assert (state["input"].step, state["weight"].step, state["grad_output"].step) == (
        0,
        1,
        not np.isnan(bad),
    )
    # As microbatches: the others' amaxes do not undo the flag.
    good = delayed.merge(
        *({r: jnp.asarray(v) for r, v in s.items()} for s in (observed(one), seen))
    )
    assert delayed.update(delayed.init("delayed"), good, recipe="delayed")["input"].step == 0


def test_the_state_is_a_constant_and_is_not_changed():  # H-1
    state = jax.tree.map(lambda v: v * 2, delayed.init("delayed"))

    def loss(stored):
        states = {role: state[role]._replace(stored=stored) for role in state}
        return (
            linear.apply(
                jnp.asarray(X),
                jnp.asarray(W),
                recipe="delayed",
                state=states,
                seen=delayed.unseen("delayed"),
            )[0]
            ** 2
        ).sum()

    assert jax.grad(loss)(jnp.float32(2)) == 0
    assert all((state[role].stored == 2).all() for role in ROLES)


OTHER = recipe_of(CONFIGS[1])


def test_observations_that_were_summed_are_refused_and_never_scale():  # H-4, H-8
    """One seen for two uses: JAX adds their gradients by it, and the larger amax is lost."""
    state, w = delayed.init("delayed"), jnp.eye(32, dtype=jnp.bfloat16)

    def loss(w, seen):
        first, a = linear.apply(
            jnp.ones((4, 32), jnp.bfloat16), w, recipe="delayed", state=state, seen=seen
        )
        second, b = linear.apply(first, w, recipe="delayed", state=state, seen=seen)
        return second.astype(jnp.float32).sum(), delayed.merge(a, b)

    (_, forward), (_, backward) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        w, delayed.unseen("delayed")
    )
    seen = delayed.merge(forward, backward)
    with pytest.raises(
        ValueError, match=r"grad_output has flags .* its amax is lost.*seen from each use"
    ):
        delayed.update(state, seen, recipe="delayed")
    jitted = jax.jit(lambda state, seen: delayed.update(state, seen, recipe="delayed"))(state, seen)
    assert np.isnan(jitted["grad_output"].stored)
    assert np.isfinite(jitted["input"].stored)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: delayed.check(
                delayed.init(flax_recipe(16)), delayed.unseen("delayed"), "delayed", "fc"
            ),
            "fc: the .* is a DelayedState; got FlaxState",
        ),
        (
            lambda: delayed.check(
                dict.fromkeys(delayed.init("delayed"), (1.0,)),
                delayed.unseen("delayed"),
                "delayed",
                "fc",
            ),
            "got tuple",
        ),
        (
            lambda: linear.apply(X, W, recipe="delayed", name="mlp.up"),
            "^mlp.up: .*state and seen is None.*delayed.init",
        ),
        (
            lambda: linear.apply(X, W, recipe="delayed", state=delayed.init("delayed")),
            "seen is None",
        ),
        (
            lambda: linear.apply(
                X,
                W,
                recipe="tensorwise",
                state=delayed.init("delayed"),
                seen=delayed.unseen("delayed"),
            ),
            "has no state",
        ),
        (
            lambda: linear.apply(X, W, recipe="delayed", state=delayed.init("delayed"), seen={}),
            "roles input, weight, grad_output; got",
        ),
        (
            lambda: linear.apply(
                X, W, recipe="delayed", state=delayed.init(OTHER), seen=delayed.unseen("delayed")
            ),
            r"\(16,\).*got \(1,\)",
        ),
        (
            lambda: linear.apply(
                X,
                W,
                recipe="delayed",
                state=delayed.init("delayed"),
                seen=delayed.unseen("delayed", (2,)),
            ),
            r"got \(2, 3\)",
        ),
        (
            lambda: delayed.update(
                delayed.init("delayed", (2,)), delayed.unseen("delayed"), recipe="delayed"
            ),
            r"shape \(2, 3\)",
        ),
        (
            lambda: delayed.merge(delayed.unseen("delayed"), {"input": jnp.zeros(3)}),
            "observations; got",
        ),
        (lambda: delayed.merge(), "at least one"),
        (
            lambda: linear.apply(
                X,
                W,
                recipe=recipe_of(DELAYED["flax"]),
                state=delayed.init("delayed"),
                seen=delayed.unseen("delayed"),
            ),
            "got 'flax'.*fp8ref.sim.delayed",
        ),
        (
            lambda: delayed.init(
                dataclasses.replace(OTHER, grad_weight=recipe_of(CONFIGS[2]).grad_weight)
            ),
            "needs one cast; got two",
        ),
    ],
)
def test_errors_name_requirement_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_amaxes_of_a_pass_merge_over_a_vmap():  # H-4, A-19
    """As attention observes: over an axis that the layer's seen lacks the largest, over one that it
    has none.
    """
    seen = {"q": jnp.zeros(3), "do": jnp.asarray([7.0, 0, 1])}
    amaxes = jnp.asarray([1.0, 3, 2])
    found = jax.vmap(lambda x: delayed.merged(seen, {"q": x}, seen), out_axes=None)(amaxes)
    np.testing.assert_array_equal(found["q"], [3, 0, 1])
    np.testing.assert_array_equal(found["do"], [7, 0, 1])
    apart = jax.vmap(lambda x, one: delayed.merged({"q": one}, {"q": x}, {"q": one}))(
        amaxes, jnp.zeros((3, 3))
    )
    np.testing.assert_array_equal(apart["q"], [[1, 0, 1], [3, 0, 1], [2, 0, 1]])


@pytest.mark.parametrize("kind", [delayed.DelayedState, delayed.FlaxState])
def test_states_are_known_to_jax_export(kind):
    """A program that takes a state is serialized by the name of its type, which is registered
    once.
    """
    with pytest.raises(ValueError, match=r"[Dd]uplicate"):
        jax.export.register_namedtuple_serialization(
            kind, serialized_name=f"fp8ref.jax.delayed.{kind.__name__}"
        )
