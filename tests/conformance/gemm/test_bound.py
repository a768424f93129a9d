"""B-1's bound for every output dtype, against fractions and the specification's example."""

from fractions import Fraction

import numpy as np
import pytest

from fp8ref.conformance.gemm import bound
from fp8ref.conformance.gemm.scaled_gemm import operand
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast


def drawn(fmt, granularity="rowwise", shape=(5, 256), seed=0):
    rng = np.random.default_rng(seed)
    codes = cast.encode(rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 9, shape), fmt)
    scales = {
        "tensorwise": 3.7,
        "rowwise": rng.uniform(0.1, 10, (shape[0], 1)),
        "blockwise_1x128": rng.uniform(0.1, 10, (shape[0], 2)),
    }
    return operand(codes, fmt, granularity, scales[granularity])


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise_1x128"])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2])
def test_the_exact_result_against_fractions(fmt, granularity):  # B-1
    a, b = drawn(fmt, granularity), drawn(fmt, granularity, seed=1)
    found = bound.exact(a, b)
    width = 256 if granularity != "blockwise_1x128" else 128
    for i, j in np.ndindex(5, 5):
        products = [
            Fraction(float(x)) * Fraction(float(y))
            for x, y in zip(cast.decode(a.codes[i], fmt), cast.decode(b.codes[j], fmt), strict=True)
        ]
        scales = [
            np.broadcast_to(q.scale_inv, (5, 256 // width))[row] for q, row in ((a, i), (b, j))
        ]
        terms = [
            sum(products[t * width : (t + 1) * width])
            * Fraction(float(scales[0][t]))
            * Fraction(float(scales[1][t]))
            for t in range(256 // width)
        ]
        # three roundings to float64 of each block, and their sum
        assert abs(Fraction(float(found[i, j])) - sum(terms)) <= Fraction(2.0**-50) * sum(
            map(abs, terms)
        )


@pytest.mark.parametrize(
    ("out", "expected"), [(0x38B30000, 0.0), (0x38B40000, 0.9996), (0x38B50000, 1.9993)]
)
def test_the_example_of_the_specification(out, expected):  # B-1
    a, b = np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32)
    a[0, :3], b[0, :3] = (3.5, 2.5, -1.125), (3, 4, 3)
    scale = np.uint32(0x3B124925).view(np.float32)
    left, right = (
        operand(cast.encode(x, E4M3FN), E4M3FN, "tensorwise")._replace(scale_inv=np.asarray(scale))
        for x in (a, b)
    )
    simulated = gemm.matmul(left, right, out_dtype=BFLOAT16)
    assert simulated.view(np.uint32)[0, 0] == 0x38B30000
    found = np.full((1, 1), out, np.uint32).view(np.float32)
    assert bound.distance(left, right, found, simulated, out_dtype=BFLOAT16).bounds[
        0, 0
    ] == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("out", [FLOAT32, BFLOAT16, FLOAT16])
def test_float32_sums_in_another_order_are_within_the_bound(out):  # B-1
    a, b = drawn(E4M3FN, shape=(32, 256)), drawn(E4M3FN, shape=(32, 256), seed=1)
    x, y = (cast.decode(q.codes, q.fmt)[:, ::-1] for q in (a, b))
    found = cast.round_to((x @ y.T) * a.scale_inv * b.scale_inv.T, out)
    simulated = gemm.matmul(a, b, out_dtype=out)
    far = bound.distance(a, b, found, simulated, out_dtype=out)
    assert far.bounds.max() <= 1
    # gamma(265) is 265 ulps of the largest float32 sum, and half of a narrow output's ulp at most
    moved = simulated + (3 if out != FLOAT32 else 2000) * bound.ulp(simulated, out).astype(
        np.float32
    )
    assert (bound.distance(a, b, moved, simulated, out_dtype=out).bounds > 1).any()


def test_infinities_and_nans():
    a, b = drawn(E4M3FN), drawn(E4M3FN, seed=1)
    simulated = gemm.matmul(a, b)
    found = simulated.copy()
    found[0, 0], found[0, 1] = np.nan, np.inf
    far = bound.distance(a, b, found, simulated, out_dtype=FLOAT32)
    assert np.isinf(far.bounds[0, :2]).all()
    assert not far.bounds[1:].any()
    both = simulated.copy()
    both[0, 0] = found[0, 0]
    assert bound.distance(a, b, both, both, out_dtype=FLOAT32).bounds[0, 0] == 0
