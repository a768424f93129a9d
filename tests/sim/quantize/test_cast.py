import dataclasses
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8ref.conformance.inputs import cast_inputs
from fp8ref.formats import (
    BFLOAT16,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0FNU,
    FLOAT16,
    FLOAT32,
    FP8_FORMATS,
    Format,
)
from fp8ref.sim import philox
from fp8ref.sim.quantize import cast

MLDTYPES = {name: getattr(ml_dtypes, f"float8_{name}") for name in (*FP8_FORMATS, "e8m0fnu")}
CODES = np.arange(256, dtype=np.uint8)
FLOAT64 = Format(name="float64", exponent_bits=11, mantissa_bits=52, bias=1023)
TF32 = Format(name="tf32", exponent_bits=8, mantissa_bits=10, bias=127)
E2M1 = Format(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1)
fp8 = pytest.mark.parametrize("fmt", FP8_FORMATS.values(), ids=str)


def all_patterns(dtype) -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def ml_encode(x: np.ndarray, fmt) -> np.ndarray:
    with np.errstate(all="ignore"):
        return cast.canonical_nans(x.astype(MLDTYPES[fmt.name]).view(np.uint8), fmt)


@pytest.mark.parametrize("fmt", [*FP8_FORMATS.values(), E8M0FNU], ids=str)
def test_decode_equals_ml_dtypes_on_every_code(fmt):  # F-2, F-3, F-4
    cast._table.cache_clear()  # built here, not taken from an earlier test
    np.testing.assert_array_equal(
        cast.decode(CODES, fmt), CODES.view(MLDTYPES[fmt.name]).astype(np.float32)
    )


@fp8
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_encode_equals_ml_dtypes_on_every_16_bit_input(fmt, dtype):  # C-1, C-4
    x = all_patterns(dtype)
    np.testing.assert_array_equal(
        cast.encode(x, fmt, saturate=False), ml_encode(x.astype(np.float32), fmt)
    )


@fp8
def test_encode_equals_ml_dtypes_at_every_tie_and_its_neighbors(fmt):  # C-2
    x = cast_inputs.edges(fmt)
    np.testing.assert_array_equal(cast.encode(x, fmt, saturate=False), ml_encode(x, fmt))


