"""Units that rest on MMA-Sim alone, against Python's fractions: instructions of NVIDIA's."""

import dataclasses
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from helpers.gemm.exact_steps import (
    accumulators,
    cut,
    drawn,
    exponent,
    fractions,
    nearest,
    rounded,
    toward_zero,
)

from fp8ref.formats import E4M3FN, E5M2, FLOAT16
from fp8ref.sim.gemm import gemm, matrix_core, tensor_core
from fp8ref.sim.gemm.tensor_core import MODELED, UNITS
from fp8ref.sim.quantize import cast

PAIRS = list(product((E4M3FN, E5M2), repeat=2))


def nvidia(a, b, c, pair, unit, scale=0):
    """One instruction of a unit whose zeros are ``least``: fractions a and b [32], c."""
    for k in range(0, 32, unit.fused_width):
        terms = [(c, exponent(c, unit.accumulator.emin))]
        for x, y in zip(a[k : k + unit.fused_width], b[k : k + unit.fused_width], strict=True):
            terms.append(
                (
                    x * y * Fraction(2) ** scale,
                    exponent(x, pair[0].emin) + exponent(y, pair[1].emin) + scale,
                )
            )
        quantum = Fraction(2) ** (max(e for _, e in terms) - unit.fraction_bits)
        how = nearest if unit.output_rounding == "nearest_even" else toward_zero
        found = rounded(
            sum(cut(value, quantum, toward_zero) for value, _ in terms),
            unit.output_bits,
            unit.accumulator,
            how,
        )
        if np.isinf(found):
            return found
        c = Fraction(found)
    return found


@pytest.mark.grid(8)
@pytest.mark.parametrize(
    "name", ["hopper_f16", "ada_f16", "blackwell_mx", "hopper", "ada", "blackwell"]
)
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
        scales = {
            "scale_inv_a": np.ldexp(1.0, of_a).astype(np.float32),
            "scale_inv_b": np.ldexp(1.0, of_b).astype(np.float32),
        }
        exponents = of_a + of_b.T
    found = gemm.mma(a, b, c, fmt_a=pair[0], fmt_b=pair[1], unit=unit, **scales)
    left, right = fractions(a, pair[0]), fractions(b, pair[1])
    expected = [
        [
            nvidia(left[i], right[j], Fraction(float(c[i, j])), pair, unit, int(exponents[i, j]))
            for j in range(7)
        ]
        for i in range(9)
    ]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


def test_a_float16_result_is_rounded_to_even_and_overflows():  # G-24
    one, two = np.full((1, 32), 0x38, np.uint8), np.full((1, 32), 0x40, np.uint8)
    top = np.full((1, 32), E4M3FN.max_code, np.uint8)
    take = {"fmt_a": E4M3FN, "fmt_b": E4M3FN, "unit": "hopper_f16"}
    # 2048 + 32 x 1 = 2080; 2049 is no float16
    np.testing.assert_array_equal(gemm.mma(one, one, np.float32([[2048]]), **take), [[2080]])
    np.testing.assert_array_equal(
        gemm.mma(
            np.where(np.arange(32) == 0, one, 0).astype(np.uint8), one, np.float32([[2048]]), **take
        ),
        [[2048]],
    )
    np.testing.assert_array_equal(
        gemm.mma(
            np.where(np.arange(32) < 3, one, 0).astype(np.uint8), one, np.float32([[2048]]), **take
        ),
        [[2052]],
    )
    np.testing.assert_array_equal(
        gemm.mma(top, two, np.float32([[60000 // 32 * 32]]), **take), [[np.inf]]
    )
    with pytest.raises(ValueError, match="needs a float16 c"):
        gemm.mma(one, one, np.float32([[2049]]), **take)


def test_zero_products_next_to_a_tiny_accumulator():  # G-11
    """The open question: left out, they keep all bits of 2^-118 (1 + 2^-13); of exponent -126, they
    cut its last one off.
    """
    a, b = np.zeros((1, 32), np.uint8), np.full((1, 32), E4M3FN.max_code, np.uint8)
    c = np.float32([[2.0**-119 * (1 + 2.0**-13)]])
    take = {"fmt_a": E4M3FN, "fmt_b": E4M3FN}
    assert gemm.mma(a, b, c, unit="hopper", **take) == c
    assert gemm.mma(
        a, b, c, unit=dataclasses.replace(UNITS["hopper"], zeros="least"), **take
    ) == np.float32(2.0**-119)


def test_what_no_recording_confirms_says_so():
    assert all(
        "unconfirmed" in unit.evidence and "MMA-Sim" in unit.evidence
        for unit in (*MODELED.values(), *matrix_core.MATRIX_CORES.values())
    )
    assert all(unit.name == name for name, unit in MODELED.items())
    assert not any(unit.compiled for unit in MODELED.values())
    assert not set(MODELED) & set(UNITS)


one = np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c: gemm.mma(
                c, c, one, fmt_a=E4M3FN, fmt_b=E4M3FN, scale_inv_a=one, scale_inv_b=one
            ),
            "'hopper' takes no scales",
        ),
        (
            lambda c: gemm.mma(c, c, one, fmt_a=E4M3FN, fmt_b=E4M3FN, unit="blackwell_mx"),
            "takes power-of-two or NaN scale_inv",
        ),
        (
            lambda c: gemm.mma(
                c,
                c,
                one,
                fmt_a=E4M3FN,
                fmt_b=E4M3FN,
                unit="blackwell_mx",
                scale_inv_a=3 * one,
                scale_inv_b=one,
            ),
            "power-of-two",
        ),
        (lambda c: tensor_core.by_name("cdna3"), "unit is a TensorCore"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.zeros((1, 32), np.uint8))


def _zeros_next_to(c: float, *, b: float, k: int) -> float:
    """One instruction of blackwell_mx: products 0 x b in blocks whose scales are 2^k, and c."""
    codes = np.full((1, 32), cast.encode(np.float32(b), E5M2), np.uint8)
    scale = {
        "scale_inv_a": np.full((1, 1), 2.0**k, np.float32),
        "scale_inv_b": np.ones((1, 1), np.float32),
    }
    accumulator = np.full((1, 1), c, np.float32)
    return float(
        gemm.mma(
            np.zeros((1, 32), np.uint8),
            codes,
            accumulator,
            fmt_a=E4M3FN,
            fmt_b=E5M2,
            unit="blackwell_mx",
            **scale,
        )[0, 0]
    )


def test_zero_products_and_their_scales_take_part_in_the_alignment():  # G-11, G-23
    """0 x 2^15 under scales of 2^20 has e = -126 + 15 + 20 = -91, so that c is cut off to multiples
    of 2^(-91 - 25) = 2^-116, toward zero.
    """
    assert _zeros_next_to(2.0**-117, b=2.0**15, k=20) == 0
    assert _zeros_next_to(-(2.0**-116) - 2.0**-117, b=2.0**15, k=20) == -(2.0**-116)
    assert _zeros_next_to(2.0**-117, b=2.0**15, k=0) == 2.0**-117  # 2^(-111 - 25)
    assert _zeros_next_to(2.0**-137, b=2.0**15, k=0) == 0
    assert not np.signbit(_zeros_next_to(-0.0, b=2.0**15, k=0))
