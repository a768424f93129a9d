"""The compiled chains of modeled units against their definitions, bit for bit."""

from itertools import product

import numpy as np
import pytest

from fp8ref.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FLOAT32
from fp8ref.sim import threads
from fp8ref.sim.gemm import matrix_core, tensor_core
from fp8ref.sim.gemm.accumulate import Accumulation, chains, chains_plain
from fp8ref.sim.gemm.matrix_core import MATRIX_CORES
from fp8ref.sim.gemm.tensor_core import MODELED, UNITS, TensorCore
from fp8ref.sim.quantize import cast

PAIRS = list(product((E4M3FN, E5M2), repeat=2))
AMD_PAIRS = list(product((E4M3FNUZ, E5M2FNUZ), repeat=2))
OTHERS = [
    TensorCore(
        name="counted",
        fused_width=8,
        fraction_bits=3,
        output_bits=5,
        evidence="none",
        zeros="counted",
        subnormals="flushed",
    ),
    TensorCore(
        name="factors",
        fused_width=4,
        fraction_bits=1,
        output_bits=1,
        evidence="none",
        exponents="factors",
        output_rounding="nearest_even",
    ),
]


def values(rng, shape, fmt, zeros):
    """Any finite numbers of the format, many of them zeros of either sign, rows of small ones and
    rows of one sign.
    """
    drawn = cast.decode(rng.integers(0, 256, shape, dtype=np.uint8), fmt)
    drawn = np.where(
        np.isfinite(drawn) & (rng.random(shape) >= zeros), drawn, np.copysign(np.float32(0), drawn)
    )
    small = cast.decode(rng.integers(0, 1 << fmt.mantissa_bits, shape, dtype=np.uint8), fmt)
    drawn = np.where(rng.random((shape[0], 1)) < 0.2, small, drawn)
    return np.where(rng.random((shape[0], 1)) < 0.5, drawn, np.abs(drawn)).astype(np.float32)


def accumulators(rng, shape, accumulator):
    """Any finite numbers of the accumulator, a third of them zeros, subnormals, or near its
    ends.
    """
    c = rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
    c = np.where(np.isfinite(c), c, np.float32(0))
    ends = rng.choice(
        np.float32(
            [
                0,
                -0.0,
                2.0**-149,
                -(2.0**-130),
                2.0**-14,
                2.0**-24,
                65504,
                -65504,
                3.4028235e38,
                -3.4e38,
                1,
            ]
        ),
        shape,
    )
    ordinary = (rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, shape)).astype(np.float32)
    c = np.choose(rng.integers(0, 3, shape), [c, ends, ordinary])
    with np.errstate(over="ignore"):
        return np.clip(cast.round_to(c, accumulator), -accumulator.max, accumulator.max).astype(
            np.float32
        )


def same(got, expected):
    np.testing.assert_array_equal(
        np.float32(got).view(np.uint32), np.float32(expected).view(np.uint32)
    )


@pytest.mark.parametrize(
    "unit", [*MODELED.values(), *UNITS.values(), *OTHERS], ids=lambda u: u.name
)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_chains_of_tensor_cores(unit, pair, rng):  # G-10, G-11, G-23, G-24
    for zeros, k in ((0.1, 96), (0.9, 32), (1.0, 32)):
        a, b = values(rng, (23, k), pair[0], zeros), values(rng, (41, k), pair[1], zeros)
        c = accumulators(rng, (23, 41), unit.accumulator)
        steps, scales = k // unit.fused_width, None
        if unit.block_scales:
            spread = rng.choice([2, 127])  # every exponent of e8m0
            scales = tuple(rng.integers(-spread, spread + 1, (len(x), steps)) for x in (a, b))
        both = None if scales is None else scales[0][:, None] + scales[1][None, :]
        same(
            tensor_core.chain(a, b, c, *pair, unit, scales),
            tensor_core.chain_plain(a, b, c, *pair, unit, both),
        )


def test_overflow_of_a_float16_accumulator_stays():  # G-24
    a, b = np.full((2, 96), 448, np.float32), np.full((3, 96), 448, np.float32)
    b[1], b[2, 32:] = -b[1], -448
    zero, unit = np.zeros((2, 3), np.float32), MODELED["hopper_f16"]
    got = tensor_core.chain(a, b, zero, E4M3FN, E4M3FN, unit)
    same(got, tensor_core.chain_plain(a, b, zero, E4M3FN, E4M3FN, unit))
    assert got[0].tolist() == [np.inf, -np.inf, np.inf]


@pytest.mark.parametrize("unit", ["hopper_f16", "ada_f16"])
def test_plans_of_a_modeled_unit(unit, rng):  # G-12
    a, b = values(rng, (5, 320), E5M2, 0.1), values(rng, (7, 320), E4M3FN, 0.1)
    plan = Accumulation(name="own", unit=MODELED[unit], promotion=64, split_k=2)
    with np.errstate(invalid="ignore"):  # infinities of both signs may meet
        same(chains(a, b, E5M2, E4M3FN, plan), chains_plain(a, b, E5M2, E4M3FN, plan))


@pytest.mark.parametrize("pair", AMD_PAIRS, ids=str)
def test_chains_of_matrix_cores(pair, rng):  # G-25
    unit = MATRIX_CORES["cdna3"]
    for zeros, k in ((0.1, 96), (0.9, 16), (1.0, 32)):
        a, b = (
            values(rng, (n, k), fmt, zeros).astype(np.float64)
            for n, fmt in zip((23, 41), pair, strict=True)
        )
        c = accumulators(rng, (23, 41), FLOAT32).astype(np.float64)
        same(matrix_core.chain(a, b, c, *pair, unit), matrix_core.chain_plain(a, b, c, *pair, unit))


def test_the_largest_accumulators_of_matrix_cores():  # G-25
    a, b = np.full((1, 48), 57344.0), np.full((2, 48), 57344.0)
    b[1] = -b[1]
    c = np.array([[3.4028234663852886e38, -3.4028234663852886e38]])
    for function in (matrix_core.chain, matrix_core.chain_plain):
        assert function(a, b, c, E5M2FNUZ, E5M2FNUZ, MATRIX_CORES["cdna3"]).tolist() == c.tolist()


@pytest.mark.parametrize("count", [1, 3])
def test_the_number_of_threads_changes_nothing(count, rng):
    a, b = values(rng, (7, 64), E4M3FN, 0.1), values(rng, (9, 64), E5M2, 0.1)
    zero = np.zeros((7, 9), np.float32)
    with threads.using(count):
        got = tensor_core.chain(a, b, zero, E4M3FN, E5M2, MODELED["hopper_f16"])
    same(got, tensor_core.chain_plain(a, b, zero, E4M3FN, E5M2, MODELED["hopper_f16"]))
