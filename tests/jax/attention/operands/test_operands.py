"""Blocks, tiles and casts of attention's operands (spec A-6, A-8)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention import attention_cases as cases

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax.attention import attention
from fp8ref.jax.attention.operands import inputs as inputs
from fp8ref.jax.attention.operands import operands as operands
from fp8ref.sim.attention import attention as sim
from fp8ref.spec.attention.variants import VARIANTS

F = np.float32


def call_of(name: str, mask: str) -> inputs.DeviceCall:
    return inputs.DeviceCall(variant=name, mask=cases.MASKS[mask])


@pytest.mark.parametrize("mask", cases.MASKS)
@pytest.mark.parametrize("name", ["fa3", "cudnn", "bf16"])
def test_pairs_are_those_that_see_each_other(name, mask):
    call = call_of(name, mask)
    grid = operands.grid(call, 1300, 1500, 64)
    assert grid.length == VARIANTS[name].tile(64, call.mask)
    low, high = inputs.visible(1300, 1500, call.mask)
    wanted = {
        (i // grid.rows, j // grid.length)
        for i in range(1300)
        for j in {*range(low[i], high[i], 16), max(high[i] - 1, low[i])}
        if low[i] <= j < high[i]
    }
    pairs = list(zip(*map(np.ndarray.tolist, grid.pairs), strict=True))
    assert set(pairs) == wanted
    assert len(pairs) == len(wanted)
    for _, of_block in itertools.groupby(pairs, lambda pair: pair[0]):
        tiles = [tile for _, tile in of_block]
        assert tiles == sorted(tiles, reverse=VARIANTS[name].descending)
    assert not (grid.high[1300:] > grid.low[1300:]).any()


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_clipped_numbers_are_counted_as_the_simulator_does(fmt):
    unit = 2.0 ** (np.floor(np.log2(fmt.max)) - fmt.mantissa_bits)
    middle = F(fmt.max + unit / 2)
    x = F(
        [
            0,
            1,
            fmt.max,
            np.nextafter(middle, F(0)),
            middle,
            np.nextafter(middle, F(np.inf)),
            2 * fmt.max,
        ]
    )
    for n in range(len(x)):
        assert (
            operands.clipped(jnp.asarray(x[n]), fmt)
            == sim.round_probabilities(x[n : n + 1], F(1), fmt)[1]
        )


def test_a_cast_is_not_left_out():  # a CPU's dot begins by widening the codes
    p = (256 * np.random.default_rng(0).random((1, 1, 32, 64))).astype(F)
    eye = jnp.eye(64, dtype=jnp.float8_e4m3fn)[None, None]
    for name in ("fa3", "mxfp8"):
        variant = VARIANTS[name]
        b = eye.astype(jnp.bfloat16) if name == "mxfp8" else eye
        found = jax.jit(
            lambda p, b, variant=variant: jax.lax.dot_general(
                operands.narrow(p, variant), b, (((3,), (2,)), ((0, 1), (0, 1)))
            )
        )(p, b)
        np.testing.assert_array_equal(
            np.asarray(found.astype(jnp.float32)), sim.round_probabilities(p, F(1), E4M3FN)[0]
        )


def test_products_of_codes_stay_in_fp8():
    """Under plans of registers by fast accumulation; others by slow.

    Operands of MX blocks and bfloat16 are bfloat16.
    """
    q, k, v = (jnp.ones((1, 2, 128, 64), jnp.bfloat16) for _ in range(3))
    for name, dtype, precision in (
        ("fa3", "f8E4M3FN", "DEFAULT"),
        ("cudnn", "f8E4M3FN", "HIGHEST"),
        ("mxfp8", "bf16", None),
        ("bf16", "bf16", None),
    ):
        text = (
            jax.jit(lambda q, k, v, name=name: attention.apply(q, k, v, variant=name))
            .trace(q, k, v)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )
        dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert len(dots) == 2
        for dot in dots:
            assert dot.split(" : (")[1].count(f"x{dtype}>") == 2
            assert dot.endswith("xf32>")
            assert precision is None or f"precision = [{precision}, {precision}]" in dot


def test_nothing_is_promoted():
    """Programs may forbid that JAX broadcasts ranks or promotes dtypes by itself."""
    q = jnp.ones((1, 2, 64, 32), jnp.bfloat16)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        grad = jax.eval_shape(
            jax.grad(lambda q: attention.apply(q, q, q, variant="cudnn").sum()), q
        )
    assert grad.shape == q.shape
