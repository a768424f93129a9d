"""What a GEMM is given of a linear's tensors: axes, what serves both passes, blocks that no layout
cuts.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.linear import operands
from fp8ref.jax.linear.operands import Use
from fp8ref.recipe import OPERANDS, RECIPES

COLUMN = Placement(m=("data",), n=("tensor",), fsdp=("data",), sequence=True)


def use(recipe="tensorwise", **more):
    return Use(
        **{"recipe": RECIPES[recipe], "name": "fc", "placement": Placement(), "mode": "one"} | more
    )


@pytest.mark.parametrize("turned", [False, True])
def test_operands_of_a_gemm_agree_on_the_length_they_are_reduced_along(turned):  # L-2
    # M, K, N = 3, 5, 7
    shapes = {"input": (3, 5), "weight": (5, 7) if turned else (7, 5), "grad_output": (3, 7)}
    reduced = {
        which: {shapes[role][use(turned=turned).axis(which, role)] for role in roles}
        for which, roles in OPERANDS.items()
    }
    assert reduced == {"output": {5}, "grad_input": {7}, "grad_weight": {3}}


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [("bf16", True), ("tensorwise", True), ("rowwise", False), ("delayed", True)],
)
def test_one_quantization_serves_both_passes_where_it_has_no_axis(recipe, expected):
    for role in ("input", "weight"):
        assert use(recipe).serves_backward(role) is expected
        assert use(recipe, placement=COLUMN, mode="shard_map").gathers_again(role) is expected
        assert not use(recipe, placement=COLUMN, mode="jit").gathers_again(role)


def test_collectives_are_ours_inside_shard_map_alone():
    assert use(placement=COLUMN, mode="jit").collective("grad_weight") is None
    assert use(placement=COLUMN, mode="shard_map").collective("grad_weight").scatter == ("data",)
    assert use(placement=COLUMN, mode="jit").over("weight", "tensorwise", -1) == ()
    assert set(use(placement=COLUMN, mode="shard_map").over("weight", "tensorwise", -1)) == {
        "data",
        "tensor",
    }


@pytest.mark.parametrize(
    ("role", "axis", "shape"),
    [("input", -2, (1, 1, 6)), ("grad_output", -1, (2, 4, 1)), ("weight", -2, (1, 6))],
)
def test_rows_of_all_leading_dims_share_a_scale_of_a_column(role, axis, shape, rng):
    x = jnp.asarray(rng.standard_normal((6, 6) if role == "weight" else (2, 4, 6)), jnp.float32)
    cast = RECIPES["rowwise"].output.a
    q = operands.quantize(x, role, cast, axis, {}, use("rowwise"))
    assert (q.codes.shape, q.scale.shape) == (x.shape, shape)
    flat = operands.quantize(operands.flat(x, role, use()), role, cast, axis, {}, use("rowwise"))
    np.testing.assert_array_equal(
        np.asarray(q.codes, np.float32).reshape(-1, 6), np.asarray(flat.codes, np.float32)
    )


@pytest.mark.parametrize(("length", "fits"), [(64, True), (48, False), (16, False)])
def test_pieces_hold_whole_blocks(length, fits):  # P-5
    """Of a sequence that is cut: each of two holds half the rows, of which a block of 32 follow
    each other.
    """
    cut = use("mxfp8", placement=COLUMN, mode="shard_map", outer=2)
    x, cast = jnp.ones((length, 32), jnp.bfloat16), RECIPES["mxfp8"].grad_weight.b
    if fits:
        assert operands.quantize(x, "input", cast, -2, {}, use("mxfp8")).scale.shape == (2, 32)
        operands._check_whole_blocks(x, "input", cast.granularity, -2, cut)
    else:
        with pytest.raises(ValueError, match=r"no layout cuts a block|divisible by 32"):
            operands._check_whole_blocks(x, "input", cast.granularity, -2, cut)
