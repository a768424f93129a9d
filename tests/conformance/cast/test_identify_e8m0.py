"""Casts to e8m0fnu of libraries, with planted faults and their right twins, through
``identify_cast``.
"""

from fractions import Fraction

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from fp8ref.conformance import identify_cast
from fp8ref.conformance.cast import e8m0, identify_e8m0
from fp8ref.conformance.kit.subject import ConformanceError
from fp8ref.conformance.libraries import cuda_header
from fp8ref.conformance.require import require_cast
from fp8ref.formats import E8M0FNU
from fp8ref.sim.quantize import cast

INPUTS = identify_e8m0.inputs("float32")


def by_onnx(x, mode="nearest", saturate=True):
    """What onnx 1.23's to_float8e8m0 gives, by float32's fields."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    field, mantissa = (bits >> 23 & 0xFF).astype(np.int64), bits & 0x7FFFFF
    tie_goes_up = field > 0
    up = {
        "nearest": (mantissa > 0x400000) | ((mantissa == 0x400000) & tie_goes_up),
        "up": mantissa > 0,
        "down": mantissa < 0,
    }[mode]
    code = field + up
    code = np.where((code == 255) & saturate, 254, code)
    return np.where(field == 255, 255, code).astype(np.uint8)


def by_cuda(mode, saturate):
    return lambda x: cuda_header.encode_e8m0(x, up=mode == "up", saturate=saturate)


LIBRARIES = {
    "saturating": ("numpy", lambda x: cast.encode(x, E8M0FNU)),
    "non_saturating": ("numpy", lambda x: cast.encode(x, E8M0FNU, saturate=False)),
    "toward_zero": ("numpy", lambda x: cast.encode(x, E8M0FNU, rounding="toward_zero")),
    "ml_dtypes": ("numpy", lambda x: x.astype(ml_dtypes.float8_e8m0fnu)),
    "jax": ("jax", lambda x: x.astype(jnp.float8_e8m0fnu)),
    "torch": ("torch", lambda x: x.to(torch.float8_e8m0fnu)),
    "onnx_nearest": ("numpy", by_onnx),
    "onnx_nearest_nosat": ("numpy", lambda x: by_onnx(x, saturate=False)),
    "onnx_up": ("numpy", lambda x: by_onnx(x, "up")),
    "onnx_up_nosat": ("numpy", lambda x: by_onnx(x, "up", saturate=False)),
    "onnx_down": ("numpy", lambda x: by_onnx(x, "down")),
}
CUDA = {
    f"cuda_{mode}{'' if saturate else '_nosat'}": ("numpy", by_cuda(mode, saturate))
    for mode in ("up", "zero")
    for saturate in (True, False)
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_casts_of_libraries_are_named(name):  # C-7, C-10
    framework, function = LIBRARIES[name]
    outcome = identify_cast(function, "e8m0fnu", framework=framework, expect=name)
    assert (outcome.ok, outcome.identified, outcome.named) == (True, True, True), outcome.message
    assert name in outcome.found["behavior"]
    assert outcome.found["format"] == "e8m0fnu"


@pytest.mark.parametrize("name", CUDA)
def test_casts_of_cuda_are_named(name):  # C-10
    try:
        cuda_header.version()
    except cuda_header.NoHeaderError as error:
        pytest.skip(str(error))
    outcome = identify_cast(CUDA[name][1], "e8m0fnu", framework="numpy", expect=name)
    assert outcome.ok, outcome.message
    assert name in outcome.found["behavior"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_no_other_name_passes(name):  # C-10
    """A cast passes as another name alone if the two are one behavior."""
    framework, function = LIBRARIES[name]
    known = e8m0.KNOWN_E8M0_CASTS
    for other in ("saturating", "toward_zero", "torch", "ml_dtypes", "onnx_up", "cuda_up"):
        outcome = identify_cast(function, "e8m0fnu", framework=framework, expect=other)
        assert outcome.ok == (known[name] == known[other]), (name, other)


def nearest(value: Fraction, up: str) -> int:
    """The code of a positive number, by fractions: a search of all codes."""
    powers = [Fraction(2) ** (code - 127) for code in range(255)]
    if up == "down":
        return max([code for code in range(255) if powers[code] <= value], default=0)
    if up == "up":
        return min([code for code in range(255) if powers[code] >= value], default=254)
    return min(range(255), key=lambda code: (abs(powers[code] - value), -code))


@pytest.mark.parametrize("rounding", ["nearest", "up", "down"])
def test_codes_are_those_of_fractions(rounding):  # C-7
    x = INPUTS[np.isfinite(INPUTS) & (INPUTS > 0)]
    x = np.concatenate([x[x < 2.0**-124], x[::101], x[-40:]])
    codes = e8m0.E8m0Behavior(rounding=rounding).encode(x)
    expected = [nearest(Fraction(float(v)), rounding) for v in x]
    np.testing.assert_array_equal(codes, expected)


def right(x):
    return cast.encode(x, E8M0FNU)


def is_tie(x):
    """Where x is 1.5 * 2^k, up to 2^127."""
    return (np.frexp(x.astype(np.float64))[0] == 0.75) & (x > 0) & (x < 2.0**127)


PLANTED = {
    "rounds log2": (
        lambda x: np.where(
            np.isfinite(x) & (x > 0),
            np.clip(np.rint(np.log2(np.maximum(x, 1e-45, dtype=np.float64))) + 127, 0, 254),
            right(x),
        ),
        ("rounding", "nearest_log2"),
        ("got 0x80 = 2, expected 0x7F = 1 (C-7)", 1.4375),
    ),
    "ties go down": (
        lambda x: right(x) - (is_tie(x) & (right(x) > 0)),
        ("rounding", "nearest_zero"),
        ("got 0x7F = 1, expected 0x80 = 2 (C-7)", 1.5),
    ),
    "ties to the even code": (
        lambda x: right(x) - (is_tie(x) & (right(x) % 2 == 1)),
        ("rounding", "nearest_even"),
        ("got 0x7E = 0.5, expected 0x7F = 1 (C-7)", 0.75),
    ),
    "zero is 2^-127": (
        lambda x: np.where(x == 0, 0, right(x)),
        ("zero", "least"),
        ("got 0x00 = 5.8774717541114375e-39, expected 0xFF = nan (C-7)", 0),
    ),
    "negative numbers lose their sign": (
        lambda x: np.where(x < 0, right(-x), right(x)),
        ("negative", "magnitude"),
        ("got 0x7F = 1, expected 0xFF = nan (C-7)", -1),
    ),
    "an infinity is NaN": (
        lambda x: np.where(np.isposinf(x), 255, right(x)),
        ("infinite", "nan"),
        ("got 0xFF = nan, expected 0xFE = 1.7014118346046923e+38 (C-3)", np.inf),
    ),
    "subnormals are flushed": (
        lambda x: np.where((x > 0) & (x < 2.0**-126), 255, right(x)),
        ("subnormals", "flushed"),
        ("got 0xFF = nan, expected 0x00 = 5.8774717541114375e-39 (C-7)", 2.0**-127),
    ),
    "fields of subnormals": (
        lambda x: np.where((x > 2.0**-127) & (x < 2.0**-126), 1, right(x)),
        ("subnormals", "by_field"),
        ("got 0x01 = 1.1754943508222875e-38, expected 0x00", 1.25 * 2.0**-127),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_decision_that_differs_is_shown_at_its_simplest_input(name):  # C-7
    planted, (decision, value), (words, at) = PLANTED[name]

    def function(x):
        with np.errstate(all="ignore"):
            return planted(np.asarray(x)).astype(np.uint8)

    outcome = identify_cast(function, "e8m0fnu", framework="numpy", expect="saturating")
    assert (outcome.ok, outcome.identified) == (False, True), outcome.message
    assert outcome.found[decision] == value
    assert outcome.found["behavior"] == []
    (shown,) = outcome.differences
    assert words in str(shown)
    assert float(shown.input) == at
    assert f"differs in {decision}" in identify_cast(function, "e8m0fnu").summary
    assert identify_cast(right, "e8m0fnu", expect="saturating").ok  # the twin


UNEXPLAINED = {
    "one too high below 2^-126": lambda x: right(x) + ((x > 0) & (x < 2.0**-126)).astype(np.uint8),
    "one too high at 3": lambda x: right(x) + (x == 3).astype(np.uint8),
    "NaN is 254": lambda x: np.where(np.isnan(x), 254, right(x)),
    "truncates above 2^100": lambda x: np.where(
        x > 2.0**100, cast.encode(x, E8M0FNU, rounding="toward_zero"), right(x)
    ),
    "a negative infinity is max": lambda x: np.where(np.isneginf(x), 254, right(x)),
}


@pytest.mark.parametrize("name", UNEXPLAINED)
def test_what_no_decision_explains_is_shown(name):  # C-7
    outcome = identify_cast(
        lambda x: UNEXPLAINED[name](x).astype(np.uint8), "e8m0fnu", framework="numpy"
    )
    assert not outcome.ok
    assert not outcome.identified
    assert "matches no known library" in outcome.summary
    assert outcome.unlike[0].clause in ("C-3", "C-5", "C-7")
    assert outcome.unlike[0].bits


def test_another_dtype_and_other_shapes_are_asked():
    def wrong_of_bfloat16(x):
        return right(x) if x.dtype == np.float32 else right(x) ^ (x == 8).astype(np.uint8)

    (unlike, *_) = identify_cast(wrong_of_bfloat16, "e8m0fnu", framework="numpy").unlike
    assert (unlike.dtype, unlike.input) == ("bfloat16", "8")
    found = identify_cast(lambda x: right(x) ^ (x.ndim == 3), "e8m0fnu", framework="numpy")
    assert "[3, 5, 17]" in str(found.unlike[0])


def test_errors():
    rng = np.random.default_rng()
    with pytest.raises(ConformanceError, match="does not repeat itself"):
        identify_cast(lambda x: right(x) ^ (rng.random(x.shape) < 0.5), "e8m0fnu")
    with pytest.raises(ValueError, match=r"one of saturating, .*cuda_up.*; got 'torchao_f4'"):
        identify_cast(right, "e8m0fnu", expect="torchao_f4")
    with pytest.raises(ValueError, match="exhaustive is of casts to FP8"):
        identify_cast(right, "e8m0fnu", exhaustive=True)
    with pytest.raises(ConformanceError, match=r"float8_e4m3fn .*uint8 or float8_e8m0fnu, "):
        identify_cast(lambda x: x.astype(ml_dtypes.float8_e4m3fn), "e8m0fnu", framework="numpy")


def test_values_are_read_too():
    outcome = identify_cast(
        lambda x: cast.decode(right(x), E8M0FNU), "e8m0fnu", expect="saturating", framework="numpy"
    )
    assert (outcome.ok, outcome.found["gives"]) == (True, "float32")
    same = identify_cast(lambda x: x, "e8m0fnu", framework="numpy")
    assert not same.identified
    with pytest.raises(AssertionError, match="codes of e8m0fnu differ"):
        require_cast(INPUTS, by_onnx(INPUTS), "e8m0fnu")


def exponents(x, codes):
    """Codes of numbers, cut to the format's; 255 of NaN."""
    codes = np.clip(np.nan_to_num(codes, posinf=254, neginf=0), 0, 254)
    return np.where(np.isnan(x), 255, codes).astype(np.uint8)


