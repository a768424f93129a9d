import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.formats import BFLOAT16, FLOAT16
from fp8ref.jax import delayed
from fp8ref.jax.linear import linear
from fp8ref.jax.quantize import cast as jax_cast
from fp8ref.jax.quantize import scales, scaling
from fp8ref.recipe import RECIPES, SHARED_RECIPES, weight_copy
from fp8ref.sim import linear as sim
from fp8ref.sim.quantize import cast

recipes = pytest.mark.parametrize("recipe", SHARED_RECIPES)


@pytest.fixture
def operands(rng):
    """x [2, 24, 64], w [32, 64], g [2, 24, 32]: small integers over powers of two, so that every
    sum is exact in any order.
    """
    shapes = ((2, 24, 64), (32, 64), (2, 24, 32))
    return [
        rng.integers(-7, 8, shape).astype(np.float32) * s
        for shape, s in zip(shapes, (1, 2.0**-6, 2.0**-10), strict=True)
    ]


def run(x, w, g, recipe, dtype=jnp.bfloat16):
    def f(x, w):
        return linear.apply(x, w, recipe=recipe)[0]

    y, vjp = jax.vjp(jax.jit(f), *(jnp.asarray(v, dtype) for v in (x, w)))
    return [np.asarray(v.astype(jnp.float32)) for v in (y, *vjp(jnp.asarray(g, dtype)))]


@pytest.mark.grid(2)
@recipes
def test_outputs_and_gradients_equal_the_simulator_on_integers(recipe, operands):  # L-1 to L-4, G-9
    x, w, g = operands
    y, grad_input, grad_weight = run(x, w, g, recipe)
    np.testing.assert_array_equal(y, sim.forward(x, w, recipe))
    expected = sim.backward(g, x, w, recipe)
    np.testing.assert_array_equal(grad_input, expected[0])
    np.testing.assert_array_equal(grad_weight, expected[1])


@pytest.mark.grid(2)
@recipes
def test_float32_works_and_rowwise_rounds_to_bfloat16(recipe, operands):  # G-8
    x, w, g = operands
    y, *_ = run(x, w, g, recipe, jnp.float32)
    rounded = np.array_equal(y, cast.round_to(y, BFLOAT16))
    assert rounded or not recipe.startswith("rowwise")
    assert (y.dtype, y.shape) == (np.float32, (2, 24, 32))


