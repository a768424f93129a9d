import warnings
from itertools import product

import numpy as np
import pytest
from helpers.gemm import exact

from fp8ref.formats import BFLOAT16, E4M3FN, E4M3FNUZ, E5M2, E8M0FNU, FLOAT16, FLOAT32, FP8_FORMATS
from fp8ref.sim import threads
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.gemm.tensor_core import UNITS
from fp8ref.sim.quantize import cast, scaling


def quantized(codes, fmt, scale=1.0):
    scale = np.float32(scale)
    return scaling.Quantized(
        np.asarray(codes, np.uint8),
        scale,
        scaling.scale_inv_from_scale(scale),
        fmt,
        "tensorwise",
        -1,
    )


def random_codes(rng, shape, fmt):
    """Any finite code, so that exponents spread over the whole format."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where(np.isfinite(cast.decode(codes, fmt)), codes, np.uint8(1))


@pytest.mark.parametrize(
    "pair", list(product(FP8_FORMATS.values(), repeat=2)), ids=lambda p: f"{p[0]}-{p[1]}"
)
def test_exact_is_the_exact_sum_rounded_once(pair, rng):  # G-1, G-2
    a, b = (quantized(random_codes(rng, (5, 96), fmt), fmt) for fmt in pair)
    rows, columns = ([exact.fractions(v) for v in cast.decode(q.codes, q.fmt)] for q in (a, b))
    expected = [
        [exact.rn32(sum(x * y for x, y in zip(r, c, strict=True))) for c in columns] for r in rows
    ]
    np.testing.assert_array_equal(gemm.matmul(a, b), expected)


@pytest.mark.parametrize("out_dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("plan", ["exact", "f32", "hopper_fast", "blackwell"])
@pytest.mark.parametrize("m", [16, 64])
def test_a_result_is_laid_out_by_rows(m, plan, out_dtype, rng):
    """Whichever operand the kernel of a plan takes first: a framework's next product may sum in
    another order for another layout.
    """
    a, b = (quantized(random_codes(rng, (rows, 64), E4M3FN), E4M3FN) for rows in (m, 32))
    assert gemm.matmul(a, b, accumulate=plan, out_dtype=out_dtype).flags.c_contiguous


def test_exact_resolves_ties_that_float64_cannot():
    """e5m2 products span 2^-32 to 2^32: the last one decides a tie 60 bits away, and a float64 sum
    loses it.
    """
    # 57344, 57344, 1, +-2^-16
    a = quantized([[0x7B, 0x7B, 0x3C, 0x01], [0x7B, 0x7B, 0x3C, 0x81]], E5M2)
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
    """K beyond one chunk: 40,000 products of 448 * 448 and one of 2^-18, whose exact sum rounds to
    a known float32.
    """
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
    """Splitting by magnitude must not multiply an infinity with a zero that the split made
    (G-6).
    """
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
    twice = cast.round_to(
        cast.round_to(acc, out_dtype) * (a.scale_inv * b.scale_inv.reshape(1, -1)), out_dtype
    )
    np.testing.assert_array_equal(
        gemm.matmul(a, b, epilogue="unit_round_scale_round", out_dtype=out_dtype), twice
    )
    if out_dtype is not FLOAT32:
        assert (twice != expected).any()


@pytest.mark.parametrize(
    ("pair", "profile", "splits", "use_fast_accum"),
    [
        ((E4M3FN, E4M3FN), "hopper", 1, True),
        ((E4M3FN, E4M3FN), "hopper", 1, False),
        ((E5M2, E4M3FN), "hopper", 1, False),
        ((E4M3FN, E5M2), "hopper", 2, True),
        ((E4M3FN, E4M3FN), "hopper", 2, False),
        ((E4M3FN, E4M3FN), "ada", 1, True),
        ((E5M2, E4M3FN), "ada", 1, False),
    ],
)
# G-12, G-14
def test_a_call_of_cublaslt_as_mmaemu_has_it(pair, profile, splits, use_fast_accum, rng):
    """Its e5m2 x e5m2 is refused at this level: see test_accumulate.py."""
    import mmaemu
    import torch

    x, y = (rng.standard_normal((n, 288)).astype(np.float32) for n in (21, 48))
    a, b = (scaling.quantize(v, fmt) for v, fmt in zip((x, y), pair, strict=True))
    tensors = [torch.from_numpy(q.codes).view(getattr(torch, f"float8_{q.fmt}")) for q in (a, b)]
    scales = [torch.from_numpy(np.asarray(q.scale_inv)) for q in (a, b)]
    how = Accumulation(
        name="own", unit=UNITS[profile], promotion=None if use_fast_accum else 128, split_k=splits
    )
    for out_dtype in (FLOAT32, BFLOAT16):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mmaemu.UnverifiedSplitWarning)
            theirs = mmaemu.scaled_mm(
                tensors[0],
                tensors[1].t(),
                *scales,
                out_dtype=getattr(torch, out_dtype.name),
                use_fast_accum=use_fast_accum,
                profile=profile,
                splitk=1 if splits == 1 else (splits, "contiguous"),
                backend="reference",
            )
        ours = gemm.matmul(a, b, accumulate=how, epilogue="product_then_round", out_dtype=out_dtype)
        np.testing.assert_array_equal(ours, theirs.float().numpy())


def test_where_an_underflowing_product_of_scales_meets_a_negative_sum():
    """mmaemu's epilogue adds +0, as cuBLASLt's fused multiply-add with beta 0 does; G-14 has no
    such addition. Only a product of scales below 2^-150 shows it: -1 * 0 is -0 here and +0 there.
    """
    a, b = quantized([[0x38]], E4M3FN, 2.0**100), quantized([[0xB8]], E4M3FN, 2.0**100)
    out = gemm.matmul(a, b, epilogue="product_then_round")
    assert out == 0
    assert np.signbit(out)


def test_matmul_hp_rounds_once_from_float64(rng):  # G-9
    x, y = (rng.standard_normal((n, 64)).astype(np.float32) for n in (3, 5))
    expected = cast.round_to(
        (x.astype(np.float64) @ y.astype(np.float64).T).astype(np.float32), BFLOAT16
    )
    np.testing.assert_array_equal(gemm.matmul_hp(x, y, out_dtype=BFLOAT16), expected)


@pytest.mark.parametrize("accumulate", ["exact", "f32", "hopper_fast", "ada"])
def test_any_memory_order_and_read_only_operands(accumulate, rng):
    x, y = (rng.standard_normal((n, 64)).astype(np.float32) for n in (5, 6))
    a, b = (scaling.quantize(v, E4M3FN, granularity="rowwise") for v in (x, y))
    expected = gemm.matmul(a, b, accumulate=accumulate)
    for change in (
        np.asfortranarray,
        lambda v: np.repeat(v, 2, 0)[::2],
        lambda v: v[::-1].copy()[::-1],
        np.array,
    ):
        operands = [
            q._replace(codes=change(q.codes), scale_inv=change(q.scale_inv)) for q in (a, b)
        ]
        for q in operands:
            q.codes.flags.writeable = q.scale_inv.flags.writeable = False
        np.testing.assert_array_equal(gemm.matmul(*operands, accumulate=accumulate), expected)
        for q, original in zip(operands, (a, b), strict=True):
            np.testing.assert_array_equal(q.codes, original.codes)


def test_mma_takes_any_memory_order_and_empty_sides(rng):
    a, b = (random_codes(rng, (n, 32), E4M3FN) for n in (3, 4))
    c = rng.standard_normal((3, 4)).astype(np.float32)
    expected = gemm.mma(a, b, c, fmt_a=E4M3FN, fmt_b=E4M3FN)
    kept = c.copy()
    c.flags.writeable = False
    for order in (np.asfortranarray, lambda v: np.repeat(v, 2, 1)[:, ::2]):
        np.testing.assert_array_equal(
            gemm.mma(order(a), order(b), order(c), fmt_a=E4M3FN, fmt_b=E4M3FN), expected
        )
    np.testing.assert_array_equal(c, kept)
    assert gemm.mma(a[:0], b, c[:0], fmt_a=E4M3FN, fmt_b=E4M3FN).shape == (0, 4)
    assert gemm.mma(a, b[:0], c[:, :0], fmt_a=E4M3FN, fmt_b=E4M3FN).shape == (3, 0)


@pytest.mark.parametrize(
    ("a", "b", "c", "options", "message"),
    [
        ((2, 32), (2, 16), (2, 2), {}, r"mma takes \[M, 32\].*got \(2, 32\), \(2, 16\)"),
        ((2, 32, 32), (3,), (2, 3), {}, r"mma takes \[M, 32\].*got \(2, 32, 32\), \(3,\)"),
        ((2, 64), (2, 64), (2, 2), {}, r"got \(2, 64\)"),
        ((32,), (2, 32), (2,), {}, r"got \(32,\)"),
        ((2, 32), (3, 32), (3, 2), {}, r", \(3, 2\)"),
        ((2, 32), (2, 32), (), {}, r", \(\)"),
        (
            (2, 32),
            (2, 32),
            (2, 2),
            {"unit": "volta"},
            "hopper, ada, blackwell, hopper_f16, ada_f16, blackwell_mx; got 'volta'",
        ),
        ((2, 32), (2, 32), (2, 2), {"unit": None}, "a TensorCore or one of hopper"),
        ((2, 32), (2, 32), (2, 2), {"fmt_a": E4M3FNUZ}, "e4m3fn and e5m2; got e4m3fnuz and e4m3fn"),
        ((2, 32), (2, 32), (2, 2), {"fmt_b": E8M0FNU}, "got e4m3fn and e8m0fnu"),
    ],
)
def test_errors_of_mma(a, b, c, options, message):
    with pytest.raises(ValueError, match=message):
        gemm.mma(
            np.zeros(a, np.uint8),
            np.zeros(b, np.uint8),
            np.zeros(c, np.float32),
            **{"fmt_a": E4M3FN, "fmt_b": E4M3FN, **options},
        )


def test_errors_of_mma_dtypes():
    codes, c = np.zeros((2, 32), np.uint8), np.zeros((2, 2), np.float32)
    with pytest.raises(
        ValueError, match=r"float32; got float64. Convert it with .astype\(np.float32\)"
    ):
        gemm.mma(codes, codes, c.astype(np.float64), fmt_a=E4M3FN, fmt_b=E4M3FN)
    with pytest.raises(ValueError, match="codes of e4m3fn are uint8; got int64"):
        gemm.mma(codes, codes.astype(int), c, fmt_a=E4M3FN, fmt_b=E4M3FN)


PLAIN, ONES = (quantized(np.full((2, 32), code), E4M3FN) for code in (0, 0x38))
ROWWISE_OVER_ROWS = scaling.quantize(
    np.ones((2, 32), np.float32), E4M3FN, granularity="rowwise", axis=0
)
BLOCKS = scaling.quantize(np.ones((2, 128), np.float32), E4M3FN, granularity="blockwise_1x128")
MX = scaling.quantize(
    np.ones((2, 128), np.float32), E4M3FN, granularity="mx_1x32", policy="mx_rceil"
)


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        (PLAIN, quantized(np.zeros((2, 16)), E4M3FN), {}, r"one K; got \(2, 32\) and \(2, 16\)"),
        (quantized(np.zeros(32), E4M3FN), PLAIN, {}, r"a \[M, K\] and b \[N, K\].*got \(32,\)"),
        (quantized(np.zeros(()), E4M3FN), PLAIN, {}, r"got \(\) and"),
        (PLAIN, PLAIN, {"accumulate": "fast"}, "'exact', 'f32' or one of hopper_fast.*got 'fast'"),
        (PLAIN, PLAIN, {"epilogue": "once"}, "scale_then_round, .*got 'once'"),
        (PLAIN, PLAIN, {"out_dtype": E5M2}, "float32, bfloat16, float16; got e5m2"),
        (PLAIN, PLAIN, {"out_dtype": "bfloat16"}, "out_dtype is one of.*got 'bfloat16'"),
        (quantized(np.zeros((2, 32)), E8M0FNU), PLAIN, {}, "e5m2fnuz, e2m1fn; got a in e8m0fnu"),
        (ROWWISE_OVER_ROWS, PLAIN, {}, "a needs K.* got axis=0. Quantize the transpose"),
        (PLAIN, ROWWISE_OVER_ROWS, {}, "b needs K.* got axis=0"),
        (
            BLOCKS,
            quantized(np.zeros((2, 128)), E4M3FN),
            {},
            "got blockwise_1x128 and tensorwise. Quantize both alike, or dequantize and use "
            "matmul_hp",
        ),
        (MX, BLOCKS, {}, "got mx_1x32 and blockwise_1x128"),
        (
            BLOCKS,
            BLOCKS,
            {"epilogue": "unit_round_scale_round"},
            "needs one sum over K.*Use 'scale_then_round'",
        ),
        (
            PLAIN._replace(scale_inv=np.float32(-1)),
            PLAIN,
            {},
            "not negative; got -1.0 in a. Negate codes",
        ),
        (
            PLAIN,
            ONES._replace(scale_inv=np.float32(np.nan)),
            {},
            "needs codes that are NaN or zero; got others in b. Find the source of the NaN",
        ),
        (
            BLOCKS._replace(scale_inv=np.float32([[1], [np.nan]])),
            BLOCKS,
            {},
            "needs codes that are NaN or zero; got others in a",
        ),
        (
            PLAIN._replace(scale_inv=np.float64(1)),
            PLAIN,
            {},
            r"float32 arrays; got float64 in a. Use .astype",
        ),
        (PLAIN, PLAIN._replace(scale_inv=1.0), {}, "got float in b"),
        (
            PLAIN._replace(scale_inv=np.ones((2, 1), np.float32)),
            PLAIN,
            {},
            r"shape \(\); got \(2, 1\) in a",
        ),
        (PLAIN._replace(granularity="rowwise"), PLAIN, {}, r"shape \(2, 1\); got \(\) in a"),
        (PLAIN._replace(granularity="columnwise"), PLAIN, {}, "granularity is one of tensorwise"),
        (
            PLAIN._replace(codes=PLAIN.codes.astype(np.int32)),
            PLAIN,
            {},
            "codes are uint8; got int32",
        ),
        (
            PLAIN,
            quantized(np.zeros((0, 32)), E4M3FN),
            {},
            r"at least one element; got x.shape=\(0, 32\). Drop",
        ),
        (
            PLAIN,
            PLAIN,
            {"bias": np.zeros(2, np.float32)},
            "'scale_then_round' takes no bias; a bias was given. Use round_then_bias, "
            "bias_then_round",
        ),
        (
            PLAIN,
            PLAIN,
            {"epilogue": "round_then_bias"},
            "'round_then_bias' takes a bias; no bias was given. Use scale_then_round",
        ),
        (
            PLAIN,
            PLAIN,
            {"epilogue": "round_then_bias", "bias": np.zeros((2, 1), np.float32)},
            r"\[N\] = \[2\].*got float32 \(2, 1\)",
        ),
        (
            PLAIN,
            PLAIN,
            {"epilogue": "bias_then_round", "bias": np.zeros(3)},
            r"\[N\] = \[2\].*got float64 \(3,\)",
        ),
        (
            PLAIN,
            PLAIN,
            {"epilogue": "round_then_bias", "bias": np.full(2, 0.1)},
            "of float32; got float64 .*Use round_to",
        ),
        (
            PLAIN,
            PLAIN,
            {"epilogue": "round_then_bias", "bias": np.full(2, 1e300)},
            "of float32; got float64",
        ),
        (
            PLAIN,
            PLAIN,
            {"epilogue": "round_then_bias", "bias": np.full(2, 257.0), "out_dtype": BFLOAT16},
            "of bfloat16; got",
        ),
        (PLAIN, PLAIN, {"epilogue": "round_then_bias", "bias": [1, 2]}, "got int64"),
    ],
)
def test_errors(a, b, options, message):
    with pytest.raises(ValueError, match=message):
        gemm.matmul(a, b, **options)


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4)), {}, r"one K; got \(2, 3\) and \(2, 4\)"),
        (np.zeros(3), np.zeros((2, 3)), {}, r"got \(3,\)"),
        (np.zeros((2, 3)), np.zeros((2, 3)), {"out_dtype": E4M3FN}, "got e4m3fn"),
        (np.zeros((2, 3), int), np.zeros((2, 3)), {}, "got int64. Use .astype"),
    ],
)
def test_errors_of_matmul_hp(a, b, options, message):
    with pytest.raises(ValueError, match=message):
        gemm.matmul_hp(a, b, **options)


def test_nan_scales_over_nan_codes_give_nan():  # S-5
    x = np.float32([[1, np.nan], [1, 2]])
    a, b = (
        scaling.quantize(v, E4M3FN, granularity="rowwise") for v in (x, np.ones((1, 2), np.float32))
    )
    assert np.isnan(a.scale_inv[0, 0])
    out = gemm.matmul(a, b)
    assert np.isnan(out[0, 0])
    assert np.isfinite(out[1, 0])


@pytest.mark.parametrize("accumulate", ["exact", "hopper_fast"])
def test_nans_have_the_same_bits_on_any_number_of_threads(accumulate):
    """Of two NaNs NumPy keeps the first or the second, as its loop is cut."""
    nan = np.full((515, 1), np.nan, np.float32)
    a = scaling.Quantized(np.full((515, 32), 0x7F, np.uint8), nan, nan, E4M3FN, "rowwise", -1)
    b = scaling.quantize(np.ones((1021, 32), np.float32), E4M3FN, granularity="rowwise")
    found = []
    for count in (1, 2, 3):
        with threads.using(count):
            found.append(gemm.matmul(a, b, accumulate=accumulate).view(np.uint32))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])
