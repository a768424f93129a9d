"""Grouped linears in JAX (spec X), beside their parity with the simulator."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gemm.grouped_cases import SIZES, TENSORS_OF_ALL, integers, simulated, tensors
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fp8ref.formats import FLOAT16, FLOAT32
from fp8ref.jax import delayed
from fp8ref.jax.experts import grouped
from fp8ref.jax.experts import operands as grouped_operands
from fp8ref.recipe import E4M3FN, CastSpec, GemmSpec, Recipe


@pytest.fixture
def small(rng):
    """x [24, 32], w [3, 32, 16], sizes 7, 0 and 13, of a product that is exact."""
    return (
        jnp.asarray(rng.integers(-7, 8, (24, 32)), jnp.bfloat16),
        jnp.asarray(rng.integers(-7, 8, (3, 32, 16)), jnp.bfloat16),
        jnp.array([7, 0, 13]),
    )


def in_one_program(recipe):
    """A compiled function of x, w, grad_output and sizes: the output, grad_input and
    grad_weight.
    """

    @jax.jit
    def run(x, w, g, sizes):
        y, vjp = jax.vjp(lambda x, w: grouped.apply(x, w, sizes, recipe=recipe)[0], x, w)
        return y, *vjp(g)

    return run


def test_it_is_shaped_like_ragged_dot(small):
    y, seen = grouped.apply(*small, recipe="bf16")
    np.testing.assert_array_equal(y, jax.lax.ragged_dot(*small))
    assert seen is None


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("dtype", "fmt"), [(jnp.float32, FLOAT32), (jnp.float16, FLOAT16)], ids=str
)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_other_dtypes(recipe, dtype, fmt, rng):  # G-8
    x, w, g = integers(rng)
    sizes = jnp.array(SIZES)
    given = (jnp.asarray(v, dtype) for v in (x, w.swapaxes(1, 2), g))
    y, grad_input, grad_weight = in_one_program(recipe)(*given, sizes)
    expected = simulated(x, w, g, recipe, out_dtype=fmt)
    for found, which in (
        (y, "output"),
        (grad_input, "grad_input"),
        (grad_weight.swapaxes(1, 2), "grad_weight"),
    ):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected[which].astype(dtype), err_msg=which)


def test_in_a_scan_over_layers_with_sizes_of_their_own(small):
    x, w, sizes = small
    stack = jnp.stack(
        [
            w @ jnp.ones((16, 32), jnp.bfloat16) / 64,
            jnp.flip(w, 0) @ jnp.ones((16, 32), jnp.bfloat16) / 64,
        ]
    )
    of_layers = jnp.stack([sizes, jnp.array([0, 9, 9])])

    def layers(x, stack):
        return jax.lax.scan(
            lambda x, of: (grouped.apply(x, *of, recipe="rowwise")[0], None), x, (stack, of_layers)
        )[0].sum()

    found = jax.jit(jax.grad(layers, argnums=(0, 1)))(x, stack)

    layer = in_one_program("rowwise")
    ones = jnp.ones_like(x)  # the gradient of the sum
    between = layer(x, stack[0], ones, of_layers[0])[0]
    _, grad, grad_second = layer(between, stack[1], ones, of_layers[1])
    _, grad_x, grad_first = layer(x, stack[0], grad, of_layers[0])
    for a, b in zip(found, (grad_x, jnp.stack([grad_first, grad_second])), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.any(np.asarray(found[1]).astype(np.float32))


def test_under_vmap(small):
    (x, w, sizes), recipe = small, "tensorwise"
    xs, of_each = (
        jnp.stack([x, 2 * x, -x]),
        jnp.stack([sizes, jnp.array([24, 0, 0]), jnp.array([0, 0, 0])]),
    )
    alone = jax.jit(lambda x, s: grouped.apply(x, w, s, recipe=recipe)[0])
    for y, one, s in zip(jax.jit(jax.vmap(alone))(xs, of_each), xs, of_each, strict=True):
        np.testing.assert_array_equal(y, alone(one, s))


@pytest.mark.grid(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_a_nan_stays_in_its_group(recipe, rng):
    """lax.ragged_dot multiplies all rows by all weights, zeros by a NaN too."""
    x, w, g = tensors(rng)
    sizes, w = jnp.array(SIZES), w.swapaxes(1, 2)

    compiled = in_one_program(recipe)

    def run(x, w):
        return [
            np.asarray(v) for v in compiled(jnp.asarray(x), jnp.asarray(w), jnp.asarray(g), sizes)
        ]

    clean = run(x, w)
    x[3, 5], w[2, 9, 7] = np.nan, np.inf
    y, grad_input, grad_weight = run(x, w)
    assert np.isnan(y[3]).any()
    for found, before in ((y, clean[0]), (grad_input, clean[1])):
        np.testing.assert_array_equal(found[41:], before[41:])
    np.testing.assert_array_equal(grad_weight[3], clean[2][3])
    assert np.isnan(
        np.asarray(
            jax.lax.ragged_dot(
                jnp.asarray(np.nan_to_num(x)), jnp.asarray(np.where(np.isinf(w), np.nan, w)), sizes
            )
        )[41:]
    ).any()


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_experts_cut_by_a_mesh(recipe, rng):
    """Four devices: two parts of the batch, and two experts of four on each.

    Bits of each device's own groups; gradients of weights summed.
    """
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.asarray(rng.integers(-7, 8, (4 * 24, 32)), jnp.bfloat16)  # 24 rows a device
    w = jnp.asarray(rng.integers(-7, 8, (4, 32, 16)), jnp.bfloat16)
    sizes = jnp.array([[10, 14, 0, 20], [3, 0, 24, 0]])  # of a part of the batch and an expert

    g = jnp.broadcast_to(jnp.arange(16, dtype=jnp.bfloat16), (4 * 24, 16))

    def cut(x, w):
        rows, experts = P(("data", "expert")), P("expert")
        run = jax.shard_map(
            lambda x, w, s: grouped.apply(x, w, s[0], recipe=recipe)[0],
            mesh=mesh,
            in_specs=(rows, experts, P("data", "expert")),
            out_specs=rows,
        )
        return run(x, w, sizes)

    @jax.jit
    def ours(x, w, g):
        y, vjp = jax.vjp(cut, x, w)
        return y, *vjp(g)

    # one of the four by itself: rows, experts, gradients and sizes of its own
    device = in_one_program(recipe)
    parts = [(d, e, slice(24 * (2 * d + e), 24 * (2 * d + e + 1))) for d in (0, 1) for e in (0, 1)]
    alone = {
        (d, e): device(x[rows], w[2 * e : 2 * e + 2], g[rows], sizes[d, 2 * e : 2 * e + 2])
        for d, e, rows in parts
    }
    expected = (
        jnp.concatenate([y for y, _, _ in alone.values()]),
        jnp.concatenate([grad for _, grad, _ in alone.values()]),
        jnp.concatenate([alone[0, e][2] + alone[1, e][2] for e in (0, 1)]),
    )
    for a, b in zip(ours(x, w, g), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param("delayed", marks=pytest.mark.slow), TENSORS_OF_ALL],
    ids=["delayed", "all"],
)
def test_amaxes_of_all_groups_are_of_one_device(recipe, small):
    """Scales of a state are every device's."""
    x, w, sizes = small
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(AxisType.Auto,))
    given = (
        {"state": delayed.init("delayed"), "seen": delayed.unseen("delayed")}
        if recipe == "delayed"
        else {}
    )

    def run(x, w, s):
        return grouped.apply(x, w, s, recipe=recipe, **given)[0]

    cut = jax.shard_map(run, mesh=mesh, in_specs=(P("expert"),) * 3, out_specs=P("expert"))
    if recipe == "delayed":
        np.testing.assert_array_equal(cut(x, w, sizes), run(x, w, sizes))
        return
    with pytest.raises(
        ValueError,
        match="inside shard_map amaxes are per group; recipe 'tensorwise' needs those of all",
    ):
        cut(x, w, sizes)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_no_tokens(recipe, small):  # L-9
    _, w, _ = small
    given = (
        {"state": delayed.init(recipe), "seen": delayed.unseen(recipe)}
        if recipe == "delayed"
        else {}
    )

    def loss(x, w):
        y, seen = grouped.apply(x, w, jnp.zeros(3, int), recipe=recipe, **given)
        return y.sum(), (y, seen)

    grads, (y, seen) = jax.grad(loss, argnums=(0, 1), has_aux=True)(
        jnp.zeros((0, 32), jnp.bfloat16), w
    )
    assert y.shape == (0, 16)
    assert not np.any(np.asarray(grads[1]).astype(np.float32))
    assert not np.any(jax.tree.leaves(seen) or 0)