@fp8
def test_encode_equals_ml_dtypes_on_float32(fmt):
    """A stride through all 2^32 patterns: 4,294,968 of them."""
    x = np.arange(0, 1 << 32, 1000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(cast.encode(x, fmt, saturate=False), ml_encode(x, fmt))


@pytest.mark.parametrize("fmt", [*FP8_FORMATS.values(), E8M0FNU], ids=str)
def test_encode_undoes_decode(fmt):
    np.testing.assert_array_equal(
        cast.encode(cast.decode(CODES, fmt), fmt, saturate=False), cast.canonical_nans(CODES, fmt)
    )


def test_float64_is_rounded_once():  # C-1: through float32 this is 17, a tie, and goes to 16
    x = np.array(17 + 2.0**-40)
    assert cast.decode(cast.encode(x, E4M3FN), E4M3FN) == 18
    assert cast.decode(cast.encode(x.astype(np.float32), E4M3FN), E4M3FN) == 16


@fp8
def test_saturation(fmt):  # C-3, C-4
    x = np.array([fmt.max * 1.2, -fmt.max * 1.2, np.inf, -np.inf, 1e30])
    saturated = cast.decode(cast.encode(x, fmt), fmt)
    np.testing.assert_array_equal(saturated, [fmt.max, -fmt.max, fmt.max, -fmt.max, fmt.max])
    over = np.inf if fmt is E5M2 else np.nan
    np.testing.assert_array_equal(
        np.abs(cast.decode(cast.encode(x, fmt, saturate=False), fmt)), np.full(5, over)
    )


@fp8
@pytest.mark.parametrize("rounding", ["toward_zero", "to_odd"])
def test_directed_roundings_do_not_overflow_from_finite_values(fmt, rounding):  # C-4
    x = np.array([fmt.max * 1.9, -1e30, np.inf])
    y = cast.decode(cast.encode(x, fmt, rounding=rounding, saturate=False), fmt)
    np.testing.assert_array_equal(y[:2], [fmt.max, -fmt.max])
    assert not np.isfinite(y[2])


def test_specials():  # C-5, C-6
    x = np.array([np.nan, -np.nan, 0.0, -0.0, 1e-30, -1e-30], np.float32)
    np.testing.assert_array_equal(cast.encode(x, E4M3FN), [0x7F, 0x7F, 0, 0x80, 0, 0x80])
    np.testing.assert_array_equal(cast.encode(x, E5M2), [0x7F, 0x7F, 0, 0x80, 0, 0x80])
    np.testing.assert_array_equal(cast.encode(x, E4M3FNUZ), [0x80, 0x80, 0, 0, 0, 0])
    np.testing.assert_array_equal(
        cast.canonical_nans(np.array([0x7D, 0x7E, 0xFE, 0xFF, 0x7C, 0xFC], np.uint8), E5M2),
        [127] * 4 + [124, 252],
    )


def test_names_of_formats():
    x = np.float32([1, np.nan])
    np.testing.assert_array_equal(cast.canonical_nans(np.uint8([0x38, 0xFF]), "e4m3fn"), [56, 127])
    np.testing.assert_array_equal(cast.codes_of(x, "e5m2"), cast.encode(x, E5M2))


def neighbors(x: float, fmt) -> tuple[float, float]:
    """The numbers of fmt around |x|, by search, with the one that would follow max."""
    numbers = np.sort(cast.decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt)).astype(
        np.float64
    )
    numbers = np.append(numbers, 2 * numbers[-1] - numbers[-2])
    above = np.searchsorted(numbers, abs(x), side="left")
    return numbers[above - 1] if numbers[above] != abs(x) else numbers[above], numbers[above]


@fp8
@given(x=st.floats(-400, 400))
def test_roundings_choose_between_neighbors(fmt, x):  # C-2
    if abs(x) > fmt.max:
        x = x / 2
    low, high = neighbors(x, fmt)
    got = {
        r: abs(float(cast.decode(cast.encode(np.array(x), fmt, rounding=r), fmt)))
        for r in cast.ROUNDINGS[:4]
    }
    assert got["toward_zero"] == low
    middle = (low + high) / 2
    expected = low if abs(x) < middle else high
    assert got["nearest_away"] == expected
    if abs(x) != middle:
        assert got["nearest_even"] == expected
    odd = [v for v in {low, high} if cast.encode(np.array(v), fmt) % 2 == 1]
    assert got["to_odd"] == (low if low == high else odd[0])


# 126 of the bfloat16 patterns (microxcaling rounds away)
def test_nearest_even_and_away_part_only_at_ties():
    x = all_patterns(ml_dtypes.bfloat16)
    finite = np.isfinite(x.astype(np.float32))
    differ = cast.encode(x, E4M3FN) != cast.encode(x, E4M3FN, rounding="nearest_away")
    assert differ[finite].sum() == 126


def test_stochastic_rounding_is_reproducible_unbiased_and_indexed():  # C-2
    x = np.full(1 << 18, 17.25)  # an eighth of the way from 16 to 18... 1.25 / 2 of it
    y = cast.decode(cast.encode(x, E4M3FN, rounding="stochastic", seed=3), E4M3FN)
    assert set(np.unique(y)) == {16.0, 18.0}
    # the mean of n draws of a two-point variable of width 2 and p = 0.625: six standard deviations
    assert abs(y.mean() - 17.25) < 6 * 2 * np.sqrt(0.625 * 0.375 / len(x))
    np.testing.assert_array_equal(
        y[:1001], cast.decode(cast.encode(x[:1001], E4M3FN, rounding="stochastic", seed=3), E4M3FN)
    )
    assert (y != cast.decode(cast.encode(x, E4M3FN, rounding="stochastic", seed=4), E4M3FN)).any()
    exact = cast.decode(np.arange(0x7F, dtype=np.uint8), E4M3FN)
    np.testing.assert_array_equal(
        cast.decode(cast.encode(exact, E4M3FN, rounding="stochastic", seed=0), E4M3FN), exact
    )


