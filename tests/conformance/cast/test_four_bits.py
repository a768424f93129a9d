"""Casts to e2m1fn and to other formats than FP8's, of libraries and with planted faults, through
``identify_cast``.
"""

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8ref.conformance import identify_cast
from fp8ref.conformance.kit.subject import ConformanceError
from fp8ref.formats import E2M1FN, FORMATS, FP8_FORMATS, NARROW_FORMATS
from fp8ref.sim.quantize import cast, packing


def by_ml_dtypes(x):
    with np.errstate(invalid="ignore"):
        return x.astype(ml_dtypes.float4_e2m1fn)


def by_torchao(x):
    from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked

    return f32_to_f4_unpacked(x)


def away(x):
    return cast.encode(x, E2M1FN, rounding="nearest_away")


def of(**options):
    return lambda x: cast.encode(x, E2M1FN, **options)


@pytest.mark.parametrize(
    ("function", "framework", "known", "packing"),
    [
        (by_ml_dtypes, "numpy", "ml_dtypes", "one a byte"),
        (by_torchao, "torch", "torchao_f4", "one a byte"),
        (lambda x: cast.encode(x, E2M1FN), "numpy", "saturating", "one a byte"),
        (lambda x: packing.pack(cast.encode(x, E2M1FN)), "numpy", "saturating", "low first"),
        (lambda x: cast.decode(cast.encode(x, E2M1FN), E2M1FN), "numpy", "saturating", "values"),
    ],
    ids=["ml_dtypes", "torchao", "sim", "packed", "values"],
)
def test_casts_are_identified(function, framework, known, packing):  # C-9, F-5
    outcome = identify_cast(function, E2M1FN, framework=framework, expect=known)
    assert (outcome.ok, outcome.named) == (True, True), outcome.message
    assert outcome.found["behavior"] == [known]
    assert outcome.found["packing"] == packing
    assert outcome.found["rounding"] == "nearest_even"


def high_first(x):
    pairs = packing.pack(cast.encode(x, E2M1FN))
    return pairs << np.uint8(4) | pairs >> np.uint8(4)


def wrong_tie(x):  # 5 lies between 4 and 6: to the even code, 4
    return np.where(
        np.abs(x) == 5, np.uint8(7) | (np.signbit(x) * np.uint8(8)), cast.encode(x, E2M1FN)
    ).astype(np.uint8)


def without_minus_zero(x):
    codes = cast.encode(x, E2M1FN)
    return np.where(codes == 8, np.uint8(0), codes)


@pytest.mark.parametrize("mode", ["nearest_away", "toward_zero", "to_odd"])
def test_another_rounding_is_named_and_has_no_name_of_a_library(mode):  # C-2
    outcome = identify_cast(of(rounding=mode), E2M1FN, framework="numpy")
    assert outcome.identified
    assert not outcome.named
    assert outcome.found["rounding"] == mode
    (wrong,) = identify_cast(
        of(rounding=mode), E2M1FN, framework="numpy", expect="saturating"
    ).differences
    assert wrong.clause == "C-2"
    x, nearest = np.float32(float(wrong.input)), cast.encode
    got = cast.decode(nearest(x, E2M1FN, rounding=mode), E2M1FN)
    assert wrong.got.endswith(f" = {got:g}")
    assert wrong.expected.endswith(f" = {cast.decode(nearest(x, E2M1FN), E2M1FN):g}")


def test_a_fault_is_shown_at_its_first_number():  # C-2, C-6
    outcome = identify_cast(wrong_tie, E2M1FN, framework="numpy")
    assert not outcome.ok
    assert not outcome.identified
    assert str(outcome.unlike[0]).startswith("5 (float32")
    assert "got 0x07 = 6, expected 0x06 = 4" in str(outcome.unlike[0])


def test_a_cast_that_loses_minus_zero_is_found_so():  # C-6
    outcome = identify_cast(without_minus_zero, E2M1FN, framework="numpy", expect="saturating")
    assert (outcome.ok, outcome.named) == (False, False)
    assert outcome.found["negative_zero"] == "lost"
    assert "got 0x00 = 0, expected 0x08 = -0 (C-6)" in str(outcome.differences[0])


def test_pairs_with_the_first_code_high_are_told_apart():  # F-5
    assert identify_cast(high_first, E2M1FN, framework="numpy").found["packing"] == "high first"


