"""The recipes nvfp4 and mxfp4, computed again by hand: from quantized operands, as R-1 and S-22 to
S-24 say.
"""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.quantize.fp4_libraries import transformer_engine

from fp8ref.formats import BFLOAT16, E2M1FN, E4M3FN
from fp8ref.policy import FP4_POLICIES
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.sim import linear
from fp8ref.sim.attention.operands import hadamard
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast, packing, scaling
from fp8ref.spec.rotation import NVFP4_ROTATION, Rotation


@pytest.fixture
def operands(rng):
    """x [64, 96], w [48, 96], g [64, 48], values of bfloat16."""
    return tuple(
        cast.round_to(rng.standard_normal(shape) * size, BFLOAT16)
        for shape, size in (((64, 96), 1), ((48, 96), 0.1), ((64, 48), 1e-3))
    )


def nv(x, granularity="nvfp4_1x16", **options):
    return scaling.quantize(x, E2M1FN, granularity=granularity, policy="te_nvfp4", **options)


def rotated(x):
    """x D H / 4 in blocks of 16, by the matrices; exact in float64, as bfloat16 holds 8 bits and
    sixteen are summed.
    """
    h = np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    d = np.diag(NVFP4_ROTATION.signs)
    return cast.round_to(
        (x.astype(np.float64).reshape(-1, 16) @ d @ h / 4).reshape(x.shape), BFLOAT16
    )


def test_nvfp4_is_the_three_gemms_of_transformer_engine(operands):  # R-1, S-22, S-23, S-24
    x, w, g = operands
    output, (grad_input, grad_weight) = (
        linear.forward(x, w, "nvfp4"),
        linear.backward(g, x, w, "nvfp4", seed=3),
    )
    np.testing.assert_array_equal(
        output, gemm.matmul(nv(x), nv(w, "nvfp4_16x16"), out_dtype=BFLOAT16)
    )
    seeds = [linear.seed_of(3, which) for which in ("grad_input", "grad_weight")]
    of_g = nv(g, rounding="stochastic", seed=seeds[0])
    np.testing.assert_array_equal(
        grad_input, gemm.matmul(of_g, nv(w.T, "nvfp4_16x16"), out_dtype=BFLOAT16)
    )
    gt, xt = rotated(np.ascontiguousarray(g.T)), rotated(np.ascontiguousarray(x.T))
    of_gt = nv(gt, rounding="stochastic", seed=seeds[1])
    np.testing.assert_array_equal(grad_weight, gemm.matmul(of_gt, nv(xt), out_dtype=BFLOAT16))
    assert len({3, *seeds}) == 3


def test_activations_by_row_are_a_policy_of_the_operand(operands):  # R-1, S-22
    """Transformer Engine's row_scaled_activation: each token has the output that it has alone."""
    x, w, _ = operands
    recipe = RECIPES["nvfp4"]
    by_row = dataclasses.replace(recipe.output.a, policy=FP4_POLICIES["te_nvfp4_row"])
    mine = dataclasses.replace(
        recipe, name="mine", output=dataclasses.replace(recipe.output, a=by_row)
    )
    output = linear.forward(x, w, mine)
    for i in (0, 7):
        np.testing.assert_array_equal(output[i], linear.forward(x[i : i + 1], w, "nvfp4")[0])
    assert not np.array_equal(output, linear.forward(x, w, "nvfp4"))


# S-22: what forward and backward multiply is one weight
def test_a_square_of_a_weight_has_the_codes_of_its_transpose(operands):
    _, w, _ = operands
    a, b = nv(w, "nvfp4_16x16"), nv(np.ascontiguousarray(w.T), "nvfp4_16x16")
    np.testing.assert_array_equal(a.codes, b.codes.T)
    codes, _, _ = transformer_engine(torch.from_numpy(w), 16)
    np.testing.assert_array_equal(packing.pack(a.codes), codes.numpy())
    assert (nv(w).codes != nv(np.ascontiguousarray(w.T)).codes.T).any()


def test_mxfp4_is_mxfp8_in_e2m1fn(operands):
    x, w, g = operands
    a, b = (scaling.quantize(v, E2M1FN, granularity="mx_1x32", policy="mx_rceil") for v in (x, w))
    np.testing.assert_array_equal(
        linear.forward(x, w, "mxfp4"), gemm.matmul(a, b, out_dtype=BFLOAT16)
    )
    padded = np.pad(w, ((0, 16), (0, 0)))  # N in blocks of 32
    grads = linear.backward(np.pad(g, ((0, 0), (0, 16))), x, padded, "mxfp4")
    assert [v.shape for v in grads] == [(64, 96), (64, 96)]


