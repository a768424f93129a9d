"""Rows that move between devices with different experts: the bits of one device with all of
them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fp8ref.formats import E4M3FN
from fp8ref.jax.experts import grouped
from fp8ref.jax.experts import operands as grouped_operands
from fp8ref.jax.experts import parallel as expert_parallel
from fp8ref.jax.quantize import scaling
from fp8ref.recipe import RECIPES

DEVICES, EXPERTS, ROWS, K, N = 2, 4, 24, 32, 16
# of a device's rows; 5 of the second's are in no group
SIZES = np.array([[9, 0, 5, 10], [3, 0, 12, 4]])


@pytest.fixture
def mesh():
    return jax.make_mesh((DEVICES,), ("expert",), axis_types=(AxisType.Auto,))


def _tensors(rng):
    """Integers, whose sums under scales of all of K are exact; the rows of no group are NaN."""
    x = rng.integers(-7, 8, (DEVICES * ROWS, K)).astype(np.float32)
    x[ROWS + SIZES[1].sum() :] = np.nan
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(
        rng.integers(-7, 8, (EXPERTS, K, N)), jnp.bfloat16
    )


def _order():
    """Where each row of all devices is, expert after expert: as one device would sort them."""
    expert = np.concatenate(
        [np.repeat(np.arange(EXPERTS + 1), [*sizes, ROWS - sizes.sum()]) for sizes in SIZES]
    )
    return np.argsort(expert, kind="stable")


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("tensorwise", marks=pytest.mark.slow)])
def test_outputs_and_gradients_are_those_of_one_device(recipe, mesh, rng):
    x, w = _tensors(rng)
    order = _order()

    def apart(x, w, sizes):
        moved = expert_parallel.dispatch(x, sizes[0], "expert")
        y, _ = grouped.apply(moved.rows, w, moved.sizes, recipe=recipe)
        return expert_parallel.combine(y, moved, "expert")

    def sharded(x, w):
        cut = P("expert")
        return jax.shard_map(apart, mesh=mesh, in_specs=(cut, cut, cut), out_specs=cut)(
            x, w, jnp.asarray(SIZES)
        )

    def alone(x, w):
        y, _ = grouped.apply(x[order], w, jnp.asarray(SIZES.sum(0)), recipe=recipe)
        return jnp.zeros_like(y).at[order].set(y)

    def loss(f, x, w):
        y = f(x, w).astype(jnp.float32)
        return (y * (1 + jnp.arange(N) % 3)).sum(), y

    run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2), has_aux=True), static_argnums=0)
    (_, y), grads = run(sharded, x, w)
    (_, expected), of_one = run(alone, x, w)
    np.testing.assert_array_equal(y, expected)
    assert np.isfinite(y).all()
    for mine, theirs in zip(grads, of_one, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("spec", "axis"),
    [
        (RECIPES["tensorwise"].output.a, -1),
        pytest.param(RECIPES["rowwise"].grad_weight.b, -2, marks=pytest.mark.slow),
    ],
    ids=["tensorwise", "rowwise"],
)
def test_devices_with_rows_of_the_same_groups_share_their_scales(spec, axis, mesh, rng):
    x, order = jnp.asarray(rng.standard_normal((DEVICES * ROWS, K)), jnp.bfloat16), _order()

    def quantized(x, sizes, over=()):
        groups = grouped_operands.groups_of(sizes, len(x))
        q = grouped_operands.quantize_rows(groups.only(x), spec, axis, groups, "group", over=over)
        return q.codes.view(jnp.uint8), q.scale

    def apart(x, sizes):
        codes, scale = quantized(x, sizes[0], ("expert",))
        return codes, scale[None]

    cut = P("expert")
    codes, scales = jax.jit(jax.shard_map(apart, mesh=mesh, in_specs=(cut, cut), out_specs=cut))(
        x, jnp.asarray(SIZES)
    )
    of_one, expected = quantized(x[order], jnp.asarray(SIZES.sum(0)))
    inside = np.arange(DEVICES * ROWS) < ROWS + SIZES[1].sum()
    np.testing.assert_array_equal(
        codes[inside], jnp.zeros_like(of_one).at[order].set(of_one)[inside]
    )
    for scale in scales:
        np.testing.assert_array_equal(scale, expected)


@pytest.mark.parametrize(
    "granularity", ["rowwise", pytest.param("mx_1x32", marks=pytest.mark.slow)]
)
#
def test_moving_codes_gives_the_bits_of_moving_the_tensor_and_casting(granularity, mesh, rng):
    spec = RECIPES["mxfp8"].output.a if granularity == "mx_1x32" else RECIPES["rowwise"].output.a
    x = jnp.asarray(rng.standard_normal((DEVICES * ROWS, K)), jnp.bfloat16)

    def quantized(x):
        return scaling.quantize(x, spec.fmt, granularity=granularity, policy=spec.policy, axis=-1)

    def both(x, sizes):
        tensor = expert_parallel.dispatch(x, sizes[0], "expert")
        valid = jnp.arange(len(tensor.rows)) < tensor.sizes.sum()
        after, (before, moved) = (
            quantized(tensor.rows),
            expert_parallel.dispatch_quantized(quantized(x), sizes[0], "expert"),
        )
        equal = [
            a.view(jnp.uint8) == b.view(jnp.uint8)
            for a, b in ((after.codes, before.codes), (after.scale, before.scale))
        ]
        return tuple(jnp.where(valid[:, None], e, True) for e in equal), moved.sizes == tensor.sizes

    cut = P("expert")
    program = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=(cut, cut), out_specs=cut))
    same, sizes = program(x, jnp.asarray(SIZES))
    assert all(bool(v.all()) for v in (*same, sizes))
    text = program.lower(x, jnp.asarray(SIZES)).as_text()
    moves = [line for line in text.splitlines() if "all_to_all" in line]
    assert any("f8E4M3FN" in line for line in moves)


def test_what_may_not_move_is_refused(mesh):
    x = jnp.ones((DEVICES * ROWS, K), jnp.bfloat16)
    cut = P("expert")

    def run(f, sizes):
        return jax.shard_map(f, mesh=mesh, in_specs=(cut, P()), out_specs=cut)(
            x, jnp.asarray(sizes)
        )

    with pytest.raises(ValueError, match="one scale per row; got 'tensorwise'"):
        run(
            lambda x, s: (
                expert_parallel.dispatch_quantized(scaling.quantize(x, E4M3FN), s, "expert")[1].rows
            ),
            SIZES[0],
        )
    with pytest.raises(ValueError, match="divisible by the 2 devices of axis 'expert'; got 3"):
        run(lambda x, s: expert_parallel.dispatch(x, s, "expert").rows, SIZES[0][:3])
