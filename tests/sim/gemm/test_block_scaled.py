"""GEMMs of operands with block scales, by the instruction that takes scales."""

import numpy as np
import pytest

from fp8ref.formats import E4M3FN, E5M2, FLOAT16
from fp8ref.sim.gemm import accumulate, block_scaled, gemm
from fp8ref.sim.gemm.tensor_core import MODELED
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized


def mx(x, fmt=E4M3FN, policy="te_mxfp8"):
    return scaling.quantize(x, fmt, granularity="mx_1x32", policy=policy)


def test_a_block_scaled_gemm_is_a_chain_of_its_instruction(rng):  # G-23
    x, w = (
        rng.standard_normal((n, 96)).astype(np.float32) * 2.0 ** rng.integers(-8, 9, (n, 96))
        for n in (5, 6)
    )
    a, b = mx(x.astype(np.float32)), mx(w.astype(np.float32), E5M2)
    acc = np.zeros((5, 6), np.float32)
    for i in range(3):
        part = slice(32 * i, 32 * i + 32)
        acc = gemm.mma(
            a.codes[:, part],
            b.codes[:, part],
            acc,
            fmt_a=E4M3FN,
            fmt_b=E5M2,
            unit="blackwell_mx",
            scale_inv_a=a.scale_inv[:, i : i + 1],
            scale_inv_b=b.scale_inv[:, i : i + 1],
        )
    np.testing.assert_array_equal(block_scaled.matmul(a, b), acc)
    np.testing.assert_array_equal(
        block_scaled.matmul(a, b, out_dtype=FLOAT16), cast.round_to(acc, FLOAT16)
    )
    exact = scaling.dequantize(a).astype(np.float64) @ scaling.dequantize(b).astype(np.float64).T
    scale = (
        np.abs(scaling.dequantize(a)).astype(np.float64)
        @ np.abs(scaling.dequantize(b)).astype(np.float64).T
    )
    # Three steps, each cutting 33 terms off below 2^-25 of the largest, and the result below 2^-23:
    # under 2^-17 of the sum of magnitudes.
    assert np.all(np.abs(acc - exact) <= 2.0**-17 * scale)


def test_it_is_not_the_sum_of_blocks_of_g_13(rng):  # G-13, G-23
    x, w = (rng.standard_normal((64, 256)).astype(np.float32) for _ in range(2))
    a, b = mx(x), mx(w)
    one_by_one = gemm.matmul(a, b, accumulate="blackwell")
    assert 0 < np.mean(block_scaled.matmul(a, b) != one_by_one) < 1


def test_nan_scales_and_codes(rng):  # G-23, S-14
    x = rng.standard_normal((4, 64)).astype(np.float32)
    x[1, 40] = np.nan
    found = block_scaled.matmul(mx(x), mx(rng.standard_normal((3, 64)).astype(np.float32)))
    assert np.isnan(found[1]).all()
    assert np.isfinite(np.delete(found, 1, axis=0)).all()


def test_two_dimensional_blocks_are_spread_over_rows(rng):  # G-23, S-6
    x, w = (rng.standard_normal((n, 64)).astype(np.float32) for n in (4, 40))
    b = scaling.quantize(w, E4M3FN, granularity="mx_32x32", policy="te_mxfp8_2.13")
    rows = np.repeat(b.scale_inv, 32, axis=0)[:40]
    as_rows = Quantized(b.codes, np.float32(1) / rows, rows, E4M3FN, "mx_1x32", -1)
    np.testing.assert_array_equal(
        block_scaled.matmul(mx(x), b), block_scaled.matmul(mx(x), as_rows)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: accumulate.Accumulation(name="own", unit=MODELED["blackwell_mx"]),
            "plans take no block scales.*block_scaled.matmul",
        ),
        (
            lambda: block_scaled.matmul(
                mx(np.ones((2, 32), np.float32)), mx(np.ones((2, 32), np.float32)), unit="hopper"
            ),
            "has no block scales",
        ),
        (
            lambda: block_scaled.matmul(
                scaling.quantize(np.ones((2, 32), np.float32), E4M3FN),
                mx(np.ones((2, 32), np.float32)),
            ),
            "blocks of 32",
        ),
        (
            lambda: block_scaled.matmul(
                mx(np.ones((1, 2, 32), np.float32)), mx(np.ones((2, 32), np.float32))
            ),
            r"a is 2-d, in blocks of 32 along axis -1; got \(1, 2, 32\), 'mx_1x32' along axis -1",
        ),
        (
            lambda: block_scaled.matmul(
                mx(np.ones((2, 32), np.float32), policy="torchao"), mx(np.ones((2, 32), np.float32))
            ),
            "e8m0fnu scales; a has others",
        ),
        (
            lambda: block_scaled.matmul(
                mx(np.ones((2, 32), np.float32)), mx(np.ones((2, 64), np.float32))
            ),
            "need one K",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