def of_fields(x, added, bias=127, kept=0x7FFFFFFF):
    """The exponent of |x| after ``added`` was added to the bits of it that are kept."""
    bits = x.astype(np.float32).view(np.uint32) & np.uint32(kept)
    return exponents(x, (bits + np.uint32(added) >> 23).astype(np.int64) + bias - 127)


def log2_of(x, dtype=np.float64):
    with np.errstate(all="ignore"):
        return np.log2(np.abs(x).astype(np.float64)).astype(dtype).astype(np.float64)


NUMBERS = {
    "two is subtracted from exponents": (
        lambda x: of_fields(x, 0, bias=125),
        "rounds down (the bias of stored exponents is 125, not 127)",
    ),
    "three is added to nearest exponents": (
        lambda x: of_fields(x, 0x400000, bias=130),
        "rounds nearest (the bias of stored exponents is 130, not 127)",
    ),
    "rounding up": (lambda x: of_fields(x, 0x7FFFFF), None),
    "low bits are cut before rounding up": (
        lambda x: of_fields(x, 0x7FFFFF, kept=0x7FFF0000),
        "rounds up (it reads the fraction bits 0x7F0000 alone)",
    ),
    "ties are at 1.75": (
        lambda x: of_fields(x, 0x200000),
        "rounds nearest (its tie is 1.75 of a power of two, not 1.5)",
    ),
    "ceil of log2 in float32": (
        lambda x: exponents(x, np.ceil(log2_of(x, np.float32)) + 127),
        "rounds up (log2 is rounded to float32 first)",
    ),
    "round of log2 in float16": (
        lambda x: exponents(x, np.rint(log2_of(x, np.float16)) + 127),
        "rounds nearest_log2 (log2 is rounded to float16 first)",
    ),
    "trunc of log2": (lambda x: exponents(x, np.trunc(log2_of(x)) + 127), "rounds toward_one"),
    "log2 away from zero": (
        lambda x: exponents(x, np.copysign(np.ceil(np.abs(log2_of(x))), log2_of(x)) + 127),
        "rounds away_from_one",
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_a_rounding_is_solved(name):  # C-7
    function, words = NUMBERS[name]
    outcome = identify_cast(function, "e8m0fnu", framework="numpy", expect="ocp_floor")
    assert not outcome.ok
    if words is None:  # all fraction bits are read: no number is other than it should be
        assert "(" not in outcome.summary
    else:
        assert words in outcome.summary, outcome.message
