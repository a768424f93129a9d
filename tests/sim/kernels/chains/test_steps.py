"""A compiled step against Python's fractions."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from helpers.gemm.exact_steps import cut, exponent, fractions, rounded, toward_zero
from numba import njit

from fp8ref.formats import E4M3FN, E5M2, FLOAT32
from fp8ref.sim.kernels.chains.steps import (
    PARTS,
    TO_NEAREST,
    TOWARD_ZERO,
    set_rounding,
    step,
    zero_and_bias,
)
from fp8ref.sim.kernels.chains.vectors import LANES, Sizes
from fp8ref.sim.quantize import cast

i32 = np.int32


@njit
def taken(a, of_a, signs, parts, of_b, acc, sizes, first, of_parts, of_acc, rows):
    set_rounding(i32(TOWARD_ZERO))
    step(a, of_a, signs, parts, of_b, acc, sizes, first, of_parts, of_acc, rows)
    set_rounding(i32(TO_NEAREST))


def numbers(rng, shape, fmt):
    """Codes of finite numbers, a third of them zeros or subnormal."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes = np.where(rng.random(shape) < 0.3, codes & (0x80 | (1 << fmt.mantissa_bits) - 1), codes)
    return np.where(np.isfinite(cast.decode(codes, fmt)), codes, 0).astype(np.uint8)


def exponents(values, fmt, zero):
    return np.where(values == 0, zero, np.maximum(np.frexp(values)[1] - 1, fmt.emin))


@pytest.mark.parametrize(
    ("width", "fraction_bits", "output_bits", "dtype"),
    [(32, 13, 13, "f4"), (4, 18, 23, "f4"), (32, 25, 23, "f8")],
)
def test_some_rows_take_a_step_of_fractions(width, fraction_bits, output_bits, dtype, rng):  # G-10
    """Rows 1 to 3 of five, an odd number of them, take the second of two steps of b; the others
    stay.
    """
    zero, bias = zero_and_bias(dtype == "f8")
    unit = Sizes(*[0] * len(Sizes._fields))._replace(
        width=width, fraction_bits=fraction_bits, output_bits=output_bits
    )
    for fmt_a, fmt_b in product((E4M3FN, E5M2), repeat=2):
        a, b = numbers(rng, (6, width), fmt_a), numbers(rng, (LANES, width), fmt_b)
        a[1, : width // 2] = 0
        left, right = cast.decode(a, fmt_a), cast.decode(b, fmt_b).T
        of_a = exponents(left, fmt_a, zero).astype(np.int8).view(np.uint8) * np.uint32(0x01010101)
        signs = ((a >= 128) << np.arange(width)).sum(axis=1).astype(np.uint32)
        parts, of_b = (
            np.full((2, width, PARTS, LANES), np.nan, dtype),
            np.zeros((2, width, LANES), np.uint8),
        )
        lanes = LANES * 4 // parts.itemsize  # of float64 half as many are summed at a time
        # [width, PARTS, LANES]
        of_step = np.stack([np.abs(right), np.minimum(right, 0), -np.maximum(right, 0)], axis=1)
        parts[1] = (
            of_step.reshape(width, PARTS, -1, lanes).transpose(2, 0, 1, 3).reshape(of_step.shape)
        )
        of_b[1] = exponents(right, fmt_b, zero) + bias
        c = (rng.standard_normal((5, LANES)) * 2.0 ** rng.integers(-20, 24, (5, LANES))).astype(
            np.float32
        )
        c[:, ::5] = 0
        acc = c.copy()
        flat = (x.reshape(-1) for x in (np.abs(left).astype(dtype), of_a, signs, parts, of_b, acc))
        taken(*flat, np.array(unit), 2, 1, 1, 3)
        np.testing.assert_array_equal(acc[[0, 4]], c[[0, 4]])
        for row, (x, lane) in product((1, 2, 3), enumerate(fractions(b, fmt_b))):
            start = Fraction(float(c[row, x]))
            terms = [(start, exponent(start, FLOAT32.emin))]
            for u, v in zip(fractions(a[1 + row : 2 + row], fmt_a)[0], lane, strict=True):
                terms.append((u * v, exponent(u, fmt_a.emin) + exponent(v, fmt_b.emin)))
            quantum = Fraction(2) ** (max(e for _, e in terms) - fraction_bits)
            total = sum(cut(value, quantum, toward_zero) for value, _ in terms)
            assert acc[row, x] == rounded(total, output_bits, FLOAT32, toward_zero)
