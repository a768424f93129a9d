"""Codes decoded in vectors of any length hold what the specification says."""

import numpy as np
import pytest
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.kernels.chains.codes import Codes
from fp8ref.sim.kernels.chains.vectors import F32, I8, I32, Sizes
from fp8ref.sim.quantize import cast


@intrinsic
def decode_64(typing_context, codes, magnitudes, exponents, sizes):
    """|v| of every fourth of 64 codes, float32 [16], and the exponents of all, uint8 [64]."""

    def generate(context, builder, signature, arguments):
        at = [
            context.make_array(t)(context, builder, value).data
            for t, value in zip(signature.args, arguments, strict=True)
        ]
        of = Codes(builder, False, at[3])
        four = of.load(builder.bitcast(at[0], I32.as_pointer()), 0, ir.VectorType(I32, 16))
        builder.store(
            of.magnitudes(four),
            builder.bitcast(at[1], ir.VectorType(F32, 16).as_pointer()),
            align=4,
        )
        builder.store(
            of.exponents(four), builder.bitcast(at[2], ir.VectorType(I8, 64).as_pointer()), align=1
        )
        return context.get_dummy_value()

    return types.void(codes, magnitudes, exponents, sizes), generate


@njit
def decoded(codes, magnitudes, exponents, sizes):
    decode_64(codes, magnitudes, exponents, sizes)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_words_of_four_codes(fmt):  # G-10: subnormals count as emin
    codes = np.arange(256, dtype=np.uint8)
    finite = np.isfinite(cast.decode(codes, fmt))
    sizes = np.array(
        Sizes(*[0] * len(Sizes._fields))._replace(
            mantissa_bits=fmt.mantissa_bits, bias=fmt.bias, zero=200, one_byte=127
        )
    )
    for some in np.where(finite, codes, 0).astype(np.uint8).reshape(4, 64):
        for first in range(4):
            rolled = np.roll(some, -first)
            magnitudes, exponents = np.empty(16, np.float32), np.empty(64, np.uint8)
            decoded(rolled, magnitudes, exponents, sizes)
            values = np.abs(cast.decode(rolled, fmt))
            np.testing.assert_array_equal(magnitudes, values[::4])
            np.testing.assert_array_equal(
                exponents,
                np.where(values == 0, 200, np.maximum(np.frexp(values)[1] - 1, fmt.emin) + 127),
            )
