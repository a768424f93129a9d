"""The gradient of a rotary embedding with its cast in JAX, interpreted, against the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax.kernels import TritonKernels, plain, rotary
from fp8ref.jax.quantize import scales, scaling

RNG = np.random.default_rng(0)
G = jnp.asarray(RNG.integers(-255, 256, (2, 35, 3, 8)), jnp.bfloat16)
TABLES = [jnp.asarray(RNG.integers(-128, 129, (35, 8)) / 128, jnp.float32) for _ in range(2)]
"""Of numbers whose products and sums float32 holds exactly, so that no order of them matters."""


def plain_gradient():
    """[B, T, H D]."""
    _, pull = jax.vjp(lambda x: plain.rotate(x, *TABLES), jnp.zeros(G.shape, G.dtype))
    return pull(G)[0].reshape(2, 35, 24)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_codes_are_those_of_the_plain_gradient(fmt):  # M-11
    by = scales.with_inverse(jnp.float32(1.7))
    q = rotary.quantize(G, tuple(TABLES), by, fmt, TritonKernels())
    expected = scaling.quantize(plain_gradient(), fmt, by=by).codes
    np.testing.assert_array_equal(q.codes.view(jnp.uint8), expected.view(jnp.uint8))
    turned = expected.reshape(70, 24).T
    np.testing.assert_array_equal(q.transposed.view(jnp.uint8), turned.view(jnp.uint8))
    np.testing.assert_array_equal(q.amax, scaling.amax(plain_gradient()))


def test_the_amax_is_that_of_the_plain_gradient():
    found = rotary.amax(G, *TABLES, TritonKernels())
    np.testing.assert_array_equal(found, scaling.amax(plain_gradient()))
