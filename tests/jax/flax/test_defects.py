"""What goes wrong in Flax's own FP8 layers, and what happens in ours instead; and that training by
ours tracks bfloat16.
"""

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


class Net(nn.Module):
    """wi, called ``uses`` times, and wo, if asked."""

    dot_general_cls: object
    dtype: object = None

    @nn.compact
    def __call__(self, x, *, uses=1, wo=True):
        wi, out = (
            nn.Dense(32, False, self.dtype, dot_general_cls=self.dot_general_cls, name=name)
            for name in ("wi", "wo")
        )
        for _ in range(uses):
            x = wi(x)
        return out(x) if wo else x


def flax_step(model, variables, x, **call):
    """A step that leaves the parameters: the next variables, and the output."""

    def loss(fp8):
        y = model.apply({**variables, THEIRS: fp8}, x, **call)
        return y.astype(jnp.float32).sum(), y

    (_, y), fp8 = jax.value_and_grad(loss, has_aux=True)(variables[THEIRS])
    return {**variables, THEIRS: fp8}, y


def our_step(model, variables, x, **call):
    def loss(variables):
        y, updated = model.apply(variables, x, mutable=[SEEN], **call)
        return y.astype(jnp.float32).sum(), (updated, y)

    (_, y), _, seen = fj.flax.value_and_grad(loss, has_aux=True)(variables)
    return fj.flax.update(variables, seen), y


def scales_out(variables, layer):
    """What multiplies the input and the weight of a layer out of FP8."""
    if THEIRS in variables:
        state = variables[THEIRS][layer]["Fp8DirectDotGeneralOp_0"]
        return [float(state[name][0]) for name in ("input_scale", "kernel_scale")]
    roles = variables[STATE][layer]["Fp8DotGeneral_0"]["state"].roles
    return [float(1 / roles[role].stored) for role in ("input", "weight")]


def both(steps, dtype=None, params=None):
    """The outputs and variables of flax's layers and of ours after steps of (x, options of the
    call).
    """
    results = []
    for cls, step in (
        (fp8_ops.Fp8DirectDotGeneralOp, flax_step),
        (fj.flax.linen_dot_general("delayed"), our_step),
    ):
        model = Net(cls, dtype)
        variables = model.init(jax.random.key(0), X)
        variables["params"] = params or variables["params"]
        for x, call in steps:
            variables, y = step(model, variables, x, **call)
        results.append((y, variables))
    return results


X = jnp.asarray(np.random.default_rng(5).uniform(-1, 1, (16, 32)), jnp.float32).at[0, 0].set(1)
ONCE = {"wo": False}


def in_high_precision(x, variables):
    return np.asarray(x) @ np.asarray(variables["params"]["wi"]["kernel"])


def relative(y, expected):
    return np.sqrt(((np.asarray(y) - expected) ** 2).sum() / (expected**2).sum())


# Elements of e4m3 err by 2^-4 of themselves at most, so do products by 2^-3 + 2^-8, and a norm of
# sums of 32 of random signs by less.
BOUND = 2.0**-3 + 2.0**-8


def test_a_tiny_amax_makes_no_nan():
    """Flax's scale for 1e-36 is 1 / inf, and x / 0 is infinite or NaN; ours stops at the largest
    float32.
    """
    tiny = X.at[3].set(0) * 1e-36
    (theirs, _), (ours, _) = both([(tiny, ONCE)] * 3)
    assert np.isnan(theirs).any()
    assert np.isfinite(ours).all()
    assert np.abs(ours).max() <= 32 * 1e-36


def test_one_infinity_does_not_freeze_the_scale():
    """Flax keeps the scale until the infinity leaves the history, 1024 steps later; ours is as if
    the step had not been.
    """
    steps = [(X, ONCE), (X.at[1, 1].set(jnp.inf), ONCE), (64 * X, ONCE), (64 * X, ONCE)]
    (theirs, their_state), (ours, our_state) = both(steps)
    expected = in_high_precision(64 * X, our_state)
    assert relative(ours, expected) <= BOUND
    assert scales_out(our_state, "wi")[0] == np.float32(1) / np.float32(448 / 64)
    assert relative(theirs, expected) > 0.9
    assert scales_out(their_state, "wi")[0] == np.float32(1 / 448)


