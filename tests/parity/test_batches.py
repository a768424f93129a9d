"""Contractions with batch dims: each element is a linear by itself, in every room (spec L-10,
S-6).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

import fp8ref.jax as fj
from fp8ref.formats import E2M1FN, E4M3FN
from fp8ref.jax.linear import contraction, linear
from fp8ref.jax.quantize import scaling as jax_scaling
from fp8ref.policy import FP4_POLICIES
from fp8ref.recipe import RECIPES
from fp8ref.selection.grouped import GroupedRecipe
from fp8ref.sim.experts import grouped as sim
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.torch.experts import grouped as torch_grouped
from fp8ref.torch.quantize import scaling as torch_scaling

B, M, N, K = 2, 128, 256, 128
DYNAMIC = [
    name
    for name, recipe in RECIPES.items()
    if not (recipe.delayed or recipe.stochastic) and name != "blockwise_deepgemm"
]
"""Without those that round by a seed, which elements of a batch share. Of 'blockwise_deepgemm', whose scales are no powers of two, sums are not exact: it has the blocks
of 'blockwise'.
"""

OF_ELEMENTS = [
    name for name in DYNAMIC if "tensorwise" not in {c.granularity for c in RECIPES[name].casts}
]
"""Recipes without a scale of whole tensors: the batch has the bits of a loop."""

CASES = ("bmk,bnk->bmn", "bmk,bkn->bmn", "mbk,bkn->nbm", "kmb,knb->bmn")


def batch(rng, *shape):
    """7 and smaller integers times powers of two, another one for each 32 rows and columns, and for
    each matrix of a batch: scales are powers of two, sums exact, and a block of two matrices would
    lose all of the smaller one."""
    place = np.indices(shape)
    power = np.exp2((place[1:] // 32).sum(0) % 3 + 40 * place[0] - 20)
    return (np.where(place[1:].sum(0) % 16 == 0, 7, rng.integers(-7, 8, shape)) * power).astype(
        np.float32
    )


@pytest.fixture(scope="module")
def tensors():
    """x [B, M, K], w [B, N, K], g [B, M, N]."""
    rng = np.random.default_rng(0)
    return batch(rng, B, M, K), batch(rng, B, N, K), batch(rng, B, M, N)


def compiled(f):
    """y, grad_input and grad_weight of f, float32, by one program."""

    @jax.jit
    def passes(x, w, g):
        y, vjp = jax.vjp(f, x, w)
        return y, *vjp(g)

    return lambda *given: [
        np.asarray(v, np.float32) for v in passes(*(jnp.asarray(v, jnp.bfloat16) for v in given))
    ]


def in_order(term, order, *values):
    return [np.asarray(jnp.einsum(f"{term}->{order}", jnp.asarray(v))) for v in values]


@functools.cache
def of_one(recipe):
    return compiled(lambda x, w: linear.apply(x, w, recipe=recipe)[0])


def by_loop(x, w, g, recipe):
    """Each element by a linear of its own, stacked."""
    of_each = [of_one(recipe)(*one) for one in zip(x, w, g, strict=True)]
    return [np.stack(parts) for parts in zip(*of_each, strict=True)]


@pytest.mark.parametrize("recipe", OF_ELEMENTS)
@pytest.mark.parametrize("subscripts", CASES)
def test_a_batch_has_the_bits_of_a_loop(subscripts, recipe, tensors):  # L-10
    (of_x, of_w), out = subscripts.split("->")[0].split(","), subscripts.split("->")[1]
    x, w, g = tensors
    turned = in_order("bmk", of_x, x) + in_order("bnk", of_w, w) + in_order("bmn", out, g)
    y, grad_x, grad_w = compiled(
        lambda x, w: contraction.einsum(subscripts, x, w, recipe=recipe)[0]
    )(*turned)
    found = in_order(out, "bmn", y) + in_order(of_x, "bmk", grad_x) + in_order(of_w, "bnk", grad_w)
    for mine, expected in zip(found, by_loop(x, w, g, recipe), strict=True):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_under_vmap_a_batch_has_the_bits_of_a_loop(recipe, tensors):  # L-10
    mapped = compiled(jax.vmap(lambda x, w: linear.apply(x, w, recipe=recipe)[0]))(*tensors)
    for mine, expected in zip(mapped, by_loop(*tensors, recipe), strict=True):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_the_rooms_agree(recipe, tensors):  # L-10, X-3
    """A batch is groups of equal size, of which all share a tensorwise scale."""
    x, w, g = tensors
    grouped = GroupedRecipe(
        recipe=RECIPES[recipe], amax="group" if recipe in OF_ELEMENTS else "all"
    )
    rows, ends = x.reshape(-1, K), [M * (i + 1) for i in range(B)]
    y = sim.forward(rows, w, ends, grouped)
    grad_x, grad_w = sim.backward(g.reshape(-1, N), rows, w, ends, grouped)
    expected = y.reshape(B, M, N), grad_x.reshape(x.shape), grad_w
    mine = compiled(lambda x, w: contraction.einsum("bmk,bnk->bmn", x, w, recipe=recipe)[0])(
        x, w, g
    )
    a, b = (torch.from_numpy(v).bfloat16().requires_grad_() for v in (rows, w))
    out = torch_grouped.apply(a, b, torch.tensor(ends, dtype=torch.int32), recipe=grouped)
    out.backward(torch.from_numpy(g).bfloat16().reshape(-1, N))
    theirs = [
        v.detach().float().numpy().reshape(e.shape)
        for v, e in zip((out, a.grad, b.grad), expected, strict=True)
    ]
    for ours, by_torch, by_sim in zip(mine, theirs, expected, strict=True):
        np.testing.assert_array_equal(ours, by_sim)
        np.testing.assert_array_equal(by_torch, by_sim)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    "granularity", ["rowwise", "blockwise_1x128", "blockwise_128x128", "mx_1x32"]
)
def test_a_batch_is_quantized_matrix_by_matrix(granularity, axis, tensors):  # S-6
    policy, x = "mx_rceil" if granularity == "mx_1x32" else "torchao", tensors[1]
    how = {"granularity": granularity, "policy": policy, "axis": axis}
    alone = [sim_scaling.quantize(one, E4M3FN, **how) for one in x]
    codes, scale_inv = np.stack([q.codes for q in alone]), np.stack([q.scale_inv for q in alone])
    mine = jax_scaling.quantize(jnp.asarray(x), E4M3FN, **how)
    theirs = torch_scaling.quantize(torch.from_numpy(x), E4M3FN, **how)
    found = [
        sim_scaling.quantize(x, E4M3FN, **how)[::2][:2],
        (np.asarray(mine.codes).view(np.uint8), np.asarray(mine.scale_inv)),
        (theirs.codes.view(torch.uint8).numpy(), theirs.scale_inv.numpy()),
    ]
    for own_codes, own_scale_inv in found:
        np.testing.assert_array_equal(own_codes, codes)
        np.testing.assert_array_equal(own_scale_inv, scale_inv)


@pytest.mark.parametrize("granularity", ["mx_32x32", "nvfp4_1x16", "nvfp4_16x16"])
def test_the_simulators_own_blocks_are_of_one_matrix(granularity, tensors):  # S-6, S-22
    """Of two levels each block of a batch has the scale that it has alone, under the tensor's
    one.
    """
    x = (
        tensors[1]
        if granularity == "mx_32x32"
        else tensors[1] * np.exp2(np.array([20, -20]))[:, None, None].astype(np.float32)
    )
    fmt, policy = (
        (E4M3FN, "mx_rceil") if granularity == "mx_32x32" else (E2M1FN, FP4_POLICIES["te_nvfp4"])
    )
    whole = sim_scaling.quantize(x, fmt, granularity=granularity, policy=policy)
    for i, one in enumerate(x):
        alone = sim_scaling.quantize(one, fmt, granularity=granularity, policy=policy)
        np.testing.assert_array_equal(whole.codes[i], alone.codes)
        np.testing.assert_array_equal(whole.scale_inv[i], alone.scale_inv)
    # zeros among the integers
    assert np.abs(cast.decode(whole.codes, fmt)).min(axis=(1, 2)).max() == 0


def nnx_general(x, w):
    layer = nnx.LinearGeneral(
        K, N, batch_axis={0: B}, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    layer.kernel[...] = w
    return layer


def nnx_einsum(x, w):
    layer = nnx.Einsum("bmk,bkn->bmn", (B, K, N), param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.kernel[...] = w
    return layer


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("made", [nnx_general, nnx_einsum])
def test_layers_of_nnx(made, recipe, tensors):  # L-10
    x, w, g = (jnp.asarray(v, jnp.bfloat16) for v in tensors)
    layer = fj.flax.convert(made(x, w.swapaxes(1, 2)), recipe)
    for one, expected in zip(
        np.asarray(layer(x), np.float32), by_loop(x, w, g, recipe)[0], strict=True
    ):
        np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_layers_of_linen(recipe, tensors):  # L-10
    x, w, g = (jnp.asarray(v, jnp.bfloat16) for v in tensors)
    expected = by_loop(x, w, g, recipe)[0]
    general = linen.DenseGeneral(
        N,
        batch_dims=(0,),
        use_bias=False,
        dot_general_cls=fj.flax.linen_dot_general(recipe),
        dtype=jnp.bfloat16,
    )
    einsum = fj.flax.Einsum(
        (B, K, N), "bmk,bkn->bmn", use_bias=False, recipe=recipe, dtype=jnp.bfloat16
    )
    for layer in (general, einsum):
        y = layer.apply({"params": {"kernel": w.swapaxes(1, 2)}}, x)
        np.testing.assert_array_equal(np.asarray(y, np.float32), expected)
