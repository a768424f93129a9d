"""Derivatives that a linear does not have are refused by the layer's name (spec L-8); codes that a
backward pass keeps stay what they are."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fp8ref.jax.attention import attention
from fp8ref.jax.linear import linear

X, W = jnp.ones((16, 32)), jnp.ones((32, 32))


def loss(x, w):
    return (linear.apply(x, w, recipe="rowwise", name="fc")[0] ** 2).sum()


def scanned(x):
    return lax.scan(
        lambda x, _: (linear.apply(x, W, recipe="tensorwise", name="fc")[0], None),
        x,
        None,
        length=2,
    )[0].sum()


FORWARD = {
    "jvp": lambda f: jax.jvp(f, (X, W), (X, W)),
    "jvp of the weight": lambda f: jax.jvp(lambda w: f(X, w), (W,), (W,)),
    "jvp inside jit": lambda f: jax.jit(lambda: jax.jvp(f, (X, W), (X, W)))(),
    "linearize": lambda f: jax.linearize(f, X, W)[1](X, W),
    "scan": lambda f: jax.jvp(scanned, (X,), (X,)),
}
SECOND = {
    "hessian": lambda f: jax.hessian(f)(X, W),
    "by the input": lambda f: jax.grad(lambda x: (jax.grad(f)(x, W) ** 2).sum())(X),
    "by the weight": lambda f: jax.grad(lambda w: (jax.grad(f)(X, w) ** 2).sum())(W),
    "inside jit": lambda f: jax.jit(jax.grad(lambda w: (jax.grad(f)(X, w) ** 2).sum()))(W),
    "by grad_output": lambda f: jax.grad(
        lambda a: (jax.grad(lambda x: a * a * f(x, W))(X) ** 2).sum()
    )(2.0),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("how", FORWARD)
def test_forward_mode(how, wrap):  # L-8
    with pytest.raises(ValueError, match=r"^fc: a linear has derivatives in reverse mode only"):
        FORWARD[how](wrap(loss))


@pytest.mark.slow
def test_jacobians():  # L-8
    with pytest.raises(ValueError, match=r"^fc: .*reverse mode only"):
        jax.jacfwd(loss)(X, W)
    assert jax.jacrev(lambda x: linear.apply(x, W, recipe="rowwise")[0])(X[0]).shape == (32, 32)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("how", SECOND)
def test_second_derivatives(how, wrap):  # L-8
    with pytest.raises(
        ValueError, match=r"^fc: the gradients of a linear are not differentiated again"
    ):
        SECOND[how](wrap(loss))


def test_second_derivatives_of_other_things_pass():
    """The linear is a constant of the outer derivative."""
    assert jax.grad(lambda a: jax.grad(lambda b: a * b * loss(X, W))(1.0))(2.0) == loss(X, W)


@pytest.mark.slow
def test_first_derivatives_under_transformations():
    expected = jax.grad(loss, (0, 1))(X, W)
    for found in (
        jax.jit(jax.grad(jax.checkpoint(loss), (0, 1)))(X, W),
        jax.vmap(jax.grad(loss, (0, 1)), (0, None))(X[None], W),
    ):
        assert all((a == b).all() for a, b in zip(expected, found, strict=True))
    assert (jax.grad(lambda x: jax.vmap(loss, (0, None))(x, W).sum())(X[None]) == expected[0]).all()


KEPT = {
    "linear": lambda x: (linear.apply(x, W, recipe="tensorwise")[0] ** 2).sum(),
    "attention": lambda x: (
        attention.apply(x[None, None], x[None, None], x[None, None], variant="cudnn") ** 2
    ).sum(),
}


@pytest.mark.parametrize("kind", KEPT)
def test_codes_that_a_policy_of_checkpointing_keeps(kind):
    """jax.checkpoint rounds what it keeps as if e4m3fn had infinities: the largest codes would be
    NaN.
    """
    x = jax.random.normal(jax.random.key(0), X.shape)
    kept = jax.checkpoint(KEPT[kind], policy=jax.checkpoint_policies.everything_saveable)
    assert (jax.jit(jax.grad(kept))(x) == jax.jit(jax.grad(KEPT[kind]))(x)).all()