def test_stochastic_rounding_is_told_from_a_biased_one():  # C-2
    seeds = iter(range(100_000))
    fair = identify_cast(
        lambda x: cast.encode(x, E2M1FN, rounding="stochastic", seed=next(seeds)),
        E2M1FN,
        framework="numpy",
    )
    assert (fair.ok, fair.found["rounding"]) == (True, "stochastic"), fair.message
    up = np.float32(1 + 2.0**-5)  # rounds up more often than the fraction
    # of a number before 1
    with pytest.raises(ConformanceError, match=r"float32 1 .* gave 0x03 = 1.5, .* not a neighbor"):
        identify_cast(
            lambda x: cast.encode(x * up, E2M1FN, rounding="stochastic", seed=next(seeds)),
            E2M1FN,
            framework="numpy",
        )


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64])
def test_codes_of_any_integer_dtype(dtype):
    outcome = identify_cast(
        lambda x: by_ml_dtypes(x).view(np.uint8).astype(dtype), E2M1FN, framework="numpy"
    )
    assert outcome.ok
    assert outcome.found["rounding"] == "nearest_even"


def test_errors():
    with pytest.raises(ValueError, match="one of saturating, ml_dtypes, torchao_f4; got 'jax'"):
        identify_cast(away, E2M1FN, expect="jax")
    with pytest.raises(ValueError, match="exhaustive is of casts to FP8"):
        identify_cast(away, E2M1FN, exhaustive=True)
    with pytest.raises(ConformanceError, match=r"gives shape \[3\] .* a cast keeps the shape"):
        identify_cast(lambda x: np.zeros(3, np.uint8), E2M1FN, framework="numpy")
    with pytest.raises(ConformanceError, match="gives a code 16"):
        identify_cast(lambda x: np.full(x.shape, 16, np.uint8), E2M1FN, framework="numpy")
    with pytest.raises(ConformanceError, match="gives a code -1"):
        identify_cast(lambda x: np.full(x.shape, -1, np.int64), E2M1FN, framework="numpy")
    twice = identify_cast(lambda x: x * 2, E2M1FN, framework="numpy")
    assert not twice.identified
    assert (twice.unlike[0].got, twice.unlike[0].expected) == ("2", "1")
    other = identify_cast(by_ml_dtypes, E2M1FN, framework="numpy", expect="saturating")
    assert not other.ok
    assert "nan (float32 0x7FC00000): got 0x08 = -0, expected 0x07 = 6 (C-9)" in str(
        other.differences[0]
    )
    assert torch.tensor(0).dtype == torch.int64


def test_a_number_just_above_the_first_tie_is_asked():  # C-1, tt-metal#51971
    def function(x):
        return np.where(
            np.abs(x) == np.nextafter(np.float32(0.25), np.float32(1)),
            np.uint8(0),
            cast.encode(x, E2M1FN),
        )

    found = identify_cast(function, E2M1FN, expect="saturating")
    assert not found.ok
    assert "0.2500000" in found.message


@pytest.mark.parametrize("bits", [4, 8])
def test_few_random_bits_are_no_stochastic_rounding(bits):  # C-2
    rng = np.random.default_rng(1)

    def function(x):
        steps = np.clip(np.nan_to_num(np.abs(x) / 0.5), 0, 1)
        up = np.floor(steps * 2**bits) / 2**bits > rng.integers(0, 2**bits, x.shape) / 2**bits
        low = np.where(up, np.uint8(1), np.uint8(0)) | np.where(
            np.signbit(x), np.uint8(8), np.uint8(0)
        )
        return np.where(
            np.abs(x) < 0.5,
            low,
            cast.encode(x, E2M1FN, rounding="stochastic", seed=int(rng.integers(1 << 60))),
        ).astype(np.uint8)

    found = identify_cast(function, E2M1FN)
    assert not found.identified
    (unlike,) = found.unlike
    assert unlike.got.startswith("0x01 = 0.5 0.0")
    assert unlike.expected.startswith("0.001953")


def stochastic(x, codes=lambda low, other, x: other):
    """Codes rounded toward zero, and at random, from which another cast takes its own."""
    low, rng = cast.encode(x, E2M1FN, rounding="toward_zero"), np.random.default_rng()
    return codes(
        low, cast.encode(x, E2M1FN, rounding="stochastic", seed=int(rng.integers(1 << 60))), x
    ).astype(np.uint8)


