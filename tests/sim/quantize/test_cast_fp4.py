"""Casts to e2m1fn, against ml_dtypes, torchao and their definition."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8ref.conformance.inputs import cast_inputs
from fp8ref.formats import E2M1FN, FLOAT32
from fp8ref.sim import philox
from fp8ref.sim.quantize import cast
from fp8ref.spec.gemm import STOCHASTIC


@pytest.fixture(scope="module")
def numbers():
    """Random bits of float32 of all exponents, numbers within the range, ties with their neighbors;
    no NaN.
    """
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 1 << 32, 1 << 17, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate(
        [anything, rng.standard_normal(1 << 16).astype(np.float32) * 3, cast_inputs.edges(E2M1FN)]
    )
    return x[~np.isnan(x)]


def test_codes_are_those_of_ml_dtypes_and_torchao(numbers):  # F-5, C-2, C-9
    from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked

    codes = cast.encode(numbers, E2M1FN)
    np.testing.assert_array_equal(codes, numbers.astype(ml_dtypes.float4_e2m1fn).view(np.uint8))
    np.testing.assert_array_equal(codes, f32_to_f4_unpacked(torch.from_numpy(numbers)).numpy())
    every = np.arange(16, dtype=np.uint8)
    np.testing.assert_array_equal(
        cast.decode(every, E2M1FN), every.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    )
    np.testing.assert_array_equal(cast.encode(cast.decode(every, E2M1FN), E2M1FN), every)


@pytest.mark.parametrize("rounding", cast.ROUNDINGS)
def test_compiled_codes_are_the_plain_ones(numbers, rounding):  # C-2
    x = np.concatenate([numbers, np.float32([np.nan, -np.nan])])
    options = {"rounding": rounding} | ({"seed": 5} if rounding in STOCHASTIC else {})
    np.testing.assert_array_equal(
        cast.encode(x, E2M1FN, **options), cast.encode_plain(x, E2M1FN, **options)
    )


def test_nan_becomes_the_largest_number_and_infinities_saturate():  # C-9
    np.testing.assert_array_equal(
        cast.encode(np.float32([np.nan, np.inf, -np.inf, 1e9, -0.0, -0.25]), E2M1FN),
        [7, 7, 15, 7, 8, 8],
    )
    np.testing.assert_array_equal(cast.encode(np.copysign(np.float32(np.nan), -1), E2M1FN), 7)
    np.testing.assert_array_equal(
        cast.canonical_nans(np.arange(16, dtype=np.uint8), E2M1FN), np.arange(16)
    )
    assert cast.round_to(np.float32(7), E2M1FN, saturate=True) == 6


def test_stochastic_rounding_is_unbiased():  # C-2
    x = np.repeat(np.float32([0.1, 0.6, 1.3, 2.2, 3.9, 5.5, -4.5]), 1 << 16)
    mean = (
        cast.decode(cast.encode(x, E2M1FN, rounding="stochastic", seed=3), E2M1FN)
        .reshape(7, -1)
        .mean(axis=1, dtype=np.float64)
    )
    # Standard deviation of one draw: at most half the spacing, 1; of the mean of 2^16: 2^-8. Five
    # of these.
    np.testing.assert_allclose(mean, x[:: 1 << 16], atol=5 * 2.0**-8)


def test_eight_random_bits_round_up_by_the_fraction_cut_to_eight_bits():  # C-2
    x = np.float32([1 + 2.0**-10, 1 + 2.0**-9, 1.25, 1 + 255 / 512]).repeat(1 << 16)
    codes = cast.encode(x, E2M1FN, rounding="stochastic_8", seed=3).reshape(4, -1)
    random = np.floor(philox.uniform48(0, x.size, 3) / 2.0**40).reshape(4, -1)
    fraction = np.array([0, 1, 128, 255])[:, None]  # of 256: the first is below 1
    np.testing.assert_array_equal(codes, np.where(fraction + random > 255, 3, 2))
    assert (codes[0] == 2).all()
    assert 0 < (codes[1] == 3).mean() < 2.0**-6


def test_errors():
    for call, message in (
        (lambda: cast.encode(np.ones(2, np.float32), E2M1FN, saturate=False), "so casts saturate"),
        (lambda: cast.round_to(np.ones(2, np.float32), E2M1FN), "so casts saturate"),
        (
            lambda: cast.encode(np.ones(2, np.float32), FLOAT32),
            "formats of at most 16 bits; got float32. Use round_to",
        ),
        (lambda: cast.decode(np.uint8([16]), E2M1FN), "at most 15; got 16. Unpack pairs"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