def test_a_layer_not_used_in_a_step_keeps_its_state():
    """Flax overwrites its scale and its history with the zero gradient."""
    steps = [(X, {}), (X, {}), (X, ONCE), (X, {})]
    (theirs, _), (ours, after) = both(steps)
    (_, their_state), (_, our_state) = both(steps[:3])
    (_, _), (_, before) = both(steps[:2])
    assert scales_out(their_state, "wo") == [0, 0]
    assert not np.isfinite(theirs).all() or np.abs(theirs).max() == 0
    jax.tree.map(np.testing.assert_array_equal, our_state[STATE]["wo"], before[STATE]["wo"])
    expected = in_high_precision(X, after) @ np.asarray(after["params"]["wo"]["kernel"])
    assert relative(ours, expected) <= 2 * BOUND + BOUND**2


def test_a_layer_called_twice_observes_the_larger_amax():
    """Flax adds the scales and the histories of both calls, and so doubles at every step what is in
    the history already.
    """
    steps = [(X, {"uses": 2, "wo": False})] * 2
    (_, their_state), (_, our_state) = both(steps)
    kernel = np.abs(our_state["params"]["wi"]["kernel"]).max()
    assert scales_out(our_state, "wi")[1] == np.float32(1) / (np.float32(448) / kernel)
    history = our_state[STATE]["wi"]["Fp8DotGeneral_0"]["state"].roles["weight"].amax_history
    np.testing.assert_array_equal(history[:3], [kernel, kernel, 0])
    their_history = their_state[THEIRS]["wi"]["Fp8DirectDotGeneralOp_0"]["kernel_amax_history"]
    np.testing.assert_array_equal(np.sort(their_history)[-2:], [2 * kernel, 4 * kernel])


@pytest.mark.slow
def test_bfloat16_operands_are_scaled_in_float32():
    """Constant operands are the format's largest number times their scale, so that only the scales'
    own rounding errs.
    """
    exact, constants = [], np.float32([1.1, 1.3, 1.7, 1.9, 0.3, 0.7])
    for c, d in zip(constants, constants[::-1], strict=True):
        c, d = (jnp.full((), v, jnp.bfloat16).astype(jnp.float32) for v in (c, d))
        params = {name: {"kernel": jnp.full((32, 32), d)} for name in ("wi", "wo")}
        results = both([(jnp.full((16, 32), c), ONCE)] * 2, jnp.bfloat16, params)
        expected = (32 * c * d).astype(jnp.bfloat16)
        exact.append([bool((y == expected).all()) for y, _ in results])
    theirs, ours = zip(*exact, strict=True)
    assert all(ours)
    assert not all(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_training_tracks_bfloat16(recipe):
    """50 steps of a dense regression. With every weight within e4m3's error of where bfloat16 has
    it, the loss is that of the noise.

    Output noise of independent errors of operands, uniform in +-2^-4 of each at worst: rms 2^-4 *
    sqrt(2 / 3) of the output's rms, as products of random signs add up. Its square times the
    targets' mean square is the loss's floor; twice that allows for its own spread.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((256, 32)), jnp.float32)
    target = x @ jnp.asarray(rng.standard_normal((32, 16)), jnp.float32) + 1
    floor = 2 * (2 / 3) * 2.0**-8 * float((target**2).mean())
    losses = {}
    for name in ("bf16", recipe):
        model = nn.Dense(16, dtype=jnp.bfloat16, dot_general_cls=fj.flax.linen_dot_general(name))
        variables = model.init(jax.random.key(0), x)
        optimizer = optax.adam(0.1)

        def loss_fn(variables, model=model):
            y, updated = model.apply(variables, x, mutable=[SEEN])
            return ((y.astype(jnp.float32) - target) ** 2).mean(), updated

        @jax.jit
        def step(variables, opt_state, optimizer=optimizer, loss_fn=loss_fn):
            value, grads, seen = fj.flax.value_and_grad(loss_fn)(variables)
            updates, opt_state = optimizer.update(grads, opt_state)
            variables = {**variables, "params": optax.apply_updates(variables["params"], updates)}
            return fj.flax.update(variables, seen), opt_state, value

        opt_state, losses[name] = optimizer.init(variables["params"]), []
        for _ in range(50):
            variables, opt_state, value = step(variables, opt_state)
            losses[name].append(float(value))
    ours, bf16 = np.array(losses[recipe]), np.array(losses["bf16"])
    assert bf16[-1] < 0.01 * bf16[0]
    # (a + b)^2 - a^2, a and b the roots of both losses
    assert (np.abs(ours - bf16) <= floor + 2 * np.sqrt(floor * bf16)).all()
    assert (ours != bf16).any()
