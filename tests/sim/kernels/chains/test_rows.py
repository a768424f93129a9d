"""Rows that are decoded hold the magnitudes of their codes, their exponents, each byte four times,
and signs.
"""

import numpy as np
import pytest
from numba import njit

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.kernels.chains.rows import decode
from fp8ref.sim.kernels.chains.vectors import Sizes
from fp8ref.sim.quantize import cast


@njit
def decoded(codes, numbers, exponents, signs, sizes):
    decode(codes, numbers, exponents, signs, sizes)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_every_code(fmt, dtype, rng):  # G-10: subnormals count as emin
    finite = np.arange(256, dtype=np.uint8)[
        np.isfinite(cast.decode(np.arange(256, dtype=np.uint8), fmt))
    ]
    codes = rng.permutation(np.resize(finite, 17 * 16))
    numbers, exponents, signs = (
        np.empty(codes.size, dtype),
        np.empty(codes.size, np.uint32),
        np.empty(17, np.uint16),
    )
    sizes = Sizes(*[0] * len(Sizes._fields))._replace(
        mantissa_bits=fmt.mantissa_bits, bias=fmt.bias, zero=-63
    )
    decoded(codes, numbers, exponents, signs, np.array(sizes))
    values = cast.decode(codes, fmt)
    np.testing.assert_array_equal(numbers, np.abs(values))
    assert not np.signbit(numbers).any()
    exponent = np.maximum(np.frexp(values)[1] - 1, fmt.emin)
    expected = np.where(values == 0, -63, exponent).astype(np.int8)
    np.testing.assert_array_equal(
        exponents.view(np.int8).reshape(-1, 4), np.repeat(expected[:, None], 4, axis=1)
    )
    np.testing.assert_array_equal(
        signs, ((codes > 127).reshape(17, 16) << np.arange(16)).sum(axis=1)
    )
