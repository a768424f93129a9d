"""SwiGLU and its gradients with their casts in JAX, interpreted, against the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax.kernels import TritonKernels, plain, swiglu
from fp8ref.jax.quantize import scales, scaling

KERNELS, RNG = TritonKernels(), np.random.default_rng(0)
GATE = jnp.asarray(RNG.choice([-1, 1], (3, 25, 40)) * RNG.uniform(32, 80, (3, 25, 40)))
GATE, UP, D = (
    x.astype(jnp.bfloat16)
    for x in (GATE, *(jnp.asarray(RNG.normal(0, 1, (3, 25, 40))) for _ in range(2)))
)
"""Gates of whose sigmoid float32 keeps 1 or, negative, so little that a product is rounded to a
number near 0: exp, which is approximate, then shows in no code."""


def same(q, x, by, fmt):
    """Whether codes in both orders and the amax are those of a tensor."""
    codes = scaling.quantize(x, fmt, by=by).codes.astype(jnp.float32)
    np.testing.assert_array_equal(q.codes.astype(jnp.float32), codes)
    turned = codes.reshape(75, 40).T
    np.testing.assert_array_equal(q.transposed.astype(jnp.float32), turned)
    np.testing.assert_array_equal(q.amax, scaling.amax(x))


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_codes_are_those_of_the_plain_product(fmt):  # M-11
    by = scales.with_inverse(jnp.float32(1.7))
    same(swiglu.quantize(GATE, UP, by, fmt, KERNELS), plain.swiglu(GATE, UP), by, fmt)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_codes_of_gradients_are_those_of_the_plain_ones(fmt):  # M-11
    by = tuple(scales.with_inverse(jnp.float32(scale)) for scale in (1.7, 2.9))
    _, pull = jax.vjp(plain.swiglu, GATE, UP)
    found = swiglu.quantize_gradients((D, GATE, UP), by, fmt, KERNELS)
    for each in zip(found, pull(D), by, strict=True):
        same(*each, fmt)


def test_amaxes_are_those_of_the_plain_form():
    found = swiglu.amax(GATE, UP, KERNELS), *swiglu.gradient_amaxes(D, GATE, UP, KERNELS)
    _, pull = jax.vjp(plain.swiglu, GATE, UP)
    expected = [scaling.amax(x) for x in (plain.swiglu(GATE, UP), *pull(D))]
    np.testing.assert_array_equal(found, expected)
