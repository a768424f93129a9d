import numpy as np
import pytest

from fp8ref.formats import BFLOAT16, FLOAT32
from fp8ref.recipe import RECIPES
from fp8ref.sim import cast, gemm, linear, scaling


@pytest.fixture
def operands(rng):
    """x [2, 24, 64], w [32, 64], g [2, 24, 32], values of bfloat16."""
    return [
        cast.round_to(rng.standard_normal(shape) * s, BFLOAT16) for shape, s in (((2, 24, 64), 1), ((32, 64), 0.1), ((2, 24, 32), 1e-3))
    ]


def test_tensorwise_by_hand(operands):  # L-1, L-2, L-3, R-1
    x, w, g = operands
    e4m3, e5m2 = RECIPES["tensorwise"].output.a.fmt, RECIPES["tensorwise"].grad_input.a.fmt
    assert (e4m3.name, e5m2.name) == ("e4m3fn", "e5m2")
    x2, g2 = x.reshape(48, 64), g.reshape(48, 32)
    qx, qw, qg = scaling.quantize(x2, e4m3), scaling.quantize(w, e4m3), scaling.quantize(g2, e5m2)
    y = gemm.matmul(qx, qw, out_dtype=BFLOAT16)
    np.testing.assert_array_equal(linear.forward(x, w, "tensorwise"), y.reshape(2, 24, 32))
    grad_input, grad_weight = linear.backward(g, x, w, "tensorwise")

    def transposed(q):
        return q._replace(codes=q.codes.T)

    np.testing.assert_array_equal(grad_input, gemm.matmul(qg, transposed(qw), out_dtype=BFLOAT16).reshape(x.shape))
    np.testing.assert_array_equal(grad_weight, gemm.matmul(transposed(qg), transposed(qx), out_dtype=BFLOAT16))


def test_rowwise_scales_each_gemm_along_its_own_axis(operands):  # L-3, R-1
    x, w, g = operands
    x2, g2 = x.reshape(48, 64), g.reshape(48, 32)
    spec = RECIPES["rowwise"].grad_weight
    qg, qx = (scaling.quantize(v.T, c.fmt, granularity="rowwise", policy=c.policy, axis=1) for v, c in ((g2, spec.a), (x2, spec.b)))
    assert qg.scale.shape == (32, 1)
    assert qx.scale.shape == (64, 1)
    assert (np.frexp(qg.scale)[0] == 0.5).all()
    expected = gemm.matmul(qg, qx, epilogue="unit_round_scale_round", out_dtype=BFLOAT16)
    np.testing.assert_array_equal(linear.backward(g, x, w, "rowwise")[1], expected)


def test_rowwise_with_gw_hp_keeps_grad_weight_in_high_precision(operands):  # R-1, L-4
    x, w, g = operands
    grad_input, grad_weight = linear.backward(g, x, w, "rowwise_with_gw_hp")
    np.testing.assert_array_equal(grad_weight, linear.backward(g, x, w, "bf16")[1])
    spec = RECIPES["rowwise_with_gw_hp"].grad_input
    qg = scaling.quantize(g.reshape(48, 32), spec.a.fmt, granularity="rowwise", policy=spec.a.policy)
    qw = scaling.quantize(w.T, spec.b.fmt, policy=spec.b.policy)
    assert qw.scale.shape == ()
    expected = gemm.matmul(qg, qw, epilogue="unit_round_scale_round", out_dtype=BFLOAT16)
    np.testing.assert_array_equal(grad_input, expected.reshape(x.shape))


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_is_near_high_precision(recipe, operands):
    x, w, _ = operands
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    # operands err by at most 1/16 each (S-5), so their product by 2/16 + 1/256 of sum |x w|, and bfloat16 by 2^-8
    bound = (np.abs(x).astype(np.float64) @ np.abs(w).T) * (2 / 16 + 1 / 256) + np.abs(exact) * 2.0**-8
    assert (np.abs(linear.forward(x, w, recipe) - exact) <= bound).all()
    assert linear.forward(x, w, recipe, out_dtype=FLOAT32).dtype == np.float32


def test_rowwise_outputs_pass_through_bfloat16(operands):  # G-8
    x, w, _ = operands
    wide = linear.forward(x, w, "rowwise", out_dtype=FLOAT32)
    np.testing.assert_array_equal(wide, cast.round_to(wide, BFLOAT16))
    assert (linear.forward(x, w, "tensorwise", out_dtype=FLOAT32) != linear.forward(x, w, "tensorwise")).any()


@pytest.mark.parametrize(
    ("x", "w", "recipe", "message"),
    [
        ((4, 64), (32, 48), "tensorwise", "same K"),
        ((4, 40), (32, 40), "tensorwise", "multiples of 16"),  # L-5
        ((4, 64), (24, 64), "rowwise", "multiples of 16"),
        ((4, 64), (2, 32, 64), "bf16", "w \\[N, K\\]"),
        ((4, 64), (32, 64), "fp8", "tensorwise"),
    ],
)
def test_errors(x, w, recipe, message):
    with pytest.raises(ValueError, match=message):
        linear.forward(np.ones(x, np.float32), np.ones(w, np.float32), recipe)


def test_grad_output_must_have_the_output_shape():
    with pytest.raises(ValueError, match=r"\(4, 32\)"):
        linear.backward(np.ones((4, 16), np.float32), np.ones((4, 64), np.float32), np.ones((32, 64), np.float32), "bf16")
