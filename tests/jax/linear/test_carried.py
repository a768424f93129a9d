"""What a linear carries: the static facts of a layer, and seen with its parts by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.jax import delayed
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.linear import linear
from fp8ref.jax.linear.carried import Layer, Observations
from fp8ref.jax.quantize import stats
from fp8ref.recipe import OPERANDS, RECIPES

COLUMN = Placement(m=("data",), n=("tensor",), fsdp=("data",), sequence=True)


def layer(recipe="tensorwise", **more):
    return Layer(
        **{"recipe": RECIPES[recipe], "name": "fc", "placement": Placement(), "mode": "one"} | more
    )


@pytest.mark.parametrize("turned", [False, True])
def test_operands_of_a_gemm_agree_on_the_length_they_are_reduced_along(turned):  # L-2
    # M, K, N = 3, 5, 7
    shapes = {"input": (3, 5), "weight": (5, 7) if turned else (7, 5), "grad_output": (3, 7)}
    reduced = {
        which: {shapes[role][layer(turned=turned).axis(which, role)] for role in roles}
        for which, roles in OPERANDS.items()
    }
    assert reduced == {"output": {5}, "grad_input": {7}, "grad_weight": {3}}


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [("bf16", True), ("tensorwise", True), ("rowwise", False), ("delayed", True)],
)
def test_one_quantization_serves_both_passes_where_it_has_no_axis(recipe, expected):
    for role in ("input", "weight"):
        assert layer(recipe).serves_backward(role) is expected
        assert layer(recipe, placement=COLUMN, mode="shard_map").gathers_again(role) is expected
        assert not layer(recipe, placement=COLUMN, mode="jit").gathers_again(role)


def test_collectives_are_ours_inside_shard_map_alone():
    assert layer(placement=COLUMN, mode="jit").collective("grad_weight") is None
    assert layer(placement=COLUMN, mode="shard_map").collective("grad_weight").scatter == ("data",)
    assert layer(placement=COLUMN, mode="jit").over("weight", "tensorwise", -1) == ()
    assert set(layer(placement=COLUMN, mode="shard_map").over("weight", "tensorwise", -1)) == {
        "data",
        "tensor",
    }


def test_seen_comes_back_as_it_was_given(rng):  # H-4, Q-8
    """The amaxes alone or with statistics beside them: the same observations, in both passes."""
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((16, 32), (16, 32)))
    state, amaxes = delayed.init("delayed"), delayed.unseen("delayed")

    def loss(w, seen):
        y, seen = linear.apply(x, w, recipe="delayed", state=state, seen=seen)
        return (y.astype(jnp.float32) ** 2).sum(), seen

    grads = jax.grad(loss, (0, 1), has_aux=True)
    (_, alone_backward), alone = grads(w, amaxes)
    zeros = jnp.zeros((6, stats.LENGTH), jnp.float32)
    (_, backward), forward = grads(w, Observations(amaxes, statistics=zeros))
    for mine, expected in ((forward, alone), (backward, alone_backward)):
        assert isinstance(mine, Observations)
        assert mine.mu is None
        jax.tree.map(np.testing.assert_array_equal, mine.amaxes, expected)
    # a tensorwise operand is measured once: input, weight, and grad_output in grad_input
    measured = (
        np.asarray(forward.statistics).any(axis=1),
        np.asarray(backward.statistics).any(axis=1),
    )
    assert [list(rows) for rows in measured] == [
        [True, True, False, False, False, False],
        [False, False, True, False, False, False],
    ]


def test_seen_that_asks_for_nothing_observes_nothing():
    x, w = jnp.ones((16, 32), jnp.bfloat16), jnp.ones((16, 32), jnp.bfloat16)
    assert linear.apply(x, w, recipe="rowwise")[1] is None
    assert linear.apply(x, w, recipe="rowwise", seen=Observations())[1] == Observations()
