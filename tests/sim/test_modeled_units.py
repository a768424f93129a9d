"""Units that rest on MMA-Sim alone, against Python's fractions: float16 accumulators, block scales, AMD's matrix cores."""

import dataclasses
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from fp8ref.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FLOAT16, FLOAT32
from fp8ref.sim import accumulate, block_scaled, cast, gemm, matrix_core, scaling, tensor_core
from fp8ref.sim.scaling import Quantized
from fp8ref.sim.tensor_core import MODELED, UNITS

PAIRS = list(product((E4M3FN, E5M2), repeat=2))
AMD = list(product((E4M3FNUZ, E5M2FNUZ), repeat=2))


def exponent(value, emin):
    """max(floor(log2 |value|), emin); -126 for a zero."""
    if value == 0:
        return -126
    n = abs(value.numerator).bit_length() - value.denominator.bit_length()
    n -= abs(value) < Fraction(2) ** n
    return max(n + (abs(value) >= Fraction(2) ** (n + 1)), emin)


def cut(value, quantum, how):
    """value as a multiple of the quantum, by a function of a fraction that gives an integer."""
    return how(value / quantum) * quantum


def toward_zero(x):
    return abs(x) // 1 * (1 if x >= 0 else -1)


def floor(x):
    return x // 1


def nearest(x):
    return round(x)  # Python's, to even


def rounded(value, bits, fmt, how):
    found = cut(value, Fraction(2) ** (max(exponent(value, fmt.emin), fmt.emin) - bits), how) if value else Fraction(0)
    infinity = np.inf if found > 0 else -np.inf
    return infinity if abs(found) >= Fraction(2) ** (fmt.bias + 1) else float(found)


def nvidia(a, b, c, pair, unit, scale=0):
    """One instruction of a unit whose zeros are ``least``: fractions a and b [32], c."""
    for k in range(0, 32, unit.fused_width):
        terms = [(c, exponent(c, unit.accumulator.emin))]
        for x, y in zip(a[k : k + unit.fused_width], b[k : k + unit.fused_width], strict=True):
            terms.append((x * y * Fraction(2) ** scale, exponent(x, pair[0].emin) + exponent(y, pair[1].emin) + scale))
        quantum = Fraction(2) ** (max(e for _, e in terms) - unit.fraction_bits)
        how = nearest if unit.output_rounding == "nearest_even" else toward_zero
        found = rounded(sum(cut(value, quantum, toward_zero) for value, _ in terms), unit.output_bits, unit.accumulator, how)
        if np.isinf(found):
            return found
        c = Fraction(found)
    return found


def amd(a, b, c, pair):
    """K = 16 or 32 products of fractions a and b, and c."""
    for k in range(0, len(a), 16):
        halves = []
        for begin in (0, 1):
            pairs = zip(a[k + begin : k + 16 : 2], b[k + begin : k + 16 : 2], strict=True)
            of = [(x * y, exponent(x, pair[0].emin) + exponent(y, pair[1].emin)) for x, y in pairs]
            top = max(e for _, e in of)
            halves.append((sum(cut(value, Fraction(2) ** (top - 24), toward_zero) for value, _ in of), top))
        both = max(e for _, e in halves)
        total = sum(cut(value, Fraction(2) ** (both - 24), floor) for value, _ in halves)
        of_c = exponent(c, -126)
        top = max(both, of_c)
        kept = cut(c, Fraction(2) ** (top - 24), floor) if of_c >= top - 25 else Fraction(0)
        found = rounded(cut(total, Fraction(2) ** (top - 31), floor) + kept, 23, FLOAT32, nearest)
        c = Fraction(found)
    return found


def drawn(rng, count, fmt, k=32):
    """Finite codes of any kind, of few that are not zero, and near 1."""
    any_code = rng.integers(0, 256, (count, k)).astype(np.uint8)
    any_code = np.where(np.isfinite(cast.decode(any_code, fmt)), any_code, 0).astype(np.uint8)
    few = np.where(rng.random((count, k)) < 0.1, any_code, 0).astype(np.uint8)
    near = cast.encode(rng.standard_normal((count, k)).astype(np.float32), fmt)
    return np.choose(rng.integers(0, 3, (count, 1)), [any_code, few, near])


def accumulators(rng, shape, half):
    c = rng.standard_normal(shape) * 2.0 ** (rng.integers(-24, 15, shape) if half else rng.integers(-40, 30, shape))
    tiny = rng.standard_normal(shape) * 2.0 ** rng.integers(-149, -90, shape)
    c = np.where(rng.random(shape) < 0.25, 0 if half else tiny, c).astype(np.float32)
    return cast.round_to(np.clip(c, -60000, 60000), FLOAT16) if half else c


