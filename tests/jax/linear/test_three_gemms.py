import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax.linear import linear
from fp8ref.policy import POLICIES
from fp8ref.recipe import CastSpec, GemmSpec, Recipe
from fp8ref.sim import linear as sim


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


def run(x, w, g, recipe):
    y, vjp = jax.vjp(
        jax.jit(lambda x, w: linear.apply(x, w, recipe=recipe)[0]),
        *(jnp.asarray(v, jnp.bfloat16) for v in (x, w)),
    )
    return [np.asarray(v.astype(jnp.float32)) for v in (y, *vjp(jnp.asarray(g, jnp.bfloat16)))]


POW2 = CastSpec(fmt=E4M3FN, policy=POLICIES["torchao_pow2"])
LINES = CastSpec(fmt=E5M2, granularity="rowwise", policy=POLICIES["torchao_pow2"])
ONE_SIDED = [
    Recipe(
        name="one",
        output=GemmSpec(b=POW2),
        grad_input=GemmSpec(a=LINES),
        grad_weight=GemmSpec(b=POW2),
    ),
    Recipe(
        name="both roles",
        output=GemmSpec(a=POW2),
        grad_input=GemmSpec(b=POW2),
        grad_weight=GemmSpec(b=POW2),
    ),
]


@pytest.mark.parametrize("recipe", ONE_SIDED, ids=lambda recipe: recipe.name)
def test_an_operand_cast_alone_equals_the_simulator_on_integers(recipe, operands):  # L-4
    """Scales are powers of two, so that the numbers of codes are bfloat16's and every sum is
    exact.
    """
    x, w, g = operands
    g = np.where(g > 0, np.float32(9 * 2.0**-10), g)  # which e5m2 rounds
    expected = sim.forward(x, w, recipe), *sim.backward(g, x, w, recipe)
    for ours, theirs in zip(run(x, w, g, recipe), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # e4m3 holds integers to 7
    assert (expected[1] != sim.backward(g, x, w, "bf16")[0]).any() == (recipe.name == "one")