PLANTED_STOCHASTIC = {
    "drops signs": lambda low, other, x: other & 7,
    "drops the sign of zero": lambda low, other, x: np.where(other == 8, 0, other),
    "all above 0.5 is zero": lambda low, other, x: np.where(np.abs(x) > 0.5, low & 8, other),
    "toward zero above 0.5": lambda low, other, x: np.where(np.abs(x) > 0.5, low, other),
    "negative numbers toward zero": lambda low, other, x: np.where(x < 0, low, other),
    "toward zero from 2 to 3": lambda low, other, x: np.where(np.abs(low % 8) == 4, low, other),
    "one too far": lambda low, other, x: np.where(
        (low % 8 == 5) & (other % 8 == 6), other + 1, other
    ),
}


NEITHER_NEIGHBOR = ("drops signs", "all above 0.5 is zero", "one too far")


@pytest.mark.parametrize("name", [n for n in PLANTED_STOCHASTIC if n not in NEITHER_NEIGHBOR])
def test_a_stochastic_cast_is_asked_for_all_numbers(name):  # C-2
    found = identify_cast(lambda x: stochastic(x, PLANTED_STOCHASTIC[name]), E2M1FN)
    if name == "drops the sign of zero":
        assert (found.ok, found.found["negative_zero"]) == (False, "lost")
        return
    assert (found.identified, found.found["rounding"]) == (False, None)
    assert found.unlike[0].clause == "C-2"


@pytest.mark.parametrize("name", NEITHER_NEIGHBOR)
def test_a_code_that_is_neither_neighbor_is_no_rounding(name):  # C-2
    with pytest.raises(ConformanceError, match="does not round stochastically"):
        identify_cast(lambda x: stochastic(x, PLANTED_STOCHASTIC[name]), E2M1FN)


@pytest.mark.parametrize("fmt", [f for f in NARROW_FORMATS if f not in FP8_FORMATS])
@pytest.mark.parametrize("options", [{}, {"rounding": "nearest_away"}, {"rounding": "to_odd"}])
def test_casts_to_other_formats_are_identified(fmt, options):  # C-2, C-8, F-6, F-7
    outcome = identify_cast(lambda x: cast.encode_plain(x, fmt, **options), fmt)
    rounding = options.get("rounding", "nearest_even")
    assert (outcome.identified, outcome.found["format"]) == (True, fmt)
    assert outcome.found["rounding"] == rounding
    assert outcome.found["behavior"] == (["saturating"] if not options else [])


@pytest.mark.parametrize("fmt", ["e2m3fn", "e3m2fn", "e3m4", "e4m3b11fnuz"])
def test_casts_of_ml_dtypes_are_named(fmt):
    dtype = getattr(ml_dtypes, f"float{FORMATS[fmt].bits}_{fmt}")
    outcome = identify_cast(lambda x: x.astype(dtype), fmt, expect="ml_dtypes", framework="numpy")
    assert (outcome.ok, outcome.named) == (True, True), outcome.message
    assert "ml_dtypes" in outcome.found["behavior"]


@pytest.mark.parametrize("fmt", ["e2m3fn", "e3m2fn"])
def test_casts_of_torchao_to_six_bits_are_named(fmt):
    from torchao.prototype.mx_formats import kernels

    function = getattr(kernels, f"f32_to_f6_{fmt.removesuffix('fn')}_unpacked")
    outcome = identify_cast(function, fmt, expect="torchao_f6", framework="torch")
    assert (outcome.ok, outcome.found["behavior"]) == (True, ["torchao_f6"]), outcome.message


def test_a_tie_of_precision_1_that_goes_away_is_shown():  # C-2, F-7
    """Its even code is by the exponent: 1.5 goes to 1, 3 to 4."""

    def away_from_zero(x):
        return cast.encode(x, "binary8p1se", rounding="nearest_away")

    (wrong,) = identify_cast(away_from_zero, "binary8p1se", expect="saturating").differences
    assert str(wrong).startswith("1.5 (float32 0x3FC00000): got 0x41 = 2, expected 0x40 = 1 (C-2)")


def test_an_infinity_of_p3109_is_found():  # C-4, F-7
    outcome = identify_cast(
        lambda x: cast.encode(x, "binary8p3se", saturate=False), "binary8p3se", expect="saturating"
    )
    assert outcome.found["behavior"] == ["non_saturating"]
    assert (outcome.found["inf_code"], outcome.found["overflow"]) == (0x7F, "inf")
    assert "expected 0x7E = 49152" in str(outcome.differences[0])
