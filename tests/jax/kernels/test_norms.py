"""RMSNorm with its cast and its gradient in JAX, interpreted, against the plain form."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax.kernels import TritonKernels, norms, plain
from fp8ref.jax.quantize import scales, scaling

KERNELS, RNG = TritonKernels(), np.random.default_rng(0)
SHAPE = (3, 25, 48)


def whole(largest, shape=SHAPE, dtype=jnp.bfloat16):
    """Integers up to one, whose sums of products are exact in any order."""
    return jnp.asarray(RNG.integers(-largest, largest, shape, endpoint=True), dtype)


H, RESIDUAL = whole(100), whole(100)
WEIGHT = jnp.asarray(RNG.normal(1, 0.2, 48), jnp.bfloat16)


def total(residual):
    wide = H.astype(jnp.float32) + (0 if residual is None else residual.astype(jnp.float32))
    return wide.astype(H.dtype)


def same(q, x, by, fmt):
    codes = scaling.quantize(x, fmt, by=by).codes.view(jnp.uint8)
    np.testing.assert_array_equal(q.codes.view(jnp.uint8), codes)
    np.testing.assert_array_equal(q.transposed.view(jnp.uint8), codes.reshape(75, 48).T)
    np.testing.assert_array_equal(q.amax, scaling.amax(x))


@pytest.mark.parametrize("residual", [None, RESIDUAL], ids=["alone", "sum"])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_codes_are_those_of_the_plain_norm(fmt, residual):  # M-11
    """In one launch and in two."""
    by, x = scales.with_inverse(jnp.float32(1.7)), total(residual)
    expected = plain.normed(x, WEIGHT, 1e-5)
    h, factors, amax = norms.statistics(H, residual, WEIGHT, 1e-5, KERNELS)
    np.testing.assert_array_equal(h, x)
    np.testing.assert_array_equal(amax, scaling.amax(expected))
    same(norms.quantize(h, factors, WEIGHT, by, fmt, KERNELS), expected, by, fmt)
    once, again, q = norms.normed(H, residual, WEIGHT, 1e-5, by, fmt, KERNELS)
    np.testing.assert_array_equal(once, h)
    np.testing.assert_array_equal(again, factors)
    same(q, expected, by, fmt)


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_are_exact_where_sums_are(count):  # M-11
    """A mean over 64 columns, and factors that are powers of two."""
    shape = (3, 25, 64)
    readers, behind, h = [whole(50, shape) for _ in range(count)], whole(9, shape), whole(3, shape)
    weight, factors = whole(2, (64,)), jnp.exp2(whole(1, (75,), jnp.float32))
    found, for_weight, amax = norms.gradient(readers, behind, h, factors, weight, KERNELS)
    *readers, behind, h, weight, factor = (
        np.asarray(x, np.float64) for x in (*readers, behind, h, weight, factors.reshape(3, 25, 1))
    )
    first, *others = readers
    d, n = np.asarray(jnp.asarray(sum(others), jnp.bfloat16), np.float64) + first, h * factor
    d = np.asarray(jnp.asarray(d, jnp.bfloat16), np.float64)
    mean = (d * weight * n).mean(-1, keepdims=True)
    own = jnp.asarray(factor * (d * weight - n * mean), jnp.bfloat16)
    expected = jnp.asarray(np.asarray(own, np.float64) + behind, jnp.bfloat16)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(for_weight, (d * n).sum((0, 1)))
    np.testing.assert_array_equal(amax, scaling.amax(expected))
