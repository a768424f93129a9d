import numpy as np
import pytest

from fp8ref import recipe as recipes
from fp8ref.selection.linears import Decision
from fp8ref.selection.statistics import FIELDS, planned
from fp8ref.sim.quantize import scaling, stats
from fp8ref.train.jax import operand_statistics


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
@pytest.mark.parametrize("turned", [False, True])
def test_numbers_are_the_simulator_s_of_the_same_operand(recipe, turned):
    """turned: a weight [K, N], as Flax keeps it."""
    rng, recipe = np.random.default_rng(0), recipes.by_name(recipe)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((32, 64), (96, 64)))
    x[0, 0] = np.nan
    cast_x, cast_w = recipe.output.a, recipe.output.b
    q_x, q_w = (
        scaling.quantize(v, c.fmt, granularity=c.granularity, policy=c.policy)
        for v, c in ((x, cast_x), (w, cast_w))
    )
    operands = {
        operand.name: operand
        for operand in planned([Decision(path="a.b", shape=(96, 64), recipe=recipe, reason="")])
    }
    weight = (w.T, q_w.codes.T, q_w.scale.T) if turned else (w, q_w.codes, q_w.scale)
    found = dict(
        operand_statistics.measured(operands, "a.b", "output", (x, q_x.codes, q_x.scale), weight)
    )
    assert found.keys() == {"a.b/output/input", "a.b/output/weight"}
    for name, v, q in (("a.b/output/input", x, q_x), ("a.b/output/weight", w, q_w)):
        numbers, expected = dict(zip(FIELDS, found[name], strict=True)), stats.statistics(v, q)
        for field in ("count", "non_finite", "underflows", "saturated", "overflows"):
            assert numbers[field] == getattr(expected, field)
        # float64 sums of 6144 numbers in another order: 6144 roundings of 2^-53. Of the noise,
        # scale_inv is made anew from the scale: an ulp of 2^-24 of a value that is up to 16 errors
        # large, so 2^-19 of an error.
        np.testing.assert_allclose(numbers["signal"], expected.signal, rtol=2**-40)
        np.testing.assert_allclose(numbers["noise"], expected.noise, rtol=2**-18)
    np.testing.assert_array_equal(
        found["a.b/output/weight"][-3:], [np.abs(w).max(), q_w.scale.min(), q_w.scale.max()]
    )


def test_an_operand_without_fp8_is_left_out():
    recipe = recipes.by_name("rowwise_with_gw_hp")
    operands = {
        operand.name: operand
        for operand in planned([Decision(path="a", shape=(32, 32), recipe=recipe, reason="")])
    }
    nothing = (np.zeros(()), np.zeros(()), np.zeros(()))
    assert not list(operand_statistics.measured(operands, "a", "grad_weight", nothing, nothing))