def test_stochastic_rounding_is_a_carry_of_the_fraction_and_the_random_number():  # C-2
    x = np.random.default_rng(1).uniform(16, 18, 5000)
    random = philox.uniform48(0, x.size, 9)
    carry = [
        int(Fraction(v - 16) / 2 * 2**48) + int(r) >= 2**48 for v, r in zip(x, random, strict=True)
    ]
    np.testing.assert_array_equal(
        cast.decode(cast.encode(x, E4M3FN, rounding="stochastic", seed=9), E4M3FN),
        np.where(carry, 18, 16),
    )


@pytest.mark.parametrize("exponent", [0, -3, -12, -20, -33])
# C-2: 48 bits, so also far below the spacing
def test_stochastic_rounding_of_tiny_numbers_is_unbiased(exponent):
    # in units of e4m3fn's smallest number: 1.375 * 2^exponent
    x = np.full(1 << 22, 1.375 * 2.0 ** (exponent - 9), np.float32)
    mean = (
        cast.decode(cast.encode(x, E4M3FN, rounding="stochastic", seed=3), E4M3FN).mean(
            dtype=np.float64
        )
        * 2.0**9
    )
    p = 1.375 * 2.0**exponent % 1
    # a mean of n draws: six standard deviations, and where fewer than one success is expected, the
    # few that chance allows (1e-9)
    bound = (
        6 * np.sqrt(p * (1 - p) / x.size) if p * x.size > 100 else (12 + 6 * p * x.size) / x.size
    )
    assert abs(mean - 1.375 * 2.0**exponent) <= bound


def test_e8m0():  # C-7
    x = np.array([1, 1.49, 1.5, 3, 2.0**-127, 2.0**-140, 0, -1, np.nan, np.inf, 3.4e38])
    np.testing.assert_array_equal(
        cast.encode(x, E8M0FNU), [127, 127, 128, 129, 0, 0, 255, 255, 255, 254, 254]
    )
    np.testing.assert_array_equal(cast.encode(x[-2:], E8M0FNU, saturate=False), [255, 255])
    np.testing.assert_array_equal(
        cast.encode(x[:4], E8M0FNU, rounding="toward_zero"), [127, 127, 127, 128]
    )


@pytest.mark.parametrize(
    ("fmt", "dtype"), [(BFLOAT16, ml_dtypes.bfloat16), (FLOAT16, np.float16)], ids=str
)
def test_round_to_equals_numpy(fmt, dtype, rng):
    x = np.concatenate(
        [
            rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32),
            np.float32([65519, 65520, 3.3961775e38, 0, -0.0]),
        ]
    )
    with np.errstate(all="ignore"):
        expected = x.astype(dtype).astype(np.float32)
    got = cast.round_to(x, fmt)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(
        np.signbit(got[~np.isnan(got)]), np.signbit(expected[~np.isnan(got)])
    )


@pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
def test_round_to_by_integers_equals_the_plain_function(fmt, rng):
    ties = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    bits = np.concatenate(
        [
            rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32),
            ties,
            ties - 1,
            ties + 1,
        ]
    )
    x = bits.view(np.float32)
    for shape in ((-1,), (4, -1), (2, 2, -1)):
        got, plain = (
            cast.round_to(x.reshape(shape), fmt),
            cast.round_to_plain(x.reshape(shape), fmt),
        )
        assert got.dtype == plain.dtype == np.float32
        np.testing.assert_array_equal(got, plain)
        np.testing.assert_array_equal(
            np.signbit(got)[~np.isnan(got)], np.signbit(plain)[~np.isnan(got)]
        )
    assert cast.round_to(np.float32(1 + 2**-9), fmt).shape == ()
    before = x.copy()
    cast.round_to(x, fmt)[:] = 0  # what it returns is its own
    np.testing.assert_array_equal(x.view(np.uint32), before.view(np.uint32))


