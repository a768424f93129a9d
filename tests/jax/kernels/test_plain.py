import jax
import jax.numpy as jnp
import numpy as np

from fp8ref.jax.kernels import plain


def test_the_models_roundings_hold_where_xla_drops_conversions():  # M-3
    """XLA removes a conversion to bfloat16 and back between fused operations, unless it is told to
    keep it; never reduce_precision.
    """
    x = jnp.linspace(1, 2, 64, dtype=jnp.float32)
    kept = jax.jit(
        lambda x: plain.rounded(x, jnp.bfloat16).astype(jnp.float32),
        compiler_options={"xla_allow_excess_precision": True},
    )(x)
    np.testing.assert_array_equal(
        np.asarray(kept), np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32))
    )


def test_each_is_rounded_once(rng):  # M-3
    """Within half a unit of bfloat16 of float64's, and what float32 adds: below 2^-16 of each
    term.
    """
    x, y = (jnp.asarray(rng.normal(0, 1, (2, 3, 4, 8)), jnp.bfloat16) for _ in range(2))
    wide, other = (np.asarray(v, np.float64) for v in (x, y))
    angle = rng.uniform(0, 6, (3, 8)).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    half = np.concatenate([-wide[..., 4:], wide[..., :4]], axis=-1)
    for found, exact, terms in (
        (plain.add(x, y), wide + other, np.abs(wide) + np.abs(other)),
        (plain.swiglu(x, y), wide / (1 + np.exp(-wide)) * other, 0),
        (
            plain.normed(x, y[0, 0, 0], 1e-5),
            wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * other[0, 0, 0],
            0,
        ),
        (
            plain.rotate(x, jnp.asarray(cos), jnp.asarray(sin)),
            wide * cos[:, None] + half * sin[:, None],
            np.abs(wide) + np.abs(half),
        ),
    ):
        assert found.dtype == jnp.bfloat16
        bound = 2.0**-8 * np.abs(exact) + 2.0**-16 * (np.abs(exact) + terms)
        assert np.all(np.abs(np.asarray(found, np.float64) - exact) <= bound)


def test_the_residual_stream_stays_in_its_dtype():
    """XLA drops the conversion of a sum to bfloat16 and back, and would keep the float32 sum for
    all that reads the stream: it sees none past a barrier.
    """
    x = jax.ShapeDtypeStruct((2, 8, 16), jnp.bfloat16)
    text = jax.jit(plain.add).lower(x, x).as_text()
    assert "optimization_barrier %4 : tensor<2x8x16xbf16>" in text


def test_gradients_of_a_sum_are_its_own(rng):
    """Derived from the sum they would be rounded once more, in a kernel of their own."""
    x, g = (jnp.asarray(rng.normal(0, 1, (4, 8)), jnp.bfloat16) for _ in range(2))
    pull = jax.jit(jax.vjp(plain.add, x, x)[1])
    for gradient in pull(g):
        np.testing.assert_array_equal(gradient, g)
    assert "reduce_precision" not in pull.lower(g).as_text()