def test_derivatives_that_are_refused(small):  # L-8
    x, w, sizes = small

    def loss(x):
        return (
            grouped.apply(x, w, sizes, recipe="rowwise", name="experts")[0]
            .sum()
            .astype(jnp.float32)
        )

    with pytest.raises(
        ValueError, match="experts: the gradients of a linear are not differentiated again"
    ):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(x)
    with pytest.raises(ValueError, match="experts: a linear has derivatives in reverse mode only"):
        jax.jvp(loss, (x,), (x,))


SQUARES = Recipe(
    name="squares",
    output=GemmSpec(
        a=CastSpec(fmt=E4M3FN, granularity="blockwise_128x128"),
        b=CastSpec(fmt=E4M3FN, granularity="blockwise_1x128"),
        accumulate="fast",
    ),
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": "delayed"}, "experts: recipe 'delayed' needs a state and seen"),
        ({"state": delayed.init("delayed")}, "experts: recipe 'rowwise' has no state"),
        ({"recipe": SQUARES}, "experts: no block of a grouped input has several rows"),
        ({"recipe": "nothing"}, "experts: a grouped recipe is"),
    ],
)
def test_what_is_refused(change, message, small):
    given = (
        dict(zip(("x", "w", "group_sizes"), small, strict=True))
        | {"recipe": "rowwise", "name": "experts"}
        | change
    )
    with pytest.raises(ValueError, match=message):
        grouped.apply(**given)