def fractions(codes, fmt):
    return [[Fraction(float(v)) for v in row] for row in cast.decode(codes, fmt)]


@pytest.mark.grid(8)
@pytest.mark.parametrize("name", ["hopper_f16", "ada_f16", "blackwell_mx", "hopper", "ada", "blackwell"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_an_instruction_is_that_of_fractions(name, pair, rng):  # G-10, G-11, G-23, G-24
    """The three units of G-10 under zeros ``least`` too."""
    unit = MODELED[name] if name in MODELED else dataclasses.replace(UNITS[name], zeros="least")
    a, b = drawn(rng, 9, pair[0]), drawn(rng, 7, pair[1])
    c = accumulators(rng, (9, 7), unit.accumulator == FLOAT16)
    scales = {}
    exponents = np.zeros((9, 7), int)
    if unit.block_scales:
        of_a, of_b = rng.integers(-127, 128, (9, 1)), rng.integers(-20, 21, (7, 1))
        scales = {"scale_inv_a": np.ldexp(1.0, of_a).astype(np.float32), "scale_inv_b": np.ldexp(1.0, of_b).astype(np.float32)}
        exponents = of_a + of_b.T
    found = gemm.mma(a, b, c, fmt_a=pair[0], fmt_b=pair[1], unit=unit, **scales)
    left, right = fractions(a, pair[0]), fractions(b, pair[1])
    expected = [[nvidia(left[i], right[j], Fraction(float(c[i, j])), pair, unit, int(exponents[i, j])) for j in range(7)] for i in range(9)]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


@pytest.mark.parametrize("pair", AMD, ids=lambda p: f"{p[0]}-{p[1]}")
@pytest.mark.parametrize("k", [16, 32])
def test_an_instruction_of_cdna3_is_that_of_fractions(pair, k, rng):  # G-25
    a, b, c = drawn(rng, 9, pair[0], k), drawn(rng, 7, pair[1], k), accumulators(rng, (9, 7), False)
    found = matrix_core.mfma(a, b, c, fmt_a=pair[0], fmt_b=pair[1])
    left, right = fractions(a, pair[0]), fractions(b, pair[1])
    expected = [[amd(left[i], right[j], Fraction(float(c[i, j])), pair) for j in range(7)] for i in range(9)]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


def test_a_float16_result_is_rounded_to_even_and_overflows():  # G-24
    one, two = np.full((1, 32), 0x38, np.uint8), np.full((1, 32), 0x40, np.uint8)
    top = np.full((1, 32), E4M3FN.max_code, np.uint8)
    take = {"fmt_a": E4M3FN, "fmt_b": E4M3FN, "unit": "hopper_f16"}
    # 2048 + 32 x 1 = 2080; 2049 is no float16
    np.testing.assert_array_equal(gemm.mma(one, one, np.float32([[2048]]), **take), [[2080]])
    np.testing.assert_array_equal(
        gemm.mma(np.where(np.arange(32) == 0, one, 0).astype(np.uint8), one, np.float32([[2048]]), **take), [[2048]]
    )
    np.testing.assert_array_equal(
        gemm.mma(np.where(np.arange(32) < 3, one, 0).astype(np.uint8), one, np.float32([[2048]]), **take), [[2052]]
    )
    np.testing.assert_array_equal(gemm.mma(top, two, np.float32([[60000 // 32 * 32]]), **take), [[np.inf]])
    with pytest.raises(ValueError, match="float16 accumulator; got a c that is no float16"):
        gemm.mma(one, one, np.float32([[2049]]), **take)


def test_zero_products_next_to_a_tiny_accumulator():  # G-11
    """The open question: left out, they keep all bits of 2^-118 (1 + 2^-13); of exponent -126, they cut its last one off."""
    a, b = np.zeros((1, 32), np.uint8), np.full((1, 32), E4M3FN.max_code, np.uint8)
    c = np.float32([[2.0**-119 * (1 + 2.0**-13)]])
    take = {"fmt_a": E4M3FN, "fmt_b": E4M3FN}
    assert gemm.mma(a, b, c, unit="hopper", **take) == c
    assert gemm.mma(a, b, c, unit=dataclasses.replace(UNITS["hopper"], zeros="least"), **take) == np.float32(2.0**-119)


def mx(x, fmt=E4M3FN, policy="te_mxfp8"):
    return scaling.quantize(x, fmt, granularity="mx_1x32", policy=policy)


def test_a_block_scaled_gemm_is_a_chain_of_its_instruction(rng):  # G-23
    x, w = (rng.standard_normal((n, 96)).astype(np.float32) * 2.0 ** rng.integers(-8, 9, (n, 96)) for n in (5, 6))
    a, b = mx(x.astype(np.float32)), mx(w.astype(np.float32), E5M2)
    acc = np.zeros((5, 6), np.float32)
    for i in range(3):
        part = slice(32 * i, 32 * i + 32)
        acc = gemm.mma(
            a.codes[:, part], b.codes[:, part], acc, fmt_a=E4M3FN, fmt_b=E5M2, unit="blackwell_mx",
            scale_inv_a=a.scale_inv[:, i : i + 1], scale_inv_b=b.scale_inv[:, i : i + 1],
        )  # fmt: skip
    np.testing.assert_array_equal(block_scaled.matmul(a, b), acc)
    np.testing.assert_array_equal(block_scaled.matmul(a, b, out_dtype=FLOAT16), cast.round_to(acc, FLOAT16))
    exact = scaling.dequantize(a).astype(np.float64) @ scaling.dequantize(b).astype(np.float64).T
    scale = np.abs(scaling.dequantize(a)).astype(np.float64) @ np.abs(scaling.dequantize(b)).astype(np.float64).T
    # Three steps, each cutting 33 terms off below 2^-25 of the largest, and the result below 2^-23: under 2^-17 of the sum of magnitudes.
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
    np.testing.assert_array_equal(block_scaled.matmul(mx(x), b), block_scaled.matmul(mx(x), as_rows))


def test_what_no_recording_confirms_says_so():
    assert all(
        "unconfirmed" in unit.evidence and "MMA-Sim" in unit.evidence for unit in (*MODELED.values(), *matrix_core.MATRIX_CORES.values())
    )
    assert all(unit.name == name for name, unit in MODELED.items())
    assert not any(unit.compiled for unit in MODELED.values())
    assert not set(MODELED) & set(UNITS)


one = np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: gemm.mma(c, c, one, fmt_a=E4M3FN, fmt_b=E4M3FN, scale_inv_a=one, scale_inv_b=one), "'hopper' takes no scales"),
        (lambda c: gemm.mma(c, c, one, fmt_a=E4M3FN, fmt_b=E4M3FN, unit="blackwell_mx"), "takes a scale_inv of each row"),
        (lambda c: gemm.mma(c, c, one, fmt_a=E4M3FN, fmt_b=E4M3FN, unit="blackwell_mx", scale_inv_a=3 * one, scale_inv_b=one), "powers of two"),
        (lambda c: accumulate.Accumulation(name="own", unit=MODELED["blackwell_mx"]), "takes no block scales .*block_scaled.matmul"),
        (lambda c: block_scaled.matmul(mx(np.ones((2, 32), np.float32)), mx(np.ones((2, 32), np.float32)), unit="hopper"), "takes no block scales"),
        (lambda c: block_scaled.matmul(scaling.quantize(np.ones((2, 32), np.float32), E4M3FN), mx(np.ones((2, 32), np.float32))), "blocks of 32"),
        (lambda c: block_scaled.matmul(mx(np.ones((2, 32), np.float32), policy="torchao"), mx(np.ones((2, 32), np.float32))), "e8m0fnu; a has others"),
        (lambda c: block_scaled.matmul(mx(np.ones((2, 32), np.float32)), mx(np.ones((2, 64), np.float32))), "have one K"),
        (lambda c: matrix_core.mfma(c, c, one, fmt_a=E4M3FN, fmt_b=E4M3FNUZ), "CDNA3 multiply e4m3fnuz and e5m2fnuz"),
        (lambda c: matrix_core.mfma(c[:, :8], c[:, :8], one, fmt_a=E4M3FNUZ, fmt_b=E4M3FNUZ), "a multiple of 16"),
        (lambda c: matrix_core.mfma(c, c, one.astype(np.float64), fmt_a=E4M3FNUZ, fmt_b=E4M3FNUZ), "accumulator c is float32"),
        (lambda c: matrix_core.by_name("cdna2"), "unit is a MatrixCore or one of cdna3|cdna3"),
        (lambda c: tensor_core.by_name("cdna3"), "unit is a TensorCore"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.zeros((1, 32), np.uint8))
