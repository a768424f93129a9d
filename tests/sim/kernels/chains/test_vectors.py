"""Vectors of 16 numbers in the type of a step's sums."""

import numpy as np
import pytest
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from fp8ref.sim.kernels.chains.vectors import F32, Vectors


@intrinsic
def greatest_of(typing_context, values, least, out):
    """out = max(values, least) of 16 float32 numbers, in the type of out."""

    def generate(context, builder, signature, arguments):
        source, target = (
            context.make_array(signature.args[i])(context, builder, arguments[i]).data
            for i in (0, 2)
        )
        vectors = Vectors(builder, out.dtype == types.float64)
        given = vectors.load(source, 0, ir.VectorType(F32, 16))
        for i, found in enumerate(
            vectors.numbers(vectors.call("maxnum", given, vectors.splat(arguments[1], 16)))
        ):
            builder.store(
                found,
                builder.bitcast(
                    builder.gep(target, [ir.Constant(ir.IntType(64), 8 * i)]),
                    found.type.as_pointer(),
                ),
                align=4,
            )
        return context.get_dummy_value()

    return types.void(values, types.float32, out), generate


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sixteen_numbers_keep_their_places(dtype):
    @njit
    def run(values, out):
        greatest_of(values, np.float32(4.5), out)

    values, out = np.arange(16, dtype=np.float32), np.zeros(16, dtype)
    run(values, out)
    np.testing.assert_array_equal(out, np.maximum(values, 4.5))
