"""Casts by Triton's kernels in JAX, interpreted, against XLA's: the same codes, scales, amaxes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from helpers.kernels import planted_tensors

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax import delayed
from fp8ref.jax.kernels import TritonKernels, casting, casts
from fp8ref.jax.linear import linear
from fp8ref.jax.quantize import scaling

KERNELS = TritonKernels()


def bits(x):
    return np.asarray(x).view(f"u{np.asarray(x).itemsize}")


def equal(mine, other):
    pairs = list(zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True))
    return bool(pairs) and all((bits(a) == bits(b)).all() for a, b in pairs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_codes_in_both_orders_are_those_of_quantize(fmt, dtype):  # M-11, S-5
    x = jnp.asarray(planted_tensors.planted(3 * 35, 70, dtype)).reshape(3, 35, 70)
    q = scaling.quantize(x, fmt)
    found = casts.quantize(x, scaling.scales.Scales(q.scale, q.scale_inv), fmt, -1, KERNELS)
    assert equal(found.codes, q.codes)
    assert equal(found.transposed, q.codes.reshape(105, 70).T)
    assert equal(found.amax, scaling.amax(x))
    assert (found.scale, found.scale_inv, found.fmt) == (q.scale, q.scale_inv, fmt)


def test_amaxes_are_nan_before_infinite():  # S-2
    for values, expected in (([1, jnp.inf], jnp.inf), ([jnp.nan, -jnp.inf], jnp.nan)):
        x = jnp.asarray([values], jnp.bfloat16)
        found = casts.quantize(x, scaling.scales.with_inverse(jnp.float32(1)), E5M2, -1, KERNELS)
        np.testing.assert_array_equal(found.amax, jnp.float32(expected))


@pytest.mark.parametrize("place", [(0, 0), (0, -1), (-1, 0), (-1, -1)], ids=str)
def test_an_amax_is_the_largest_of_all_programs(place):  # S-2
    x = jnp.ones((130, 70), jnp.bfloat16).at[place].set(-3)  # ragged: four tiles, one a corner
    found = casts.quantize(x, scaling.scales.with_inverse(jnp.float32(1)), E5M2, -1, KERNELS)
    assert found.amax == 3


def step(x, w, g, *, recipe):
    """Output, gradients and observations of a linear."""
    state, seen = delayed.init(recipe) or None, delayed.unseen(recipe) or None

    def product(x, w, seen):
        return linear.apply(x, w, recipe=recipe, state=state, seen=seen)

    y, pull, forward = jax.vjp(product, x, w, seen, has_aux=True)
    return y, pull(g), forward


def tensors(rng, dtype=jnp.bfloat16):
    shapes = (2, 40, 48), (32, 48), (2, 40, 32)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_pow2", "delayed"])
def test_a_linear_computes_the_same_bits(recipe, rng):
    x, w, g = tensors(rng)
    run = functools.partial(step, recipe=recipe)
    with casting(KERNELS):
        text = jax.jit(run).lower(x, w, g).as_text()
        found = jax.jit(run)(x, w, g)
    assert equal(found, jax.jit(run)(x, w, g))
    assert text.count("callback") == 3  # x, w and g: each cast once
    # all GEMMs reduce the last axes of their operands, as Hopper's tensor cores do
    assert text.count("contracting_dims = [1] x [1]") == 3


def test_kernels_run_under_vmap_and_scan(rng):
    x, w, g = tensors(rng)
    run = functools.partial(step, recipe="tensorwise")
    with casting(KERNELS):
        mapped = jax.vmap(run, in_axes=(0, None, 0))(x, w, g)
        _, scanned = jax.lax.scan(lambda c, v: (c, run(v[0], w, v[1])), 0, (x, g))
    apart = [run(x[i], w, g[i]) for i in range(2)]
    expected = jax.tree.map(lambda *v: jnp.stack(v), *apart)
    assert equal(mapped, expected)
    assert equal(scanned, expected)


@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
def test_xla_casts_what_kernels_do_not_take(recipe, rng):
    """Scales of rows; what is not cast."""
    with casting(KERNELS):
        program = jax.jit(functools.partial(step, recipe=recipe)).lower(*tensors(rng))
    assert "callback" not in program.as_text()