@fp8
def test_round_to_an_8_bit_format_is_encode_and_decode(fmt, rng):
    x = (rng.standard_normal(500) * fmt.max).astype(np.float32)
    np.testing.assert_array_equal(
        cast.round_to(x, fmt), cast.decode(cast.encode(x, fmt, saturate=False), fmt)
    )
    for options in (
        {"saturate": True},
        {"rounding": "to_odd"},
        {"rounding": "stochastic", "seed": 2, "saturate": True},
    ):
        expected = cast.decode(cast.encode(x, fmt, **{"saturate": False, **options}), fmt)
        np.testing.assert_array_equal(cast.round_to(x, fmt, **options), expected)


@pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("rounding", cast.ROUNDINGS[1:4])
def test_other_roundings_to_wider_formats(fmt, rounding, rng):  # C-2, C-3, C-4
    """Against the two neighbors of each number, found by NumPy's nextafter from the nearest one."""
    dtype = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[fmt.name]
    x = np.concatenate(
        [
            rng.standard_normal(2000),
            rng.standard_normal(500) * 2.0**-15,
            [1 + 2.0**-8, -1 - 2.0**-11, 0.0, -0.0, 3.0],
        ]
    )
    x = x.astype(np.float32)
    nearest = x.astype(dtype)
    inward = np.where(
        abs(nearest.astype(np.float64)) > abs(x), np.nextafter(nearest, dtype(0)), nearest
    )
    outward = np.where(
        inward.astype(np.float32) == x,
        inward,
        np.nextafter(inward, np.copysign(np.float32(np.inf), x).astype(dtype)),
    )
    if rounding == "toward_zero":
        expected = inward
    elif rounding == "to_odd":
        expected = np.where(inward.view(np.uint16) % 2 == 1, inward, outward)
    else:
        a, b = (abs(x.astype(np.float64) - v.astype(np.float64)) for v in (inward, outward))
        expected = np.where(b <= a, outward, inward)
    got = cast.round_to(x, fmt, rounding=rounding)
    np.testing.assert_array_equal(got, expected.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


@pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
def test_overflow_of_wider_formats(fmt):  # C-3, C-4
    x = np.array([fmt.max * 1.5, -fmt.max * 1.5, np.inf, -np.inf, np.nan])
    inf = np.inf
    cases = {
        ("nearest_even", False): [inf, -inf, inf, -inf, np.nan],
        ("nearest_even", True): [fmt.max, -fmt.max, fmt.max, -fmt.max, np.nan],
        ("toward_zero", False): [fmt.max, -fmt.max, inf, -inf, np.nan],
        ("to_odd", False): [fmt.max, -fmt.max, inf, -inf, np.nan],
        ("to_odd", True): [fmt.max, -fmt.max, fmt.max, -fmt.max, np.nan],
        ("nearest_away", False): [inf, -inf, inf, -inf, np.nan],
    }
    for (rounding, saturate), expected in cases.items():
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(
                cast.round_to(x, fmt, rounding=rounding, saturate=saturate),
                np.array(expected, np.float32),
            )


def test_stochastic_rounding_to_bfloat16_follows_its_random_numbers(rng):  # C-2
    x = rng.uniform(1, 2, 3000)
    carry = [
        int(Fraction(v) * 128 % 1 * 2**48) + int(r) >= 2**48
        for v, r in zip(x, philox.uniform48(0, x.size, 6), strict=True)
    ]
    expected = (np.floor(x * 128) + carry) / 128
    np.testing.assert_array_equal(
        cast.round_to(x, BFLOAT16, rounding="stochastic", seed=6), expected.astype(np.float32)
    )
    assert not np.array_equal(
        cast.round_to(x, BFLOAT16, rounding="stochastic", seed=7), expected.astype(np.float32)
    )


def test_round_to_float32_equals_numpy(rng):
    x = rng.standard_normal(1 << 16) * 2.0 ** rng.integers(-160, 130, 1 << 16)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(cast.round_to(x, FLOAT32), x.astype(np.float32))


def layouts(x: np.ndarray) -> list[np.ndarray]:
    """The same values laid out differently, all read-only."""
    made = [
        x,
        np.asfortranarray(x),
        np.repeat(x, 2, axis=1)[:, ::2],
        x[::-1].copy()[::-1],
        np.moveaxis(np.moveaxis(x, 0, 1).copy(), 1, 0),
    ]
    for view in made:
        view.flags.writeable = False
    return made


@pytest.mark.grid(2)
@pytest.mark.parametrize("shape", [(6, 8), (1000, 700), (3, 300_001)])
@pytest.mark.parametrize(
    "options", [{}, {"rounding": "to_odd"}, {"rounding": "stochastic", "seed": 5}], ids=str
)
def test_any_layout_works_and_is_left_alone(rng, shape, options):
    x = rng.standard_normal(shape).astype(np.float32)
    expected = cast.encode_plain(x, E5M2, **options)
    for view in layouts(x):
        np.testing.assert_array_equal(cast.encode(view, E5M2, **options), expected)
        np.testing.assert_array_equal(
            cast.encode(view.astype(np.float64), E5M2, **options), expected
        )


def test_no_dimension_and_no_element():
    assert cast.encode(np.float32(1.5), E5M2).shape == ()
    assert cast.encode(1.5, E5M2, rounding="stochastic", seed=0).shape == ()
    assert cast.encode(np.zeros((0, 3), np.float32), E5M2).shape == (0, 3)
    assert cast.encode(np.zeros((3, 0), ml_dtypes.bfloat16)[:, ::2], E4M3FN).shape == (3, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cast.encode(np.arange(3), E4M3FN), "got int64"),
        (lambda: cast.encode(np.ones(3), FLOAT32), "round_to"),
        (lambda: cast.encode(np.ones(3), E4M3FN, rounding="nearest"), "nearest_even"),
        (
            lambda: cast.encode(np.ones(3), E4M3FN, rounding="stochastic"),
            "stochastic rounding needs a seed, others none",
        ),
        (
            lambda: cast.encode(np.ones(3), E4M3FN, seed=1),
            "stochastic rounding needs a seed, others none",
        ),
        (lambda: cast.encode(np.ones(3), E4M3FN, rounding="stochastic", seed=1.5), "integer.*1.5"),
        (lambda: cast.encode(np.ones(3), E4M3FN, rounding="stochastic", seed=-1), r"\[0, 2\^64\)"),
        (
            lambda: cast.encode(np.ones(3), E4M3FN, rounding="stochastic", seed=1 << 64),
            r"\[0, 2\^64\)",
        ),
        (lambda: cast.encode(np.ones(3), E4M3FN, rounding="stochastic", seed=True), "integer"),
        (lambda: cast.encode(np.ones(3), E8M0FNU, rounding="to_odd"), "C-7"),
        (lambda: cast.decode(np.ones(3), E4M3FN), "uint8"),
        (lambda: cast.decode(np.zeros(3, np.uint8), FLOAT16), "are uint16; got uint8"),
        (lambda: cast.decode(np.full(3, 64, np.uint8), "e2m3fn"), "at most 63; got 64"),
        (lambda: cast.decode(np.zeros(3, np.uint8), FLOAT32), "at most 16 bits; got float32"),
        (lambda: cast.encode(np.ones(3), "e4m3"), "got 'e4m3'. Did you mean 'e4m3fn'"),
        (lambda: cast.decode(np.zeros(3, np.uint8), 8), "fmt is a Format or one of .*; got 8"),
        (lambda: cast.canonical_nans(np.zeros(3, np.uint8), "e4m3"), "Did you mean 'e4m3fn'"),
        (lambda: cast.round_to(np.ones(3), "bfloat"), "Did you mean .bfloat16"),
        (lambda: cast.round_to(np.ones(3), FLOAT64), "in its range; got float64"),
        (
            lambda: cast.round_to(
                np.ones(3), Format(name="wide", exponent_bits=9, mantissa_bits=8, bias=255)
            ),
            "got wide",
        ),
        (
            lambda: cast.round_to(
                np.ones(3),
                Format(
                    name="z",
                    exponent_bits=5,
                    mantissa_bits=6,
                    bias=15,
                    nan="negative_zero",
                    infinities=False,
                ),
            ),
            "with -0",
        ),
        (
            lambda: cast.encode(torch.ones(3, dtype=torch.bfloat16), E4M3FN),
            "got Tensor .*BFloat16.*float.*numpy",
        ),
        (lambda: cast.encode(np.ones(3), E4M3FN, rounding=["nearest_even"]), "rounding is one of"),
        (lambda: cast.encode(np.ones(3, ">f8"), E4M3FN), "byte order; got '>f8'"),
    ],
)
def test_errors_name_requirement_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_e5m2fnuz_has_no_negative_zero():  # C-6
    assert cast.encode(np.float32(-1e-20), E5M2FNUZ) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_round_to_a_format_of_ones_own(dtype):
    """TF32, 1 + 10 mantissa bits, by NumPy's float16 where its exponents are the same; and four
    bits, by hand.
    """
    x = np.random.default_rng(0).uniform(1, 60000, 1000).astype(dtype)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(
            cast.round_to(x, TF32), x.astype(np.float16).astype(np.float32)
        )
    no_infinity = dataclasses.replace(
        TF32, name="tf32fn", nan="top_code", infinities=False, exponent_bits=5, bias=15
    )
    far = np.array([60000, np.inf, np.nan], dtype)
    # C-4
    np.testing.assert_array_equal(
        cast.round_to(far, no_infinity), np.float32([60000, np.nan, np.nan])
    )
    np.testing.assert_array_equal(
        cast.round_to(far, no_infinity, saturate=True), np.float32([60000, no_infinity.max, np.nan])
    )
    np.testing.assert_array_equal(
        cast.round_to(np.array([0.2, 0.25, 0.75, 1.2, 2.5, -2.6], dtype), E2M1),
        np.float32([0, 0, 1, 1, 2, -3]),
    )


