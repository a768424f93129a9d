"""Groups of rows in JAX: which group and block a row is in, casts by tables, and blocks of one
group.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8ref.formats import E4M3FN
from fp8ref.jax.experts import grouped
from fp8ref.jax.experts import operands as grouped_operands
from fp8ref.jax.quantize import scaling
from fp8ref.recipe import RECIPES, CastSpec

SIZES = jnp.array([20, 0, 3, 32])
ROWS = 60
SPECS = {
    "tensorwise": CastSpec(fmt=E4M3FN),
    "rowwise": CastSpec(fmt=E4M3FN, granularity="rowwise"),
    "mx_1x32": RECIPES["mxfp8"].output.a,
}


def test_each_row_has_its_group():
    groups = grouped_operands.groups_of(SIZES, ROWS)
    assert groups.ends.tolist() == [20, 20, 23, 55]
    assert groups.group.tolist() == [0] * 20 + [2] * 3 + [3] * 32 + [4] * 5
    x = jnp.ones((ROWS, 2)).at[55:].set(jnp.nan)
    assert not groups.only(x)[55:].any()


def test_blocks_begin_with_their_group():
    segment, count = grouped_operands._blocks(grouped_operands.groups_of(SIZES, ROWS), 16)
    assert segment.tolist() == [0] * 16 + [1] * 4 + [2] * 3 + [3] * 16 + [4] * 16 + [count] * 5
    assert count == ROWS // 16 + 4


@pytest.mark.grid(2)
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "mx_1x32"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_groups_rows_are_cast_as_they_would_be_alone(granularity, axis, rng):
    x = jnp.asarray(rng.standard_normal((ROWS, 64)), jnp.bfloat16)
    spec = SPECS[granularity]
    groups = grouped_operands.groups_of(SIZES, ROWS)
    q = grouped_operands.quantize_rows(groups.only(x), spec, axis, groups, "group")
    for begin, end in ((0, 20), (20, 23), (23, 55)):
        rows = x[begin:end]
        if granularity == "mx_1x32" and axis == -2:
            rows = jnp.pad(rows, ((0, -len(rows) % 32), (0, 0)))
        alone = scaling.quantize(
            rows, spec.fmt, granularity=granularity, policy=spec.policy, axis=axis
        )
        np.testing.assert_array_equal(
            q.codes[begin:end].view(jnp.uint8), alone.codes[: end - begin].view(jnp.uint8)
        )
        if isinstance(q, grouped_operands.Segmented):
            assert (q.granularity, q.axis) == (granularity, axis)
            scale = jnp.broadcast_to(
                scaling.spread(alone.scale, rows.shape, alone.blocks), rows.shape
            )
            np.testing.assert_array_equal(
                jnp.broadcast_to(q.lines(q.scale)[begin:end], (end - begin, 64)),
                scale[: end - begin],
            )
        else:
            np.testing.assert_array_equal(q.scale[begin:end], alone.scale)


def test_blocks_of_rows_are_of_one_group_and_hold_every_row(rng):
    groups = grouped_operands.groups_of(SIZES, ROWS)
    blocks = grouped_operands._row_blocks(groups)
    laid = blocks.of(jnp.arange(1.0, ROWS + 1)[:, None])
    for of_block, group in zip(laid[..., 0], blocks.group, strict=True):
        rows = [int(r) - 1 for r in of_block if r]
        assert all(groups.group[r] == group for r in rows)
    assert sorted(int(r) for r in laid.ravel() if r) == list(range(1, 56))
    assert laid.shape[0] * laid.shape[1] == grouped_operands.rows_multiplied(ROWS, 4)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_nothing_is_promoted(recipe):
    """Programs may forbid that JAX broadcasts ranks or promotes dtypes by itself."""
    x, w, sizes = (
        jnp.ones((32, 32), jnp.bfloat16),
        jnp.ones((2, 32, 16), jnp.bfloat16),
        jnp.array([16, 16]),
    )
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        grad = jax.eval_shape(
            jax.grad(lambda x: grouped.apply(x, w, sizes, recipe=recipe)[0].sum()), x
        )
    assert grad.shape == x.shape
