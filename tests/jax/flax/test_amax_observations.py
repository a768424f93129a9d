import jax.numpy as jnp
import pytest

from fp8ref.jax import delayed
from fp8ref.jax.flax import amax_observations
from fp8ref.jax.flax.amax_observations import Observed
from fp8ref.recipe import RECIPES


def of(amax):
    return {**delayed.unseen("delayed"), "input": jnp.array([amax, 0, 1], jnp.float32)}


def test_microbatches_merge_by_the_largest_in_any_order():  # H-4
    one, two = (Observed(layers={"fc": of(amax)}) for amax in (3.0, 5.0))
    for merged in (amax_observations.merge(one, two), amax_observations.merge(two, one), amax_observations.merge(two)):
        assert merged.layers["fc"]["input"].tolist() == [5, 0, 1]
        assert merged.layers["fc"]["weight"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "at least one"),
        (({"fc": 1},), "observations of fj.flax.value_and_grad.*got dict"),
        ((Observed(layers={"fc": of(1)}), Observed(layers={})), "merge: every layer .*; fc is not"),
        ((Observed(layers={}), Observed(layers={"fc": of(1)})), "merge: got observations of fc, which the model does not have"),
    ],
)
def test_what_does_not_merge(arguments, message):
    with pytest.raises(ValueError, match=message):
        amax_observations.merge(*arguments)


def test_a_layer_whose_observations_would_be_lost_is_named():
    recipe = RECIPES["delayed"]
    assert set(amax_observations.unobserved(recipe, "fc", "Remedy.")) == {"input", "weight", "grad_output"}
    with amax_observations.observing() as names:
        amax_observations.record("head")
        with pytest.raises(ValueError, match=r"fc: recipe 'delayed' .*lost. Remedy\."):
            amax_observations.unobserved(recipe, "fc", "Remedy.")
    assert names == {"head"}