@fp8
def test_codes_count_the_magnitudes_in_spacings(fmt):  # C-1, F-2
    """Every code follows from its value in spacings.

    Above max the count continues; infinities and NaNs give 0.
    """
    codes = np.arange(fmt.max_code + 1)
    n, exponent = cast.in_spacings(cast.decode(codes.astype(np.uint8), fmt).astype(np.float64), fmt)
    np.testing.assert_array_equal(n, cast.round_spacings(n, exponent, fmt, "nearest_even"))
    np.testing.assert_array_equal(cast.magnitude_codes(n, exponent, fmt), codes)
    n, exponent = cast.in_spacings(np.array([-2 * fmt.max, np.inf, np.nan]), fmt)
    np.testing.assert_array_equal(
        cast.magnitude_codes(n, exponent, fmt), [fmt.max_code + (1 << fmt.mantissa_bits), 0, 0]
    )


def test_masked_elements_are_refused():
    masked = np.ma.masked_array(np.float32([1, 500]), [False, True])
    for function in (
        lambda x: cast.encode(x, E4M3FN),
        lambda x: cast.round_to(x, BFLOAT16),
        cast.exact,
    ):
        with pytest.raises(ValueError, match="no masked arrays; got 1 masked"):
            function(masked)
    with pytest.raises(ValueError, match="no masked arrays"):
        cast.decode(np.ma.masked_array(np.uint8([1, 2]), [True, False]), E4M3FN)
    assert cast.encode(np.ma.masked_array(np.float32([1])), E4M3FN).tolist() == [0x38]


def test_saturate_is_a_truth_value():
    with pytest.raises(ValueError, match="saturate is True or False; got 'no'"):
        cast.encode(np.float32([500]), E4M3FN, saturate="no")
