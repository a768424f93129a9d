"""Casts: monotone, odd, idempotent.

Each property on its domain, and next to it the least value where a wider claim is false.
"""

import numpy as np
import pytest
from hypothesis import strategies as st
from properties.domains import F32, caught, for_all, numbers, of_magnitude

from fp8ref.formats import BFLOAT16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0FNU, FLOAT16, FP8_FORMATS
from fp8ref.sim.quantize import cast
from fp8ref.spec.gemm import STOCHASTIC

CODES = np.arange(256, dtype=np.uint8)
FORMATS = list(FP8_FORMATS.values())
fp8 = pytest.mark.parametrize("fmt", FORMATS, ids=str)
each_rounding = pytest.mark.parametrize("rounding", cast.ROUNDINGS)
any_format = st.sampled_from(FORMATS)


def encode(x, fmt, rounding, saturate=True):
    return cast.encode(
        x, fmt, rounding=rounding, saturate=saturate, seed=5 if rounding in STOCHASTIC else None
    )


def rounded(x, fmt, rounding, saturate=True):
    return cast.decode(encode(x, fmt, rounding, saturate), fmt)


with_numbers = any_format.flatmap(lambda fmt: st.tuples(st.just(fmt), numbers(fmt), numbers(fmt)))


@pytest.mark.grid(2)
@each_rounding
@for_all(200, drawn=with_numbers)
def test_monotone(rounding, drawn):
    """All float32 but NaN, saturating; stochastic rounding at one element, by one random number
    (C-2, C-3).
    """
    fmt, x, y = drawn
    assert (
        rounded(np.minimum(x, y), fmt, rounding) <= rounded(np.maximum(x, y), fmt, rounding)
    ).all()


@each_rounding
@for_all(50, x=numbers(E5M2), y=numbers(E5M2))
def test_monotone_without_saturating_where_infinity_exists(rounding, x, y):
    """All float32 but NaN, e5m2 (C-4)."""
    assert (
        rounded(np.minimum(x, y), E5M2, rounding, False)
        <= rounded(np.maximum(x, y), E5M2, rounding, False)
    ).all()


@pytest.mark.parametrize(
    ("fmt", "last"),
    [
        (E4M3FN, 464),
        (E4M3FNUZ, np.nextafter(F32(248), F32(0))),
        (E5M2FNUZ, np.nextafter(F32(61440), F32(0))),
    ],
)
def test_not_monotone_without_saturating_where_it_does_not(fmt, last):
    """The least value that becomes NaN, and the one below it, which does not (C-4): the tie goes to
    max only where max is even.
    """
    assert rounded(F32(last), fmt, "nearest_even", False) == fmt.max
    assert np.isnan(rounded(np.nextafter(F32(last), F32(np.inf)), fmt, "nearest_even", False))


@fp8
def test_stochastic_rounding_is_not_monotone_between_elements(fmt):
    """Two elements have two random numbers: halfway may go up where five eighths of the way goes
    down (C-2).
    """
    low, high = cast.decode(CODES[[0x39, 0x3A]], fmt)
    x = np.array([low + 0.5 * (high - low), low + 0.625 * (high - low)], F32)
    y = cast.decode(cast.encode(x, fmt, rounding="stochastic", seed=0), fmt)
    assert y.tolist() == [high, low]


@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away", "toward_zero"])
@for_all(100, x=of_magnitude(2.0**-149, np.inf), y=of_magnitude(2.0**-149, np.inf))
def test_monotone_into_e8m0(rounding, x, y):
    """Positive float32, infinity included (C-7)."""
    x, y = abs(x), abs(y)
    assert (
        rounded(np.minimum(x, y), E8M0FNU, rounding) <= rounded(np.maximum(x, y), E8M0FNU, rounding)
    ).all()


def test_not_monotone_into_e8m0_from_zero():
    """Zero has no code, though everything above it has (C-7)."""
    assert np.isnan(rounded(F32(0), E8M0FNU, "nearest_even"))
    assert rounded(F32(2.0**-149), E8M0FNU, "nearest_even") == 2.0**-127


