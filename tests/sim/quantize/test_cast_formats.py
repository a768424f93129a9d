"""Every format of at most 16 bits: all codes, and a million casts of each, against ml_dtypes, NumPy
and gfloat, none of which shares anything with the simulator.
"""

from fractions import Fraction

import gfloat
import ml_dtypes
import numpy as np
import pytest
from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e2m3, format_info_ocp_e3m2
from gfloat.formats import format_info_p3109 as p3109
from gfloat.types import Domain, Signedness

from fp8ref import formats
from fp8ref.conformance.inputs import cast_inputs
from fp8ref.formats import BFLOAT16, E4M3, FLOAT16, FORMATS, NARROW_FORMATS, P3109_FORMATS, Format
from fp8ref.sim.quantize import cast

CODED = [*(f for f in FORMATS.values() if f.bits <= 16), E4M3]
ML_DTYPES = {
    fmt: np.dtype(getattr(ml_dtypes, f"float{fmt.bits}_{fmt}"))
    for fmt in [*NARROW_FORMATS.values(), formats.E8M0FNU, E4M3]
    if fmt.name not in P3109_FORMATS
} | {BFLOAT16: np.dtype(ml_dtypes.bfloat16), FLOAT16: np.dtype(np.float16)}
GFLOAT = {
    f: p3109(8, f.mantissa_bits + 1, Signedness.Signed, domain)
    for f in P3109_FORMATS.values()
    for domain in [Domain.Extended if f.infinities else Domain.Finite]
} | {
    FORMATS["e2m1fn"]: format_info_ocp_e2m1,
    FORMATS["e2m3fn"]: format_info_ocp_e2m3,
    FORMATS["e3m2fn"]: format_info_ocp_e3m2,
}
MODES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
}


def codes(fmt: Format) -> np.ndarray:
    return np.arange(1 << fmt.bits).astype(cast.code_dtype(fmt))


def million(fmt: Format, seed: int = 0) -> np.ndarray:
    """2^20 float32: every number, tie and neighbor, infinities, NaNs and subnormals, any bits, and
    bits whose exponents are near the format's.
    """
    rng = np.random.default_rng(seed)
    # a format of 16 bits has too many numbers for edges
    with np.errstate(over="ignore"):
        edges = np.float32([np.inf, np.nan]) if fmt.bits > 8 else cast_inputs.edges(fmt)
    bits = rng.integers(0, 1 << 32, (1 << 20) - edges.size, dtype=np.uint32)
    n = bits.size // 3
    least = max(1, 127 + fmt.emin - fmt.mantissa_bits - 2)
    field = rng.integers(least, min(254, 129 + int(np.log2(fmt.max))), n, np.uint32)
    bits[:n] = bits[:n] & 0x807FFFFF | field << 23
    bits[n : n + 1000] &= 0x807FFFFF  # subnormals
    return np.concatenate([edges, -edges[:9], bits.view(np.float32)])[: 1 << 20]


def exact_value(code: int, fmt: Format) -> Fraction | str:
    """The value of a code by F-1, in fractions."""
    magnitude = code & ((1 << (fmt.exponent_bits + fmt.mantissa_bits)) - 1)
    field, mantissa = divmod(magnitude, 1 << fmt.mantissa_bits)
    negative, top = code != magnitude, (1 << fmt.exponent_bits) - 1
    last = mantissa == (1 << fmt.mantissa_bits) - 1
    nan = {
        "top_exponent": field == top and (mantissa > 0 or not fmt.infinities),
        "top_code": field == top and last,
        "negative_zero": negative and magnitude == 0,
        None: False,
    }
    infinite = {"top_exponent": field == top, "negative_zero": field == top and last}
    if nan[fmt.nan]:
        return "nan"
    if fmt.infinities and infinite[fmt.nan]:
        return "-inf" if negative else "inf"
    scale = Fraction(2) ** ((max(field, 1) if fmt.signed else field) - fmt.bias)
    hidden = 0 if fmt.signed and field == 0 else 1
    value = scale * (hidden + Fraction(mantissa, 1 << fmt.mantissa_bits))
    return -value if negative else value


