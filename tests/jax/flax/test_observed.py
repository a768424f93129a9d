import jax.numpy as jnp
import pytest

from fp8ref.jax import delayed
from fp8ref.jax.flax import observed
from fp8ref.jax.flax.observed import Observed
from fp8ref.recipe import RECIPES


def of(amax):
    return {**delayed.unseen("delayed"), "input": jnp.array([amax, 0, 1], jnp.float32)}


def test_microbatches_merge_by_the_largest_in_any_order():  # H-4
    one, two = (Observed(layers={"fc": of(amax)}) for amax in (3.0, 5.0))
    for merged in (observed.merge(one, two), observed.merge(two, one), observed.merge(two)):
        assert merged.layers["fc"]["input"].tolist() == [5, 0, 1]
        assert merged.layers["fc"]["weight"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "at least one"),
        (({"fc": 1},), "value_and_grad observed.*got dict"),
        ((Observed(layers={"fc": of(1)}), Observed(layers={})), "merge: every layer .*; fc is not"),
        ((Observed(layers={}), Observed(layers={"fc": of(1)})), "merge: got observations of fc, which the model has not"),
    ],
)
def test_what_does_not_merge(arguments, message):
    with pytest.raises(ValueError, match=message):
        observed.merge(*arguments)


def test_a_layer_whose_observations_would_be_lost_is_named():
    recipe = RECIPES["delayed"]
    assert set(observed.unobserved(recipe, "fc", "Remedy.")) == {"input", "weight", "grad_output"}
    with observed.observing() as names:
        observed.record("head")
        with pytest.raises(ValueError, match=r"fc: recipe 'delayed' .*lost. Remedy\."):
            observed.unobserved(recipe, "fc", "Remedy.")
    assert names == {"head"}
