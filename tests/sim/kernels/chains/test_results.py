"""Tiles of a result are taken, given and added to, and nothing beside them is written."""

import numpy as np
import pytest
from numba import njit, types
from numba.extending import intrinsic

from fp8ref.sim.kernels.chains.results import Results
from fp8ref.sim.kernels.chains.vectors import LANES, Sizes

M, ROW, ROWS = 5, 1, 3
N, FIRST = 2 * LANES - 11, LANES  # the second tile is ragged


def written(write):
    """A compiled function that writes this loop over rows, of a flag."""

    @intrinsic
    def loop(typing_context, out, acc, sizes, first, row, rows, flag):
        def generate(context, builder, signature, arguments):
            at = [
                context.make_array(t)(context, builder, value).data
                for t, value in zip(signature.args[:3], arguments[:3], strict=True)
            ]
            first, row, rows, flag = arguments[3:]
            write(Results(builder, *at, first), row, rows, flag)
            return context.get_dummy_value()

        return types.void(out, acc, sizes, *[types.int64] * 3, types.boolean), generate

    @njit
    def function(out, acc, sizes, first, row, rows, flag):
        loop(out, acc, sizes, first, row, rows, flag)

    return function


LOOPS = {
    "take": written(lambda results, row, rows, flag: results.take(row, rows)),
    "give": written(lambda results, row, rows, flag: results.give(row, rows)),
    "end": written(lambda results, row, rows, flag: results.end(row, rows, flag)),
}


@pytest.mark.parametrize("first", [0, FIRST])
@pytest.mark.parametrize(
    ("name", "part"), [("take", False), ("give", False), ("end", False), ("end", True)]
)
def test_some_rows_of_a_tile(name, part, first, rng):  # G-12
    out, acc = (
        rng.standard_normal((M, N)).astype(np.float32),
        rng.standard_normal((2, M, LANES)).astype(np.float32),
    )
    result, sums = out.copy(), acc.copy()
    rows, columns = slice(ROW, ROW + ROWS), slice(first, min(first + LANES, N))
    lanes = slice(0, columns.stop - first)
    if name == "take":
        sums[0, rows] = 0
        sums[0, rows, lanes] = out[rows, columns]
    elif name == "give":
        result[rows, columns] = acc[0, rows, lanes]
    else:
        total = acc[1, rows] + acc[0, rows]
        sums[0, rows], sums[1, rows] = 0, 0 if part else total
        result[rows, columns] += total[:, lanes] if part else 0
    sizes = np.array(Sizes(*[0] * len(Sizes._fields))._replace(m=M, n=N))
    LOOPS[name](out.reshape(-1), acc.reshape(-1), sizes, first, ROW, ROWS, part)
    np.testing.assert_array_equal(out, result)
    np.testing.assert_array_equal(acc, sums)
