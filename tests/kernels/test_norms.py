"""RMSNorm's kernels, interpreted: the codes of the plain form, which stores the norm and casts it."""

import numpy as np
import pytest

pytest.importorskip("triton")

from helpers.kernels.planted_tensors import (
    DTYPES,
    RAGGED,
    SHAPES,
    amax_of,
    both_orders,
    cases,
    planted,
    run,
    scales,
)

from fp8ref.kernels import norms
from fp8ref.sim.quantize import scaling

EPS = 1e-5


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [RAGGED, *SHAPES])
def test_rows_have_their_factor_and_the_amax_of_the_rounded_norm(shape, dtype, residual):  # M-11
    h, more = (
        planted(*shape, dtype, seed=seed).clip(-300, 300).astype(DTYPES[dtype]) for seed in range(2)
    )
    weight = planted(1, shape[1], dtype, seed=2)[0]
    inputs = [h, more, weight] if residual else [h, weight]
    sums = [(shape, dtype)] * residual
    launch = norms.statistics(shape, eps=EPS, residual=residual)
    *total, factors, amaxes = run(
        launch, inputs, [*sums, (shape[:1], "float32"), (shape[:1], "int32")]
    )
    if residual:
        h = (h.astype(np.float32) + more.astype(np.float32)).astype(h.dtype)
        np.testing.assert_array_equal(total[0].view(np.uint8), h.view(np.uint8))
    wide = h.astype(np.float64)
    # N squares in any order, each rounded, then a mean, a root and a quotient: N + 4 roundings
    np.testing.assert_allclose(
        factors, 1 / np.sqrt((wide * wide).mean(1) + EPS), rtol=(shape[1] + 4) * 2**-24
    )
    norm = of_factors(h, factors, weight)
    for row, amax in zip(norm, amaxes, strict=True):
        np.testing.assert_array_equal(amax_of(amax), scaling.amax(row))


def of_factors(h, factors, weight, *, twice=False):
    """The norm of known factors, rounded to h's dtype (M-11); twice: also before the weight."""
    with np.errstate(all="ignore"):
        normed = h.astype(np.float32) * factors[:, None]
        if twice:
            normed = normed.astype(h.dtype).astype(np.float32)
        return (normed * weight.astype(np.float32)).astype(h.dtype)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_an_amax_that_is_not(special):  # S-2
    h = planted(3, 37)
    h[1, 5] = special
    launch = norms.statistics(h.shape, eps=EPS)
    factors, amaxes = run(launch, [h, np.ones(37, h.dtype)], [((3,), "float32"), ((3,), "int32")])
    norm = of_factors(h, factors, np.ones(37, h.dtype))
    assert np.isnan(amaxes[1:2].view(np.float32)).all() == np.isnan(norm[1]).any()
    assert np.isnan(norm[1]).any()
    assert np.isfinite(amaxes[[0, 2]].view(np.float32)).all()


@pytest.mark.parametrize(("wide", "twice"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("shape", "dtype", "fmt"), cases(RAGGED, *SHAPES))
def test_the_norm_is_rounded_and_then_cast(shape, dtype, fmt, wide, twice):  # M-11
    h = planted(*shape, dtype, wide=wide)
    weight = planted(1, shape[1], dtype, seed=2)[0]
    factors = np.abs(planted(shape[0], 1, "float32", seed=3))[:, 0]
    scale = np.float32(2.7)
    launch = norms.cast(shape, e5m2=fmt == "e5m2", twice=twice)
    codes, transposed, amaxes = run(
        launch, [h, factors, weight, scale], [*both_orders(shape), ((launch.programs,), "int32")]
    )
    norm = of_factors(h, factors, weight, twice=twice)
    expected = scaling.quantize_with(norm, scales(scale), fmt).codes
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(transposed, expected.T)
    np.testing.assert_array_equal(amax_of(amaxes), scaling.amax(norm))
