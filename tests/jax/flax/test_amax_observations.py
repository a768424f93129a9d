import jax
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
    for merged in (
        amax_observations.merge(one, two),
        amax_observations.merge(two, one),
        amax_observations.merge(two),
    ):
        assert merged.layers["fc"]["input"].tolist() == [5, 0, 1]
        assert merged.layers["fc"]["weight"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "at least one"),
        (({"fc": 1},), "observations of fj.flax.value_and_grad.*got dict"),
        ((Observed(layers={"fc": of(1)}), Observed(layers={})), "merge: fc has no observations"),
        (
            (Observed(layers={}), Observed(layers={"fc": of(1)})),
            "merge: got observations of fc, which the model lacks",
        ),
    ],
)
def test_what_does_not_merge(arguments, message):
    with pytest.raises(ValueError, match=message):
        amax_observations.merge(*arguments)


def test_a_layer_whose_observations_would_be_lost_is_named():
    recipe = RECIPES["delayed"]
    assert set(amax_observations.unobserved(recipe, "fc", "Remedy.")) == {
        "input",
        "weight",
        "grad_output",
    }
    assert amax_observations.observers() is None
    with amax_observations.observing() as observers:
        assert amax_observations.observers() is observers
        with pytest.raises(ValueError, match=r"fc: recipe 'delayed' .*lost. Remedy\."):
            amax_observations.unobserved(recipe, "fc", "Remedy.")
    assert amax_observations.observers() is None


def test_observations_come_out_as_a_gradient():
    """Those of two layers, each by what it was given; the output's own gradient stays."""
    given = {"input": jnp.zeros(3)}

    def loss(x, given):
        first, second = (
            {"input": one["input"] + amax} for one, amax in zip(given, (2.0, 5.0), strict=True)
        )
        return (
            amax_observations.by_gradient(amax_observations.by_gradient(x, first, "a"), second, "b")
            * 7
        ).sum()

    of_x, found = jax.grad(loss, argnums=(0, 1))(jnp.ones(2), (given, given))
    assert of_x.tolist() == [7, 7]
    assert [one["input"].tolist() for one in found] == [[2.0] * 3, [5.0] * 3]