@pytest.mark.parametrize("fmt", CODED, ids=str)
def test_every_code_is_its_fraction(fmt):  # F-1 to F-7
    ours = cast.decode(codes(fmt), fmt)
    for code in codes(fmt).tolist()[:: max(1, (1 << fmt.bits) // 4096)]:
        value = exact_value(code, fmt)
        assert str(ours[code]) == value if isinstance(value, str) else ours[code] == value, code
    zeros = ours == 0
    assert np.signbit(ours[zeros]).tolist() == [False, True][: zeros.sum()]
    assert zeros.sum() == fmt.signed + fmt.negative_zero


@pytest.mark.parametrize("fmt", ML_DTYPES, ids=str)
def test_every_code_has_ml_dtypes_value(fmt):  # F-1 to F-6
    theirs = codes(fmt).view(ML_DTYPES[fmt]).astype(np.float32)
    np.testing.assert_array_equal(cast.decode(codes(fmt), fmt), theirs)


@pytest.mark.parametrize("fmt", GFLOAT, ids=str)
def test_every_code_has_gfloats_value(fmt):  # F-5 to F-7
    theirs = [gfloat.decode_float(GFLOAT[fmt], code).fval for code in codes(fmt).tolist()]
    np.testing.assert_array_equal(cast.decode(codes(fmt), fmt), np.float32(theirs))


@pytest.mark.parametrize("fmt", CODED, ids=str)
def test_a_number_is_its_own_code(fmt):  # C-1
    kept = cast.canonical_nans(codes(fmt), fmt)
    number = np.isfinite(cast.decode(codes(fmt), fmt))
    for rounding in ("nearest_even", "nearest_away", "toward_zero"):
        again = cast.encode_plain(cast.decode(codes(fmt), fmt), fmt, rounding=rounding)
        np.testing.assert_array_equal(again[number], kept[number])


@pytest.mark.parametrize("fmt", ML_DTYPES, ids=str)
def test_a_million_casts_equal_ml_dtypes(fmt):  # C-1, C-2, C-4, C-6, C-7, C-9
    x = million(fmt)
    with np.errstate(all="ignore"):
        theirs = x.astype(ML_DTYPES[fmt]).view(cast.code_dtype(fmt))
    ours = cast.encode(x, fmt, saturate=not fmt.has_nan)
    known = ~np.isnan(x) | fmt.has_nan  # a format without NaN has no code for it (C-9)
    if not fmt.signed:  # ml_dtypes 0.6 rounds up all between 2^-127 and 2^-126
        known &= ~((x > 2.0**-127) & (x < 2.0**-126))
    np.testing.assert_array_equal(ours[known], cast.canonical_nans(theirs, fmt)[known])


@pytest.mark.parametrize("fmt", GFLOAT, ids=str)
def test_a_million_casts_equal_gfloat(fmt):  # C-1 to C-6
    x, info = million(fmt), GFLOAT[fmt]
    np.testing.assert_array_equal(cast.encode(x, fmt), cast.encode_plain(x, fmt))  # compiled
    x = cast.exact(x if fmt.has_nan else x[~np.isnan(x)])
    parts = np.array_split(x, 2 * len(MODES))  # gfloat takes seconds for a million
    cases = [(r, s or not fmt.has_nan) for r in MODES for s in (True, False)]
    for part, (rounding, saturate) in zip(parts, cases, strict=True):
        theirs = gfloat.round_ndarray(info, part, MODES[rounding], sat=saturate)
        theirs = gfloat.encode_ndarray(info, theirs).astype(np.uint8)
        ours = cast.encode_plain(part, fmt, rounding=rounding, saturate=saturate)
        np.testing.assert_array_equal(ours, theirs, err_msg=f"{rounding} {saturate}")
