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
