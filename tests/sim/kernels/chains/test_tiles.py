"""A tile that is laid out holds the numbers of its codes, and their exponents."""

from itertools import product

import numpy as np
import pytest
from numba import njit

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.kernels.chains.steps import PARTS
from fp8ref.sim.kernels.chains.tiles import lay_out
from fp8ref.sim.kernels.chains.vectors import LANES, Sizes
from fp8ref.sim.quantize import cast

WIDTH, STEPS = 32, 2


@njit
def filled(words, exponents, parts, sizes, first, step, which):
    lay_out(words, exponents, parts, sizes, first, step, which)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_every_code_in_either_tile_and_step(fmt, dtype, rng):  # G-10: subnormals count as emin
    finite = np.arange(256, dtype=np.uint8)[
        np.isfinite(cast.decode(np.arange(256, dtype=np.uint8), fmt))
    ]
    codes = rng.permutation(np.resize(finite, WIDTH * LANES)).reshape(LANES, WIDTH)
    sizes = Sizes(*[0] * len(Sizes._fields))._replace(
        steps=STEPS,
        width=WIDTH,
        mantissa_bits=fmt.mantissa_bits,
        bias=fmt.bias,
        zero=200,
        one_byte=127,
    )
    for tile, step, which in product(range(2), range(STEPS), range(STEPS)):
        words = np.zeros((2, STEPS, WIDTH // 4, LANES), np.uint32)
        exponents = np.zeros((STEPS, WIDTH, LANES), np.uint8)
        parts = np.full((STEPS, WIDTH, PARTS, LANES), np.nan, dtype)
        words[tile, step] = codes.view(np.uint32).T
        filled(
            *(x.reshape(-1) for x in (words, exponents, parts)),
            np.array(sizes),
            tile * LANES,
            step,
            which,
        )
        values = cast.decode(codes, fmt).T  # [WIDTH, LANES]
        lanes = LANES * 4 // parts.itemsize  # of float64 half as many are summed at a time
        found = (
            parts[which]
            .reshape(LANES // lanes, WIDTH, PARTS, lanes)
            .transpose(1, 2, 0, 3)
            .reshape(WIDTH, PARTS, LANES)
        )
        np.testing.assert_array_equal(
            found, np.stack([np.abs(values), np.minimum(values, 0), -np.maximum(values, 0)], 1)
        )
        assert np.isnan(parts[1 - which]).all()
        exponent = np.maximum(np.frexp(values)[1] - 1, fmt.emin) + 127
        np.testing.assert_array_equal(exponents[which], np.where(values == 0, 200, exponent))
        assert not exponents[1 - which].any()