@pytest.mark.grid(3)
@each_rounding
@pytest.mark.parametrize("saturate", [True, False])
@for_all(100, drawn=with_numbers)
def test_odd(rounding, saturate, drawn):
    """All float32 but NaN, in value; in codes wherever the result is neither NaN nor a zero of a
    fnuz format (C-5, C-6).
    """
    fmt, x, _ = drawn
    plus, minus = encode(x, fmt, rounding, saturate), encode(-x, fmt, rounding, saturate)
    np.testing.assert_array_equal(cast.decode(minus, fmt), -cast.decode(plus, fmt))
    signed = ~np.isnan(cast.decode(plus, fmt)) & (fmt.negative_zero | (plus != 0))
    np.testing.assert_array_equal(minus[signed], (plus ^ fmt.sign_bit)[signed])


@pytest.mark.parametrize("fmt", [E4M3FNUZ, E5M2FNUZ], ids=str)
def test_not_odd_in_codes_without_a_negative_zero(fmt):
    """The least counterexample is zero itself; its flipped sign bit would be NaN (C-6)."""
    assert cast.encode(F32(-0.0), fmt) == cast.encode(F32(0), fmt) == 0
    assert np.isnan(cast.decode(np.uint8(0 ^ fmt.sign_bit), fmt))


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("fmt", [*FORMATS, E8M0FNU], ids=str)
def test_idempotent_on_codes(fmt, saturate, monkeypatch):
    """All 256 codes: finite ones, and infinities unless saturating, come back; of NaNs the emitted
    one does (C-2, C-5). By the kernels' plain twins, whose bits sim/kernels/test_cast.py compares.
    """
    monkeypatch.delenv("FP8REF_COMPILE", raising=False)
    values = cast.decode(CODES, fmt)
    kept = CODES[~(np.isinf(values) & saturate)]
    for rounding in (
        cast.ROUNDINGS if fmt.signed else ("nearest_even", "nearest_away", "toward_zero")
    ):
        np.testing.assert_array_equal(
            encode(cast.decode(kept, fmt), fmt, rounding, saturate), cast.canonical_nans(kept, fmt)
        )


def test_not_idempotent_on_every_code():
    """Saturating takes e5m2's infinity to max, and its NaN 0x7D becomes 0x7F (C-3, C-5)."""
    np.testing.assert_array_equal(
        cast.encode(cast.decode(CODES[[0x7B, 0x7C, 0x7D]], E5M2), E5M2), [0x7B, 0x7B, 0x7F]
    )


@each_rounding
@pytest.mark.parametrize("fmt", [*FORMATS, BFLOAT16, FLOAT16], ids=str)
@for_all(20, x=numbers(E5M2))
def test_rounding_twice_is_rounding_once(fmt, rounding, x):
    """All float32 but NaN, saturating; under any second rounding (C-2)."""
    options = {
        "rounding": rounding,
        "saturate": True,
        "seed": 5 if rounding in STOCHASTIC else None,
    }
    once = cast.round_to(x, fmt, **options)
    for again in cast.ROUNDINGS[:4]:
        np.testing.assert_array_equal(cast.round_to(once, fmt, rounding=again), once)
    np.testing.assert_array_equal(cast.round_to(once, fmt, **options), once)


def downwards(x, fmt, **options):
    """A planted rounding toward minus infinity."""
    codes = true_encode(x, fmt, rounding="toward_zero")
    inexact = (cast.decode(codes, fmt) != x) & (x < 0) & (codes & 0x7F < fmt.max_code)
    return codes + inexact.astype(np.uint8)


def wrapping(x, fmt, **options):
    """A planted overflow into NaN or infinity, whatever was asked."""
    return true_encode(x, fmt, **{**options, "saturate": False})


def flushing(x, fmt, **options):
    """A planted flush of subnormals to zero."""
    return np.where(abs(x) < fmt.smallest_normal, np.uint8(0), true_encode(x, fmt, **options))


true_encode = cast.encode


def test_planted_faults_are_caught(monkeypatch):
    monkeypatch.setattr(cast, "encode", wrapping)
    assert caught(test_monotone, rounding="nearest_even")
    monkeypatch.setattr(cast, "encode", downwards)
    assert caught(test_odd, rounding="nearest_even", saturate=True)
    monkeypatch.setattr(cast, "encode", flushing)
    with pytest.raises(AssertionError):
        test_idempotent_on_codes(E4M3FN, True, monkeypatch)
