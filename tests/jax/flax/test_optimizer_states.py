"""nnx.Optimizer, TrainState and optax's wrappers take the states of fj.states as those of optax's
own AdamW.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import train_state
from helpers.states.state_layouts import ALL, MASTERED

from fp8ref.jax.states import states

LAYOUTS = ALL | MASTERED
STEPS = 3
BFLOAT16 = ("bfloat16_master", "stochastic_bfloat16")


def hyper(name: str) -> dict:
    layout = LAYOUTS[name]
    return {
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "layout": layout,
        "seed": 7 * layout.stochastic,
    }


def model(name: str = "sqrt_e4m3") -> nnx.Module:
    """Small and large parameters: of some layouts the bias stays in float32."""
    dtype = jnp.bfloat16 if name in BFLOAT16 else jnp.float32
    return nnx.Linear(32, 256, rngs=nnx.Rngs(0), param_dtype=dtype)


def gradients(params, step: int):
    """Of many magnitudes, as large as the parameters."""
    rng = np.random.default_rng(step)
    return jax.tree.map(
        lambda p: jnp.asarray(
            rng.standard_normal(p.shape) * 10.0 ** rng.integers(-4, 2, p.shape), p.dtype
        ),
        params,
    )


def bits(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def by_hand(tx, params, steps: int = STEPS):
    """Parameters and state after so many updates."""
    state = tx.init(params)
    update = jax.jit(tx.update)
    for t in range(steps):
        updates, state = update(gradients(params, t), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.grid(5)
@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_of_an_nnx_optimizer_are_those_of_update(name):
    """Flax makes a State of each tuple that it finds in a parameter's place."""
    tx, linear = states.adamw(**hyper(name)), model(name)
    wanted = by_hand(tx, nnx.to_pure_dict(nnx.state(linear, nnx.Param)))
    optimizer = nnx.Optimizer(linear, tx, wrt=nnx.Param)
    step = nnx.jit(lambda linear, optimizer, grads: optimizer.update(linear, grads))
    for t in range(STEPS):
        params = nnx.state(linear, nnx.Param)
        grads = gradients(nnx.to_pure_dict(params), t)
        step(
            linear,
            optimizer,
            jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(grads)),
        )
    assert bits(nnx.state(linear, nnx.Param)) == bits(wanted[0])
    assert bits(optimizer.opt_state) == bits(wanted[1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_map_params_reaches_what_is_kept_of_each_parameter(name):  # optax.tree.map_params
    params = {"w": jnp.ones((32, 256)), "b": jnp.ones(5), "layers": jnp.ones((3, 4))}
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16) if name in BFLOAT16 else p, params)
    stacked = states.Parameters(stacked={"w": False, "b": False, "layers": True})
    tx = states.adamw(**hyper(name), parameters=stacked)
    state = tx.init(params)
    seen = []
    mapped = optax.tree.map_params(
        tx, lambda x, p: seen.append((x.shape, p.shape)) or x, state, params
    )
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    assert bits(mapped) == bits(state)
    assert len(seen) % 3 == 0
    assert len(seen) == len(jax.tree.leaves(state)) - 2  # all but the count and the decisions
    assert seen.count(((32, 256), (32, 256))) >= 2


@pytest.mark.parametrize("name", ["sqrt_e4m3", "torchao", "coat", "msamp_o2"])
def test_a_linen_train_state_has_them_too(name):
    params = {"w": jnp.ones((32, 256)), "b": jnp.ones(5)}
    tx = states.adamw(**hyper(name))
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    for t in range(STEPS):
        state = jax.jit(lambda state, g: state.apply_gradients(grads=g))(
            state, gradients(params, t)
        )
    wanted = by_hand(tx, params)
    assert (bits(state.params), bits(state.opt_state)) == (bits(wanted[0]), bits(wanted[1]))


def wrapped(name: str):
    """(optax's wrapper around the optimizer, how to get its own state out, parameters that it
    updates, what they update by).
    """
    tx = states.adamw(**hyper("torchao"))
    labels = {"w": "narrow", "b": "frozen"}
    return {
        "chain": (optax.chain(optax.identity(), tx), lambda s: s[1]),
        "masked": (optax.masked(tx, {"w": True, "b": False}), lambda s: s.inner_state),
        "partition": (
            optax.partition({"narrow": tx, "frozen": optax.set_to_zero()}, labels),
            lambda s: s.inner_states["narrow"].inner_state,
        ),
        "inject": (
            optax.inject_hyperparams(
                states.adamw, static_args=("b1", "b2", "eps", "weight_decay", "seed", "layout")
            )(**{**hyper("torchao"), "learning_rate": jnp.float32(1e-2)}),
            lambda s: s.inner_state,
        ),
        "steps": (
            optax.MultiSteps(tx, every_k_schedule=1).gradient_transformation(),
            lambda s: s.inner_opt_state,
        ),
    }[name]


@pytest.mark.parametrize("name", ["chain", "masked", "partition", "inject", "steps"])
def test_optaxs_wrappers_change_no_bit(name):
    tx, inner = wrapped(name)
    params = {"w": jnp.ones((32, 256)), "b": jnp.ones(5)}
    alone = name in ("masked", "partition")
    wanted, own = by_hand(states.adamw(**hyper("torchao")), {"w": params["w"]} if alone else params)
    if alone:  # the gradient of w is the second that by_hand draws
        drawn = [gradients(params, t)["w"] for t in range(STEPS)]
        own, p, update = (
            states.adamw(**hyper("torchao")).init({"w": params["w"]}),
            {"w": params["w"]},
            states.adamw(**hyper("torchao")).update,
        )
        for g in drawn:
            updates, own = update({"w": g}, own, p)
            p = optax.apply_updates(p, updates)
        wanted = p
    after, state = by_hand(tx, params)
    assert np.asarray(after["w"]).tobytes() == np.asarray(wanted["w"]).tobytes()
    assert bits(inner(state)) == bits(own)
    again = optax.tree.map_params(tx, lambda x: x, state)
    assert bits(again) == bits(state)


def test_a_checkpoint_of_orbax_has_every_bit(tmp_path):
    tx, linear = states.adamw(**hyper("torchao")), model()
    optimizer = nnx.Optimizer(linear, tx, wrt=nnx.Param)
    params = nnx.state(linear, nnx.Param)
    for t in range(STEPS):
        optimizer.update(linear, gradients(params, t))
    saved = nnx.to_pure_dict(nnx.state(optimizer))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(jnp.zeros_like, saved))
    assert bits(restored) == bits(saved)


def test_a_state_of_tuples_in_place_of_parameters_is_refused():
    """As an earlier version had it."""
    tx, params = states.adamw(1e-3), {"w": jnp.ones((2, 128))}
    state = tx.init(params)
    old = state._replace(
        m={
            "w": jax.tree.map(
                lambda tree: tree["w"], state.m, is_leaf=lambda x: isinstance(x, dict)
            )
        }
    )
    for use in (lambda: tx.update(params, old, params), lambda: states.decode(old)):
        with pytest.raises(
            ValueError,
            match=r"a state has a tree of the parameters for each of codes, scale_inv, .* got dict",
        ):
            use()
    other = state._replace(m=state.m._replace(scale_inv={"v": 1}))
    with pytest.raises(
        ValueError, match=r"scale_inv of a state has the structure of the parameters"
    ):
        tx.update(params, other, params)