def test_a_gpus_products_are_in_fp8(small):
    """As exported for an NVIDIA GPU: codes go into the products as they are, a block of 16 rows
    after another.
    """
    x, w, sizes = small

    def step(x, w, sizes):
        y, vjp = jax.vjp(lambda x, w: grouped.apply(x, w, sizes, recipe="rowwise")[0], x, w)
        return y, vjp(y)

    text = jax.export.export(jax.jit(step), platforms=["cuda"])(x, w, sizes).mlir_module()
    types = re.findall(r"stablehlo\.dot_general .* : \(tensor<(.*?)>, tensor<(.*?)>\)", text)
    assert types == [
        ("16x32xf8E4M3FN", "32x16xf8E4M3FN"),
        ("16x16xf8E4M3FN", "32x16xf8E4M3FN"),
        ("16x32xf8E4M3FN", "16x16xf8E4M3FN"),
    ]


@pytest.mark.grid(2)
@pytest.mark.parametrize("rows", [1, 31, 64, 500, 6000])
def test_blocks_of_rows(rows, rng):
    """Every row of a group is in a block of its group, once; others in none.

    No more than twice the rows, or 16 more for each group.
    """
    sizes = rng.multinomial(rows - rows // 8, [0.5, 0, 0.1, 0.4]).astype(np.int32)
    groups = grouped_operands.groups_of(jnp.asarray(sizes), rows)
    blocks = grouped_operands._row_blocks(groups)
    x = np.arange(1, rows + 1, dtype=np.float32)[:, None]
    laid = np.asarray(blocks.of(jnp.asarray(x)))[..., 0]
    assert laid.size <= max(2 * rows, rows + 16 * 4)
    for e, (begin, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes, strict=True)):
        found = laid[np.asarray(blocks.group) == e].reshape(-1)
        np.testing.assert_array_equal(found[found > 0], x[begin : begin + size, 0])
    assert (laid > 0).sum() == sizes.sum()