def test_gradients_round_afresh_with_another_seed_and_are_unbiased(operands):  # S-24
    x, w, g = operands
    grads = np.array(
        [linear.backward(g, x, w, "nvfp4", seed=seed)[0] for seed in range(64)], np.float64
    )
    np.testing.assert_array_equal(grads[5], linear.backward(g, x, w, "nvfp4", seed=5)[0])
    assert (grads[0] != grads[1]).mean() > 0.5
    weight = scaling.dequantize(nv(w.T, "nvfp4_16x16")).astype(np.float64)
    error, spread = grads.mean(axis=0) - g.astype(np.float64) @ weight.T, grads.std(axis=0)
    # Of 64 draws the mean is within six standard deviations of one, by eight; and outputs round to
    # bfloat16, 2^-9 of them. The largest of a block may be scaled above 6, where it is lowered: S_b
    # is rounded to e4m3fn, by 2^-4 at most, which moves one element in sixteen.
    assert np.median(np.abs(error)) < 0.25 * np.median(spread)


def test_a_rotation_spreads_an_outlier_and_leaves_the_product(rng):  # S-23
    x, g = (cast.round_to(rng.standard_normal((64, n)), BFLOAT16) for n in (16, 32))
    x[5] *= 64
    a, b = (hadamard.rotate_blocks(np.ascontiguousarray(v.T), NVFP4_ROTATION) for v in (g, x))
    np.testing.assert_array_equal(b, rotated(np.ascontiguousarray(x.T)))
    exact = g.T.astype(np.float64) @ x
    # Each rotated element is rounded to bfloat16, by 2^-9 of it; both factors: 2^-8 of the norms'
    # product.
    bound = 2.0**-8 * np.linalg.norm(g, axis=0)[:, None] * np.linalg.norm(x, axis=0)[None, :]
    assert (np.abs(a.astype(np.float64) @ b.T - exact) <= bound).all()
    with pytest.raises(ValueError, match="a rotation of 16 needs K divisible by it"):
        hadamard.rotate_blocks(np.ones((2, 24), np.float32), NVFP4_ROTATION)


def test_a_recipe_of_ones_own_may_round_forward_or_rotate_in_fp8(operands):  # S-23, S-24
    x, w, g = operands
    row = CastSpec(fmt=E4M3FN, granularity="rowwise", rotation=Rotation(signs=(1, -1, -1, 1)))
    drawn = dataclasses.replace(row, rounding="stochastic")
    mine = Recipe(name="mine", output=GemmSpec(a=drawn, b=row, accumulate="fast"))
    a, b = (hadamard.rotate_blocks(v, row.rotation) for v in (x, w))
    of_a = scaling.quantize(
        a, E4M3FN, granularity="rowwise", rounding="stochastic", seed=linear.seed_of(9, "output")
    )
    expected = gemm.matmul(
        of_a, scaling.quantize(b, E4M3FN, granularity="rowwise"), out_dtype=BFLOAT16
    )
    np.testing.assert_array_equal(linear.forward(x, w, mine, seed=9), expected)
    with pytest.raises(
        ValueError,
        match=r"recipe 'mine' rounds stochastically in output .*got seed=None. Give a seed",
    ):
        linear.forward(x, w, mine)
    with pytest.raises(
        ValueError,
        match=r"recipe 'mine' rounds nothing stochastically in grad_input and grad_weight .*got "
        r"seed=1. Leave it out",
    ):
        linear.backward(g, x, w, mine, seed=1)


def test_errors(operands):
    x, w, g = operands
    with pytest.raises(
        ValueError, match="recipe 'nvfp4' rounds stochastically in grad_input and grad_weight"
    ):
        linear.backward(g, x, w, "nvfp4")
    with pytest.raises(ValueError, match="recipe 'nvfp4' rounds nothing stochastically in output"):
        linear.forward(x, w, "nvfp4", seed=0)
    with pytest.raises(ValueError, match="tensor cores multiply e4m3fn and e5m2; got e2m1fn"):
        linear.forward(x, w, "nvfp4", accumulate="hopper")
    with pytest.raises(ValueError, match="a seed is an integer"):
        linear.backward(g, x, w, "nvfp4", seed=-1)
