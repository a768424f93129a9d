from itertools import product

import exact
import numpy as np
import pytest

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, FP8_FORMATS
from fp8ref.sim import cast, gemm, scaling


def quantized(codes, fmt, scale=1.0):
    scale = np.float32(scale)
    return scaling.Quantized(np.asarray(codes, np.uint8), scale, scaling.scale_inv_from_scale(scale), fmt, "tensorwise", -1)


def random_codes(rng, shape, fmt):
    """Any finite code, so that exponents spread over the whole format."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where(np.isfinite(cast.decode(codes, fmt)), codes, np.uint8(1))


@pytest.mark.parametrize("pair", list(product(FP8_FORMATS.values(), repeat=2)), ids=lambda p: f"{p[0]}-{p[1]}")
def test_exact_is_the_exact_sum_rounded_once(pair, rng):  # G-1, G-2
    a, b = (quantized(random_codes(rng, (5, 96), fmt), fmt) for fmt in pair)
    rows, columns = ([exact.fractions(v) for v in cast.decode(q.codes, q.fmt)] for q in (a, b))
    expected = [[exact.rn32(sum(x * y for x, y in zip(r, c, strict=True))) for c in columns] for r in rows]
    np.testing.assert_array_equal(gemm.matmul(a, b), expected)


def test_exact_resolves_ties_that_float64_cannot():
    """e5m2 products span 2^-32 to 2^32: the last one decides a tie 60 bits away, and a float64 sum loses it."""
    a = quantized([[0x7B, 0x7B, 0x3C, 0x01], [0x7B, 0x7B, 0x3C, 0x81]], E5M2)  # 57344, 57344, 1, +-2^-16
    b = quantized([[0x7B, 0x64, 0x58, 0x01]], E5M2)  # 57344, 1024, 128, 2^-16
    values = [cast.decode(q.codes, E5M2).astype(np.float64) for q in (a, b)]
    total = 57344 * 57344 + 57344 * 1024 + 128
    assert total % 256 == 128  # half an ulp of a float32 near 2^31.7
    down, up = np.float32(total - 128), np.float32(total + 128)
    np.testing.assert_array_equal(gemm.matmul(a, b), [[up], [down]])
    double = (values[0] @ values[1].T).astype(np.float32)
    assert double[0] == double[1]


def test_f32_adds_in_ascending_order(rng):  # G-3
    a, b = (quantized(random_codes(rng, (4, 50), fmt), fmt) for fmt in (E4M3FN, E5M2))
    x, y = cast.decode(a.codes, a.fmt), cast.decode(b.codes, b.fmt)
    expected = np.zeros((4, 4), np.float32)
    for i, j in product(range(4), repeat=2):
        acc = np.float32(0)
        for k in range(50):
            acc = np.float32(acc + np.float32(x[i, k] * y[j, k]))
        expected[i, j] = acc
    np.testing.assert_array_equal(gemm.matmul(a, b, accumulate="f32"), expected)


def test_long_sums_stay_exact():
    """K beyond one chunk: 40,000 products of 448 * 448 and one of 2^-18, whose exact sum rounds to a known float32."""
    a = quantized(np.full((1, 40001), 0x7E), E4M3FN)
    a.codes[0, -1] = 1
    b = quantized(a.codes.copy(), E4M3FN)
    assert gemm.matmul(a, b)[0, 0] == np.float32(40000 * 448 * 448)


@pytest.mark.parametrize("accumulate", ["exact", "f32"])
def test_specials(accumulate):  # G-6
    inf, nan, one, zero = 0x7C, 0x7F, 0x3C, 0x00
    a = quantized([[inf, one], [nan, one], [one, one], [zero, 0x80]], E5M2)
    b = quantized([[one, one], [zero, one], [inf, inf | 0x80]], E5M2)
    expected = [[np.inf, np.nan, np.nan], [np.nan] * 3, [2, 1, np.nan], [0, 0, np.nan]]
    np.testing.assert_array_equal(gemm.matmul(a, b, accumulate=accumulate), np.float32(expected))
    assert not np.signbit(gemm.matmul(a, b)[3, 0])  # G-2: a zero sum is +0


def test_infinities_meet_only_their_own_row_and_column():
    """Splitting by magnitude must not multiply an infinity with a zero that the split made (G-6)."""
    a = quantized([[0x7C, 0x01]], E5M2)  # Inf, 2^-16
    b = quantized([[0x01, 0x7B], [0x7B, 0x01]], E5M2)
    np.testing.assert_array_equal(gemm.matmul(a, b), [[np.inf, np.inf]])


@pytest.mark.parametrize("out_dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_epilogues(out_dtype, rng):  # G-4, G-5
    x, y = (rng.standard_normal((n, 64)).astype(np.float32) for n in (3, 5))
    a, b = (scaling.quantize(v, E4M3FN, granularity="rowwise", axis=1) for v in (x, y))
    unit = [q._replace(scale_inv=np.float32(1), granularity="tensorwise") for q in (a, b)]
    acc = gemm.matmul(*unit)
    expected = cast.round_to((acc * a.scale_inv) * b.scale_inv.reshape(1, -1), out_dtype)
    np.testing.assert_array_equal(gemm.matmul(a, b, out_dtype=out_dtype), expected)
    twice = cast.round_to(cast.round_to(acc, out_dtype) * (a.scale_inv * b.scale_inv.reshape(1, -1)), out_dtype)
    np.testing.assert_array_equal(gemm.matmul(a, b, epilogue="unit_round_scale_round", out_dtype=out_dtype), twice)
    if out_dtype is not FLOAT32:
        assert (twice != expected).any()


def test_matmul_hp_rounds_once_from_float64(rng):  # G-9
    x, y = (rng.standard_normal((n, 64)).astype(np.float32) for n in (3, 5))
    expected = cast.round_to((x.astype(np.float64) @ y.astype(np.float64).T).astype(np.float32), BFLOAT16)
    np.testing.assert_array_equal(gemm.matmul_hp(x, y, out_dtype=BFLOAT16), expected)


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        (quantized(np.zeros((2, 32)), E4M3FN), quantized(np.zeros((2, 16)), E4M3FN), {}, "same K"),
        (quantized(np.zeros(32), E4M3FN), quantized(np.zeros((2, 32)), E4M3FN), {}, r"a \[M, K\]"),
        (quantized(np.zeros((2, 32)), E4M3FN), quantized(np.zeros((2, 32)), E4M3FN), {"accumulate": "fast"}, "exact"),
        (quantized(np.zeros((2, 32)), E4M3FN), quantized(np.zeros((2, 32)), E4M3FN), {"epilogue": "once"}, "scale_then_round"),
        (quantized(np.zeros((2, 32)), E4M3FN), quantized(np.zeros((2, 32)), E4M3FN), {"out_dtype": E5M2}, "float32"),
        (
            scaling.quantize(np.ones((2, 2), np.float32), E4M3FN, granularity="rowwise", axis=0),
            quantized(np.zeros((2, 2)), E4M3FN),
            {},
            "transpose",
        ),
        (
            scaling.quantize(np.ones((2, 128), np.float32), E4M3FN, granularity="blockwise_1x128"),
            quantized(np.zeros((2, 128)), E4M3FN),
            {},
            "Dequantise",
        ),
    ],
)
def test_errors(a, b, options, message):
    with pytest.raises(ValueError, match=message):
        gemm.matmul(a, b, **options)
