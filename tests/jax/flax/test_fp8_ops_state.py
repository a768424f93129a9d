import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import fp8_ops

from fp8ref import jax as fj

SEEN, STATE = fj.flax.SEEN, fj.flax.STATE
THEIRS = "_overwrite_with_gradient"


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


class Net(nn.Module):
    dot_general_cls: object

    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(64, dot_general_cls=self.dot_general_cls)(x))
        return nn.DenseGeneral((2, 16), dot_general_cls=self.dot_general_cls)(h)


theirs, ours = (
    Net(fp8_ops.Fp8DirectDotGeneralOp),
    Net(fj.flax.linen_dot_general(fj.flax.flax_recipe())),
)


def batches(steps):
    rng = np.random.default_rng(3)
    return [
        jnp.asarray(rng.standard_normal((2, 24, 32)) * 2.0 ** rng.uniform(-6, 6), jnp.float32)
        for _ in range(steps)
    ]


OPTIMIZER = optax.adam(1e-2)


@jax.jit
def their_step(variables, opt_state, x):
    def loss(params, fp8):
        y = theirs.apply({"params": params, THEIRS: fp8}, x)
        return ((y - 1) ** 2).mean(), y

    (value, y), (grads, fp8) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        variables["params"], variables[THEIRS]
    )
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return (
        {"params": optax.apply_updates(variables["params"], updates), THEIRS: fp8},
        opt_state,
        (value, y, grads),
    )


@jax.jit
def our_step(variables, opt_state, x):
    def loss(variables, x):
        y, updated = ours.apply(variables, x, mutable=[SEEN])
        return ((y - 1) ** 2).mean(), (updated, y)

    (value, y), grads, seen = fj.flax.value_and_grad(loss, has_aux=True)(variables, x)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    variables = fj.flax.update(
        {**variables, "params": optax.apply_updates(variables["params"], updates)}, seen
    )
    return variables, opt_state, (value, y, grads)


@pytest.mark.slow
def test_twenty_steps_are_flaxs_bit_for_bit():  # H-10
    """Outputs, gradients, parameters and state, after every step of a jitted training in
    float32.
    """
    flax = theirs.init(jax.random.key(0), jnp.zeros((2, 24, 32)))
    mine = ours.init(jax.random.key(0), jnp.zeros((2, 24, 32)))
    same(fj.flax.to_flax(mine), flax)
    state, my_state = OPTIMIZER.init(flax["params"]), OPTIMIZER.init(mine["params"])
    for x in batches(20):
        flax, state, results = their_step(flax, state, x)
        mine, my_state, my_results = our_step(mine, my_state, x)
        same(my_results, results)
        same(fj.flax.to_flax(mine), flax)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(flax))
    assert (
        len(np.unique(flax[THEIRS]["Dense_0"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]))
        == 21
    )


def arbitrary(shape, seed):
    """float32 of every kind: of any exponent, infinite, NaN, zero."""
    bits = np.random.default_rng(seed).integers(0, 1 << 31, shape).astype(np.int32)
    bits[..., :1] = np.random.default_rng(seed).choice(
        [0, 0x7F800000, 0x7FC00000, 0x3F800001], size=(*shape[:-1], 1)
    )
    return bits.view(np.float32)


@pytest.mark.parametrize("stack", [(), (3,)], ids=["one", "stacked"])
def test_flax_to_ours_to_flax_keeps_every_bit(stack):
    names = [
        f"{role}_{kind}"
        for role in ("input", "kernel", "output_grad")
        for kind in ("scale", "amax_history")
    ]
    state = {
        layer: {
            op: {
                name: arbitrary((*stack, 1 if name.endswith("scale") else 5), i)
                for i, name in enumerate(names)
            }
        }
        for layer, op in (("up", "Fp8DirectDotGeneralOp_0"), ("mix", "Fp8Einsum_1"))
    }
    flax = {"params": {"up": {"kernel": np.ones((2, 2), np.float32)}}, THEIRS: {"block": state}}
    mine = fj.flax.from_flax(flax)
    assert list(mine) == ["params", STATE]
    back = fj.flax.to_flax(mine)
    assert jax.tree.structure(back) == jax.tree.structure(flax)
    for ours_, theirs_ in zip(jax.tree.leaves(back), jax.tree.leaves(flax), strict=True):
        np.testing.assert_array_equal(np.asarray(ours_).view(np.int32), theirs_.view(np.int32))


@pytest.mark.slow
def test_an_imported_training_continues_as_flaxs():
    first, second = batches(6)[:3], batches(6)[3:]
    flax = theirs.init(jax.random.key(0), first[0])
    state = OPTIMIZER.init(flax["params"])
    for x in first:
        flax, state, _ = their_step(flax, state, x)
    mine, my_state = fj.flax.from_flax(flax), state
    assert jax.tree.structure(mine) == jax.tree.structure(ours.init(jax.random.key(0), first[0]))
    newest_first = np.asarray(
        mine[STATE]["Dense_0"]["Fp8DotGeneral_0"]["state"].roles["input"].amax_history[:3]
    )
    np.testing.assert_array_equal(newest_first, [np.abs(x).max() for x in first[::-1]])
    for x in second:
        flax, state, results = their_step(flax, state, x)
        mine, my_state, my_results = our_step(mine, my_state, x)
        same(my_results, results)
        same(fj.flax.to_flax(mine), flax)


def delayed_variables():
    layer = nn.Dense(32, dot_general_cls=fj.flax.linen_dot_general("delayed"), name="wi")
    return Named(layer).init(jax.random.key(0), jnp.ones((4, 32)))


class Named(nn.Module):
    wi: nn.Module

    def __call__(self, x):
        return self.wi(x)


def with_state(**changes):
    entries = {
        f"{r}_{k}": jnp.ones(1 if k == "scale" else 4)
        for r in ("input", "kernel", "output_grad")
        for k in ("scale", "amax_history")
    }
    return {THEIRS: {"wi": {"Fp8DirectDotGeneralOp_0": {**entries, **changes}}}}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fj.flax.to_flax(delayed_variables()),
            "^wi.*: to_flax needs a state of flax_recipe; got recipe 'delayed'",
        ),
        (lambda: fj.flax.to_flax({"params": {}}), "takes variables with 'fp8_state'; got params"),
        (lambda: fj.flax.from_flax({"params": {}}), "with '_overwrite_with_gradient'; got params"),
        (
            lambda: fj.flax.from_flax(with_state(bias_scale=jnp.ones(1))),
            "wi.Fp8DirectDotGeneralOp_0: Flax keeps .*; got bias_scale",
        ),
        (lambda: fj.flax.from_flax(with_state(input_scale=jnp.ones(()))), r"scales \(1,\)"),
        (
            lambda: fj.flax.from_flax(with_state(input_amax_history=jnp.ones(3))),
            "histories of one length",
        ),
        (
            lambda: fj.flax.from_flax(with_state(input_scale=jnp.ones(1, jnp.bfloat16))),
            "Flax's state is float32; got bfloat16, float32",
        ),
        (
            lambda: fj.flax.from_flax({THEIRS: {"wi": {"Other_0": {"scale": jnp.ones(1)}}}}),
            "wi.Other_0: FP8 state belongs to one of",
        ),
    ],
)
def test_errors_name_requirement_layer_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()
