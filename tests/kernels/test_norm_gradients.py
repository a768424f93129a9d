"""The kernel of RMSNorm's gradients, interpreted, against float64."""

import numpy as np
import pytest

pytest.importorskip("triton")

from helpers.kernels.planted_tensors import DTYPES, amax_of, run

from fp8ref.kernels import norm_gradients


@pytest.mark.parametrize("readers", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_rows_and_of_the_weight(dtype, readers, monkeypatch):  # M-11
    shape = 21, 70
    monkeypatch.setattr(norm_gradients, "PROGRAMS", 4)
    rng = np.random.default_rng(shape[0])
    *by, total, h = (rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(readers + 2))
    weight = rng.standard_normal(shape[1]).astype(DTYPES[dtype])
    factors = rng.random(shape[0]).astype(np.float32) + 0.5
    launch = norm_gradients.gradient(shape, readers)
    outputs = [(shape, dtype), ((launch.programs, shape[1]), "float32")]
    of_h, of_weight, parts = run(
        launch, [*by, total, h, factors, weight], [*outputs, ((launch.programs,), "int32")]
    )
    d = by[-1]
    for other in reversed(by[:-1]):
        d = (d.astype(np.float32) + other.astype(np.float32)).astype(d.dtype)
    d, normed, w = d.astype(np.float64), h * factors[:, None].astype(np.float64), np.float64(weight)
    mean = (d * w * normed).mean(1, keepdims=True)
    exact = factors[:, None] * (d * w - normed * mean)
    terms = factors[:, None] * (np.abs(d * w) + np.abs(normed * mean))
    # the result and the sum are each rounded by half a unit, and float32 to N + 8 of its own
    unit = (
        np.finfo(np.float32).eps
        if dtype == "float32"
        else 2.0 ** (-11 if dtype[-2:] == "16" and dtype[0] == "f" else -8)
    )
    bound = unit * (2 * np.abs(exact) + np.abs(total.astype(np.float64)))
    bound += (shape[1] + 8) * 2.0**-24 * (terms + np.abs(normed) * np.abs(d * w * normed).mean())
    assert (np.abs(of_h.astype(np.float64) - (exact + total.astype(np.float64))) <= bound).all()
    np.testing.assert_allclose(
        of_weight.sum(0, dtype=np.float64),
        (d * normed).sum(0),
        atol=shape[0] * 2.0**-24 * np.abs(d * normed).sum(0).max(),
    )
    np.testing.assert_array_equal(amax_of(parts), np.abs(of_h.astype(np.float32)).max())
