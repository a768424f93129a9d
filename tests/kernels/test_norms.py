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


@pytest.mark.parametrize(("residual", "twice"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("shape", "dtype", "fmt"), cases((35, 300), (64, 256), (1, 70), (37, 1), (70, 64))
)
def test_one_launch_returns_what_statistics_and_cast_do(shape, dtype, fmt, residual, twice):  # M-11
    rng = np.random.default_rng(0)
    # multiples of 1/16, of which few are large: squares have one sum in every order
    h, more = rng.integers(-32, 33, shape) / 16, rng.integers(-16, 17, shape) / 8
    more += 16 * (rng.random(shape) < 0.1)  # bfloat16 rounds h + more
    h, more = (x.astype(DTYPES[dtype]) for x in (h, more))
    weight, scale = planted(1, shape[1], dtype, seed=2)[0], np.float32(2.7)
    options = {"eps": EPS, "residual": residual, "twice": twice}
    first = norms.statistics(shape, **options)
    second = norms.cast(shape, e5m2=fmt == "e5m2", twice=twice)
    both = norms.statistics_and_cast(shape, e5m2=fmt == "e5m2", **options)
    inputs, sums = [h, *[more] * residual, weight], [(shape, dtype)] * residual
    rows, codes = (shape[:1], "float32"), both_orders(shape)
    *total, factors, row_amaxes = run(first, inputs, [*sums, rows, (shape[:1], "int32")])
    tensors = [*(total or [h]), factors, weight, scale]
    expected = [*total, factors, *run(second, tensors, [*codes, ((second.programs,), "int32")])]
    outputs = [*sums, rows, *codes, ((both.programs,), "int32")]
    found = run(both, [*inputs, scale], outputs)
    for mine, other in zip(found[:-1], expected[:-1], strict=True):
        np.testing.assert_array_equal(mine.view(np.uint8), other.view(np.uint8))
    assert found[-1].max() == expected[-1].max() == row_amaxes.max()


@pytest.mark.parametrize("special", [np.nan, np.inf, 0.0])
def test_one_launch_casts_rows_of_special_values_as_two_do(special):  # S-2, S-5
    """A row of zeros has an infinite factor where eps is 0; rows behind the last have none."""
    h, weight, scale = planted(35, 40), planted(1, 40, seed=2)[0], np.float32(2.7)
    h[7] = special
    eps = 0.0 if special == 0 else EPS
    both = norms.statistics_and_cast(h.shape, eps=eps, e5m2=False)
    rows, codes = ((35,), "float32"), both_orders(h.shape)
    factors, *found = run(both, [h, weight, scale], [rows, *codes, ((both.programs,), "int32")])
    norm = of_factors(h, factors, weight)
    expected = scaling.quantize_with(norm, scales(scale), "e4m3fn").codes
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(found[1], expected.T)
    assert np.isnan(norm[7]).any()
    for part, amax in zip((norm[:32], norm[32:]), found[2], strict=True):
        np.testing.assert_array_equal(amax_of(amax), scaling.amax(part))