@pytest.mark.grid(2)
@pytest.mark.parametrize("size", [2.0**-16, 1.0, 2.0**8])
@recipes
def test_float16_equals_the_simulator_on_integers(recipe, size, operands):  # G-8
    """Of results that are subnormal in float16, normal, and beyond it."""
    x, w, g = operands
    x = x * np.float32(size)
    expected = (
        sim.forward(x, w * 64, recipe, out_dtype=FLOAT16),
        *sim.backward(g, x, w * 64, recipe, out_dtype=FLOAT16),
    )
    for ours, theirs in zip(run(x, w * 64, g, recipe, jnp.float16), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.grid(2)
@recipes
def test_vmap_and_remat_change_nothing(recipe, operands):
    x, w, _ = (jnp.asarray(v, jnp.bfloat16) for v in operands)

    def loss(w, x):
        return linear.apply(x, w, recipe=recipe)[0].astype(jnp.float32).sum()

    plain = jax.jit(jax.grad(loss))(w, x[0])
    np.testing.assert_array_equal(
        np.asarray(jax.jit(jax.grad(jax.checkpoint(loss)))(w, x[0])), np.asarray(plain)
    )
    mapped = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(w, x)
    np.testing.assert_array_equal(np.asarray(mapped[0]), np.asarray(plain))


@pytest.mark.parametrize(
    "recipe",
    [
        recipe
        for recipe in SHARED_RECIPES
        if RECIPES[recipe].fp8 and RECIPES[recipe].serves_both("weight")
    ],
)
def test_what_is_prepared_of_a_weight_is_not_made_again(recipe, operands):  # O-16, L-3
    """Outputs and gradients are those of a cast here; the weight beside a copy only takes its
    gradient.
    """
    x, w, g = (jnp.asarray(v, jnp.bfloat16) for v in operands)
    spec = weight_copy(recipe)
    copy = scaling.quantize(w, spec.fmt, policy=spec.policy)

    def run_with(w, copy):
        y, vjp = jax.vjp(lambda x, w: linear.apply(x, w, recipe=recipe, prepared=copy)[0], x, w)
        return y, *vjp(g)

    found, expected = jax.jit(run_with)(jnp.full_like(w, jnp.nan), copy), jax.jit(run_with)(w, None)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(theirs, np.float32))
    of_amax = scales.scales_from_amax(scaling.amax(w), spec.fmt, spec.policy)  # P-9
    for mine, theirs in zip(jax.jit(run_with)(w, of_amax), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(theirs, np.float32))
    mapped = jax.jit(jax.vmap(lambda x: linear.apply(x, w, recipe=recipe, prepared=copy)[0]))(x)
    np.testing.assert_array_equal(
        np.asarray(mapped[0], np.float32),
        np.asarray(linear.apply(x[0], w, recipe=recipe)[0], np.float32),
    )


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "mxfp4"])
def test_block_scales_equal_the_simulator_on_integers(recipe, rng):  # G-16
    """7 and smaller integers times powers of two, another one for each 32 of every axis: every
    block has a scale of its own, a power of two.
    """
    shapes = ((2, 128, 128), (256, 128), (2, 128, 256))

    def blocks(shape, e):
        place = np.indices(shape)
        power = np.exp2(e + (place // 32).sum(0) % 3)
        sevens = place.sum(0) % 16 == 0  # in every block along every axis
        return (np.where(sevens, 7, rng.integers(-7, 8, shape)) * power).astype(np.float32)

    x, w, g = (blocks(shape, e) for shape, e in zip(shapes, (0, -6, -10), strict=True))
    y, grad_input, grad_weight = run(x, w, g, recipe)
    np.testing.assert_array_equal(y, sim.forward(x, w, recipe))
    expected = sim.backward(g, x, w, recipe)
    np.testing.assert_array_equal(grad_input, expected[0])
    np.testing.assert_array_equal(grad_weight, expected[1])


# FP8 codes of bfloat16, not of float32
def test_operands_fused_with_their_producer_are_rounded_all_the_same(rng, monkeypatch):
    """XLA may hand a fused cast the float32 product that a bfloat16 one is rounded from; without
    the guard the output shows it.
    """
    a, b, w = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((512, 64), (512, 64), (32, 64))
    )

    def fused(a, b):
        return linear.apply(a * b, w, recipe="tensorwise")[0]

    expected = jax.jit(lambda x: linear.apply(x, w, recipe="tensorwise")[0])(
        jax.jit(jnp.multiply)(a, b)
    )
    np.testing.assert_array_equal(jax.jit(fused)(a, b), expected)
    monkeypatch.setattr(jax_cast, "to_f32", lambda x: x.astype(jnp.float32))
    assert (jax.jit(lambda a, b: fused(a, b))(a, b) != expected).any()


@pytest.mark.parametrize("recipe", [*SHARED_RECIPES, "bf16", "mxfp8"])
@pytest.mark.parametrize("tokens", [(0,), (2, 0), (0, 3)])
def test_no_tokens(recipe, tokens):  # L-9
    x, w = jnp.zeros((*tokens, 64), jnp.bfloat16), jnp.ones((32, 64), jnp.bfloat16)
    y, vjp = jax.vjp(lambda x, w: linear.apply(x, w, recipe=recipe)[0], x, w)
    grad_input, grad_weight = vjp(y)
    assert (y.shape, y.dtype) == ((*tokens, 32), jnp.bfloat16)
    assert grad_input.shape == x.shape
    assert grad_weight.shape == w.shape
    assert not grad_weight.any()


def test_no_tokens_observe_nothing():  # L-9, H-5
    state, seen = delayed.init("delayed"), delayed.unseen("delayed")

    def loss(w, seen):
        y, seen = linear.apply(jnp.zeros((0, 64)), w, recipe="delayed", state=state, seen=seen)
        return y.sum(), seen

    (_, forward), (_, backward) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        jnp.ones((32, 64)), seen
    )
    after = delayed.update(state, delayed.merge(forward, backward), recipe="delayed")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), after, state))
