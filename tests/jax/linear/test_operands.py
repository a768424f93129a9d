"""What a GEMM is given of a linear's tensors: axes, what serves both passes, blocks that no layout
cuts.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.linear import operands
from fp8ref.jax.linear.carried import Layer, Operand
from fp8ref.recipe import RECIPES

COLUMN = Placement(m=("data",), n=("tensor",), fsdp=("data",), sequence=True)


def layer(recipe="tensorwise", **more):
    return Layer(
        **{"recipe": RECIPES[recipe], "name": "fc", "placement": Placement(), "mode": "one"} | more
    )


@pytest.mark.parametrize(
    ("role", "axis", "shape"),
    [("input", -2, (1, 1, 6)), ("grad_output", -1, (2, 4, 1)), ("weight", -2, (1, 6))],
)
def test_rows_of_all_leading_dims_share_a_scale_of_a_column(role, axis, shape, rng):
    x = jnp.asarray(rng.standard_normal((6, 6) if role == "weight" else (2, 4, 6)), jnp.float32)
    cast = RECIPES["rowwise"].output.a
    q = operands.quantize(Operand(x), role, cast, axis, layer("rowwise"))
    assert (q.codes.shape, q.scale.shape) == (x.shape, shape)
    flat = Operand(operands.flat(x, role, layer()))
    flat = operands.quantize(flat, role, cast, axis, layer("rowwise"))
    np.testing.assert_array_equal(
        np.asarray(q.codes, np.float32).reshape(-1, 6), np.asarray(flat.codes, np.float32)
    )


@pytest.mark.parametrize(("length", "fits"), [(64, True), (48, False), (16, False)])
def test_pieces_hold_whole_blocks(length, fits):  # P-5
    """Of a sequence that is cut: each of two holds half the rows, of which a block of 32 follow
    each other.
    """
    cut = layer("mxfp8", placement=COLUMN, mode="shard_map", outer=2)
    x, cast = jnp.ones((length, 32), jnp.bfloat16), RECIPES["mxfp8"].grad_weight.b
    if fits:
        q = operands.quantize(Operand(x), "input", cast, -2, layer("mxfp8"))
        assert q.scale.shape == (2, 32)
        operands._check_whole_blocks(x, "input", cast.granularity, -2, cut)
    else:
        with pytest.raises(ValueError, match=r"need multiples of|divisible by 32"):
            operands._check_whole_blocks(x, "input", cast.granularity, -2, cut)
