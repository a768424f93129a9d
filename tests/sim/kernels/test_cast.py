"""The compiled casts against the plain ones, bit for bit."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from fp8ref.conformance.inputs import cast_inputs
from fp8ref.formats import FP8_FORMATS
from fp8ref.sim import philox, threads
from fp8ref.sim.quantize import cast
from fp8ref.spec.gemm import STOCHASTIC

fp8 = pytest.mark.parametrize("fmt", FP8_FORMATS.values(), ids=str)


@pytest.fixture(scope="module")
def bits():
    """Random bits of float32 (all exponents), numbers near every spacing of the formats, and
    specials.
    """
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 1 << 32, 1 << 17, dtype=np.uint64).astype(np.uint32).view(np.float32)
    scaled = (np.exp2(rng.uniform(-24, 18, 1 << 16)) * rng.choice([-1, 1], 1 << 16)).astype(
        np.float32
    )
    special = np.float32(
        [0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, 2.0**-126]
    )
    payloads = np.uint32([0x7F800001, 0xFFC00000, 0x7FFFFFFF, 0xFF800001]).view(np.float32)
    return np.concatenate([anything, scaled, special, payloads])


@pytest.mark.grid(2)
@fp8
@pytest.mark.parametrize("rounding", cast.ROUNDINGS)
@pytest.mark.parametrize("saturate", [True, False])
def test_equal_to_the_plain_function(bits, fmt, rounding, saturate):  # C-1 to C-6
    x = np.concatenate([bits, cast_inputs.edges(fmt)])
    options = {"rounding": rounding, "saturate": saturate} | (
        {"seed": 11} if rounding in STOCHASTIC else {}
    )
    np.testing.assert_array_equal(
        cast.encode(x, fmt, **options), cast.encode_plain(x, fmt, **options)
    )


@fp8
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("rounding", cast.ROUNDINGS[:4])
def test_narrower_inputs(fmt, dtype, rounding):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    np.testing.assert_array_equal(
        cast.encode(x, fmt, rounding=rounding), cast.encode_plain(x, fmt, rounding=rounding)
    )


@pytest.mark.grid(2)
@fp8
def test_the_second_draw_of_stochastic_rounding(fmt):  # C-2: about one element in 2^16 needs it
    x = np.random.default_rng(3).uniform(fmt.max / 4, fmt.max / 2, 1 << 21).astype(np.float32)
    codes = cast.encode(x, fmt, rounding="stochastic", seed=21)
    np.testing.assert_array_equal(codes, cast.encode_plain(x, fmt, rounding="stochastic", seed=21))
    spacing = np.exp2(np.floor(np.log2(x)) - fmt.mantissa_bits)
    fraction = np.floor(x / spacing % 1 * 2**16)
    undecided = fraction + philox.uniform48(0, x.size, 21) // 2.0**32 == 2**16 - 1
    assert undecided.sum() > 5
    # it goes both ways
    assert (
        0
        < (np.float32(spacing) * np.floor(x / spacing) != cast.decode(codes, fmt))[undecided].mean()
        < 1
    )


def test_random_numbers_follow_the_flat_index():  # C-2
    """Parts of an array in another memory order begin anywhere in a block of 4,096 random
    numbers.
    """
    x = np.random.default_rng(4).standard_normal((1000, 401)).astype(np.float32)
    options = {"rounding": "stochastic", "seed": 2**63 + 5}
    whole = cast.encode_plain(x, FP8_FORMATS["e4m3fn"], **options)
    np.testing.assert_array_equal(cast.encode(x, FP8_FORMATS["e4m3fn"], **options), whole)
    np.testing.assert_array_equal(
        cast.encode(np.asfortranarray(x), FP8_FORMATS["e4m3fn"], **options), whole
    )
    assert x.size > 1 << 18  # larger arrays are cut into parts


def test_threads_do_not_change_bits():
    x = np.random.default_rng(5).standard_normal(700_001).astype(np.float32)
    for options in ({}, {"rounding": "stochastic", "seed": 1}):
        results = []
        for count in (1, 2, 3):
            with threads.using(count):
                results.append(cast.encode(x, FP8_FORMATS["e5m2"], **options))
        assert all(np.array_equal(a, b) for a, b in itertools.pairwise(results))
