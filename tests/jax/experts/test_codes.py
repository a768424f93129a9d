"""Rows that move between devices as FP8 codes: the bits of rows that move in bfloat16."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fp8ref.jax import delayed
from fp8ref.jax.experts import codes as expert_codes
from fp8ref.jax.experts import grouped
from fp8ref.jax.experts import parallel as expert_parallel
from fp8ref.selection import grouped as recipes

DEVICES, EXPERTS, ROWS, K, N = 2, 4, 24, 32, 16
# the second device has 8 rows of no group; nobody has rows of expert 1
SIZES = np.array([[9, 0, 5, 10], [0, 0, 12, 4]])


@pytest.fixture
def mesh():
    return jax.make_mesh((DEVICES,), ("expert",), axis_types=(AxisType.Auto,))


@pytest.fixture
def tensors(rng):
    """Rows x and weights; the rows of no group are NaN."""
    x = rng.standard_normal((DEVICES * ROWS, K))
    x[ROWS + SIZES[1].sum() :] = np.nan
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(
        rng.standard_normal((EXPERTS, K, N)), jnp.bfloat16
    )


def program(mesh, recipe, in_codes):
    """(x, w, state) -> (y, gradients of x and w, observations), of experts apart, compiled."""
    by_name = recipes.by_name(recipe)
    forward, backward = (expert_codes.cast_of([by_name], role) for role in ("input", "grad_output"))

    def apart(x, w, seen, state, sizes):
        sizes, how = sizes[0], {"recipe": recipe, "state": state or None, "seen": seen or None}
        if not in_codes:
            moved = expert_parallel.dispatch(x, sizes, "expert")
            y, after = grouped.apply(moved.rows, w, moved.sizes, **how)
            return expert_parallel.combine(y, moved, "expert"), after or {}
        scales = delayed.scales(state, by_name.recipe)
        moved, codes = expert_codes.dispatch(x, sizes, "expert", forward, scale=scales.get("input"))
        if seen:
            how["seen"] = seen | {
                "input": delayed.larger(seen["input"], expert_codes.observed(x, sizes))
            }
        rows = grouped.CodedRows(moved.rows, codes, grad_codes=True)
        y, after, slot = grouped.apply_codes(rows, w, moved.sizes, **how)
        return expert_codes.combine(
            y, slot, moved, sizes, "expert", backward, scale=scales.get("grad_output")
        ), after or {}

    cut = P("expert")

    def loss(x, w, seen, state):
        y, after = jax.shard_map(
            apart, mesh=mesh, in_specs=(cut, cut, P(), P(), cut), out_specs=(cut, P())
        )(x, w, seen, state, jnp.asarray(SIZES))
        return (y.astype(jnp.float32) * (1 + jnp.arange(N) % 3)).sum(), (y, after)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("delayed", marks=pytest.mark.slow)])
def test_codes_give_the_bits_of_rows_and_move_half_the_bytes(recipe, mesh, tensors):
    x, w = tensors
    state = delayed.init(recipe)
    state = {
        role: one._replace(stored=jnp.float32(scale))
        for (role, one), scale in zip(state.items(), (16, 64, 8), strict=False)
    }
    found, moves = [], []
    for in_codes in (False, True):
        run = program(mesh, recipe, in_codes)
        lowered = run.lower(x, w, delayed.unseen(recipe), state)
        found.append(jax.tree.leaves(lowered.compile()(x, w, delayed.unseen(recipe), state)))
        # as lowered: a CPU's collectives widen bfloat16
        moves.append(
            re.findall(
                rf"all_to_all.*tensor<{DEVICES}x{ROWS}x\d+x(\w+)>$", lowered.as_text(), re.MULTILINE
            )
        )
    rows, codes = found
    for mine, theirs in zip(codes, rows, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert np.isfinite(np.asarray(mine, np.float32)).all()
    assert moves[0] == ["bf16"] * 4
    assert sorted(moves[1]) == ["bf16", "bf16", "ui8", "ui8"]


@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_codes_move_where_one_scale_of_a_group_serves_both_gemms(role):
    def of(*names):
        return expert_codes.cast_of([recipes.by_name(name) for name in names], role)

    for recipe in ("tensorwise", "delayed"):
        assert of(recipe, recipe) is not None
    for recipe in ("bf16", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"):
        assert of(recipe) is None
    assert of("tensorwise", "delayed") is None
    of_all = recipes.GroupedRecipe(recipe=recipes.by_name("tensorwise").recipe, amax="all")
    assert expert_codes.cast_of([of_all], role) is None
