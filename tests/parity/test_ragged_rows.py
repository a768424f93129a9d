"""Blocks along rows of which the last is shorter, in every room: any number of tokens (spec L-5,
X-7).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fp8ref.formats import E4M3FN
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.experts import grouped
from fp8ref.jax.gemm import hardware as jax_hardware
from fp8ref.jax.linear import linear
from fp8ref.jax.quantize import scales as jax_scales
from fp8ref.jax.quantize import scaling as jax_scaling
from fp8ref.jax.quantize import stats as jax_stats
from fp8ref.sim import linear as sim
from fp8ref.sim.gemm import hardware
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.sim.quantize import stats as sim_stats
from fp8ref.torch.gemm import hardware as torch_hardware
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.observe import statistics as torch_stats
from fp8ref.torch.quantize import scaling as torch_scaling

N = K = 128
HOPPER = hardware.by_name("hopper")
ROWS = [1, 33, 96, 130]
blocks = pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])


def tensors(rows):
    """x [M, K], w [N, K], g [M, N]: integers times powers of two that grow by the row, so that each
    block of rows has a scale of its own.
    """
    rng = np.random.default_rng(rows)

    def of(m, columns):
        x = rng.integers(-7, 8, (m, columns)) * np.exp2(np.arange(m) // 32 % 4)[:, None]
        x[::16] = 7 * np.exp2(np.arange(m) // 32 % 4)[::16, None]
        return x.astype(np.float32)

    return of(rows, K), of(N, K), of(rows, N)


def jax_results(f, x, w, g):
    @jax.jit
    def passes(x, w, g):
        y, vjp = jax.vjp(f, x, w)
        return y, *vjp(g)

    return [
        np.asarray(v, np.float32)
        for v in passes(*(jnp.asarray(v, jnp.bfloat16) for v in (x, w, g)))
    ]


def torch_results(x, w, g, recipe):
    module = Linear(K, N, recipe, bias=False, dtype=torch.bfloat16)
    module.weight.data.copy_(torch.from_numpy(w))
    a = torch.from_numpy(x).bfloat16().requires_grad_()
    y = module(a)
    y.backward(torch.from_numpy(g).bfloat16())
    return [v.detach().float().numpy() for v in (y, a.grad, module.weight.grad)]


def same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("rows", ROWS)
def test_the_rooms_agree(rows, recipe):  # L-5, X-7, R-9; ms-swift#9723, NeMo-RL#1551
    """A linear of M rows is a group of M rows."""
    x, w, g = tensors(rows)
    expected = sim.forward(x, w, recipe), *sim.backward(g, x, w, recipe)
    same(jax_results(lambda x, w: linear.apply(x, w, recipe=recipe)[0], x, w, g), expected)
    same(torch_results(x, w, g, recipe), expected)
    y, grad_x, grad_w = jax_results(
        lambda x, w: grouped.apply(x, w[None], jnp.array([rows]), recipe=recipe)[0], x, w.T, g
    )
    same((y, grad_x, grad_w.T), expected)


@blocks
def test_simulated_hardware_agrees(recipe):  # G-19, G-13
    """A tensor core's step of 32 reaches beyond 33 rows."""
    x, w, g = tensors(33)
    expected = (
        sim.forward(x, w, recipe, accumulate="hopper"),
        *sim.backward(g, x, w, recipe, accumulate="hopper"),
    )
    with jax_hardware.simulating(HOPPER):
        same(jax_results(lambda x, w: linear.apply(x, w, recipe=recipe)[0], x, w, g), expected)
    with torch_hardware.simulating(HOPPER):
        same(torch_results(x, w, g, recipe), expected)


@pytest.mark.parametrize("rows", [1, 33, 130])
@pytest.mark.parametrize("granularity", ["blockwise_1x128", "mx_1x32"])
def test_codes_scales_and_statistics(granularity, rows):  # L-5, S-6, Q-9
    x = np.random.default_rng(0).standard_normal((rows, K)).astype(np.float32)
    how = {
        "granularity": granularity,
        "policy": "mx_rceil" if granularity == "mx_1x32" else "torchao",
        "axis": -2,
        "ragged": True,
    }
    q = sim_scaling.quantize(x, E4M3FN, **how)
    theirs = torch_scaling.quantize(torch.from_numpy(x), E4M3FN, **how)
    largest = jax_scaling.amax(jnp.asarray(x), granularity, axis=-2, ragged=True)
    by = jax_scales.scales_from_amax(largest, E4M3FN, jax_scales.implemented(how["policy"]))
    mine = jax_scaling.quantize(
        jnp.asarray(x), E4M3FN, granularity=granularity, policy=how["policy"], axis=-2, by=by
    )
    assert q.codes.shape == x.shape
    same(
        [np.asarray(mine.codes).view(np.uint8), np.asarray(mine.scale_inv)], [q.codes, q.scale_inv]
    )
    same([theirs.codes.view(torch.uint8).numpy(), theirs.scale_inv.numpy()], [q.codes, q.scale_inv])
    same([np.asarray(jax_scaling.dequantize(mine))], [sim_scaling.dequantize(q)])
    expected = sim_stats.statistics(x, q)
    for found in (
        jax_stats.parts(np.asarray(jax_stats.measure(jnp.asarray(x), mine))),
        torch_stats.measure(torch.from_numpy(x), theirs).numpy(),
    ):
        assert [int(v) for v in found[:5]] == [
            x.size,
            0,
            expected.underflows,
            expected.saturated,
            expected.overflows,
        ]


@blocks
def test_an_example_of_vmap_has_the_blocks_of_a_loop(recipe):  # L-10
    """Of a batch that vmap hides each example is one row: its blocks are that row's."""
    x, w, g = tensors(4)
    f = jax.vmap(lambda x, w: linear.apply(x, w, recipe=recipe)[0], (0, None))
    y, grad_x, grad_w = jax_results(f, x, w, g)
    loop = [
        (sim.forward(a, w, recipe), *sim.backward(b, a, w, recipe))
        for a, b in zip(x[:, None], g[:, None], strict=True)
    ]
    same((y, grad_x), [np.concatenate([one[i] for one in loop]) for i in range(2)])
    # autodiff adds the examples' gradients, each of bfloat16, in an order of its own: sums of
    # integers are exact until they are rounded
    total = jnp.asarray(sum(one[2].astype(np.float64) for one in loop), jnp.bfloat16)
    # three roundings of partial sums, 2^-9 of each
    bound = 2**-7 * sum(np.abs(one[2]) for one in loop)
    assert (np.abs(grad_w - np.asarray(total, np.float32)) <= bound).all()


@blocks
def test_devices_that_cut_the_tokens_have_blocks_of_their_own(recipe):  # P-5
    rows = 48
    x, w, g = tensors(2 * rows)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def apply(x, w):
        return linear.apply(
            x, w, recipe=recipe, placement=Placement(m=("data",), reduce_grads="float32")
        )[0]

    mapped = jax.shard_map(apply, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    y, grad_x, grad_w = jax_results(mapped, x, w, g)
    parts = [
        (sim.forward(a, w, recipe), *sim.backward(b, a, w, recipe))
        for a, b in zip(np.split(x, 2), np.split(g, 2), strict=True)
    ]
    same((y, grad_x), [np.concatenate([one[i] for one in parts]) for i in range(2)])
    same([grad_w], [np.asarray(jnp.asarray(parts[0][2] + parts[1][2], jnp.bfloat16), np.float32)])
