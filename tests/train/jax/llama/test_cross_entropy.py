"""The loss of logits in JAX against M-5's formula and optax's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8ref.train.jax.llama.cross_entropy import cross_entropy


def test_cross_entropy_is_the_specifications_and_its_gradient_optaxs(rng):  # M-5
    example = np.asarray(cross_entropy(jnp.asarray([0.0, 1.0, 2.0, -1.0]), jnp.asarray(1)))
    # the sum of four exponentials, in any order
    assert abs(int(example.view(np.uint32)) - 0x3FB85823) <= 1
    logits, targets = (
        jnp.asarray(rng.normal(0, 5, (4, 7, 33)), jnp.bfloat16),
        jnp.asarray(rng.integers(0, 33, (4, 7))),
    )
    weights = jnp.asarray(rng.normal(0, 1, (4, 7)), jnp.float32)

    def through(f):
        return jax.jit(jax.value_and_grad(lambda logits: (f(logits) * weights).sum()))(logits)

    mine, gradient = through(lambda x: cross_entropy(x, targets))
    theirs, expected = through(
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x.astype(jnp.float32), targets)
    )
    # some 40 float32 roundings of numbers below 20, and one to bfloat16
    np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    np.testing.assert_allclose(
        np.asarray(gradient, np.float32), np.asarray(expected, np.float32), rtol=2.0**-8, atol=1e-6
    )
    assert gradient.dtype == jnp.bfloat16


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_cross_entropy_of_logits_that_are_not_finite(value):  # M-7
    logits, target = jnp.asarray([1.0, value, 0.0]), jnp.asarray(0)
    theirs = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    np.testing.assert_array_equal(np.isfinite(cross_entropy(logits, target)), np.isfinite(theirs))


def test_no_float32_logits_are_kept_for_the_backward_pass(rng):
    logits, targets = (
        jnp.asarray(rng.normal(0, 5, (4, 7, 33)), jnp.bfloat16),
        jnp.asarray(rng.integers(0, 33, (4, 7))),
    )
    _, backward = jax.vjp(lambda x: cross_entropy(x, targets), logits)
    kept = [(leaf.dtype, leaf.shape) for leaf in jax.tree.leaves(backward)]
    assert (jnp.bfloat16, (4, 7, 33)) in kept
    assert (jnp.float32, (4, 7, 33)) not in kept
