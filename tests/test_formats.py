import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8ref import formats
from fp8ref.formats import (
    BFLOAT16,
    E2M1FN,
    E2M3FN,
    E3M2FN,
    E3M4,
    E4M3,
    E4M3B11FNUZ,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0FNU,
    FLOAT16,
    FLOAT32,
    FORMATS,
    FP4_FORMATS,
    FP8_FORMATS,
    P3109_FORMATS,
    QUANTIZED_FORMATS,
    Format,
    by_name,
)

EIGHT_BITS = (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0FNU)
DTYPES = {
    **{f: np.dtype(getattr(ml_dtypes, f"float8_{f.name}")) for f in EIGHT_BITS},
    E2M1FN: np.dtype(ml_dtypes.float4_e2m1fn),
    E2M3FN: np.dtype(ml_dtypes.float6_e2m3fn),
    E3M2FN: np.dtype(ml_dtypes.float6_e3m2fn),
    E3M4: np.dtype(ml_dtypes.float8_e3m4),
    E4M3B11FNUZ: np.dtype(ml_dtypes.float8_e4m3b11fnuz),
    BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    FLOAT16: np.dtype(np.float16),
    FLOAT32: np.dtype(np.float32),
}
every_format = pytest.mark.parametrize("fmt", DTYPES, ids=str)


def value_of(code: int, fmt: Format) -> float:
    """What NumPy and ml_dtypes read in a code."""
    dtype = DTYPES[fmt]
    return float(np.array(code, f"u{dtype.itemsize}").view(dtype).astype(np.float64))


@pytest.mark.parametrize(
    ("fmt", "largest", "smallest_normal", "smallest_subnormal", "nan", "inf"),
    [
        (E4M3FN, 448.0, 2.0**-6, 2.0**-9, 0x7F, None),  # F-2
        (E5M2, 57344.0, 2.0**-14, 2.0**-16, 0x7F, 0x7C),  # F-2
        (E4M3FNUZ, 240.0, 2.0**-7, 2.0**-10, 0x80, None),  # F-3
        (E5M2FNUZ, 57344.0, 2.0**-15, 2.0**-17, 0x80, None),  # F-3
        (E8M0FNU, 2.0**127, 2.0**-127, 2.0**-127, 0xFF, None),  # F-4
        (E2M1FN, 6.0, 1.0, 0.5, 0x7, None),  # F-5
        (FLOAT16, 65504.0, 2.0**-14, 2.0**-24, 0x7FFF, 0x7C00),
        (FLOAT32, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, 0x7FFFFFFF, 0x7F800000),
    ],
    ids=str,
)
# F-1
def test_derived_numbers_are_those_of_the_specifications(
    fmt, largest, smallest_normal, smallest_subnormal, nan, inf
):
    assert (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal) == (
        largest,
        smallest_normal,
        smallest_subnormal,
    )
    assert (fmt.nan_code, fmt.inf_code) == (nan, inf)


@every_format
def test_derived_numbers_are_those_of_ml_dtypes(fmt):  # F-1
    info = ml_dtypes.finfo(DTYPES[fmt])
    expected = (
        info.bits,
        float(info.max),
        float(info.smallest_normal),
        float(info.smallest_subnormal),
    )
    assert (fmt.bits, fmt.max, fmt.smallest_normal, fmt.smallest_subnormal) == expected


@every_format
def test_max_code_is_the_last_finite_one(fmt):
    assert value_of(fmt.max_code, fmt) == fmt.max
    if fmt.nan in ("top_exponent", "top_code"):  # else the code after max is -0's
        assert not np.isfinite(value_of(fmt.max_code + 1, fmt))


@pytest.mark.parametrize("fmt", [f for f in DTYPES if f.bits < 32], ids=str)
def test_codes_up_to_max_code_ascend(fmt):
    values = (
        np.arange(fmt.max_code + 1, dtype=f"u{DTYPES[fmt].itemsize}")
        .view(DTYPES[fmt])
        .astype(np.float64)
    )
    assert np.isfinite(values).all()
    assert (np.diff(values) > 0).all()


@every_format
def test_special_codes_decode_to_what_they_are_named(fmt):  # C-5
    assert np.isnan(value_of(fmt.nan_code, fmt)) == fmt.has_nan
    assert fmt.has_nan or fmt.nan_code == fmt.max_code  # C-9
    if fmt.inf_code is not None:
        assert value_of(fmt.inf_code, fmt) == np.inf


@every_format
def test_a_format_without_inf_code_has_no_infinity_at_all(fmt):
    if fmt.bits <= 8:
        holds_infinity = any(np.isinf(value_of(code, fmt)) for code in range(1 << fmt.bits))
        assert holds_infinity == (fmt.inf_code is not None)
    else:
        assert fmt.inf_code is not None


@every_format
def test_sign_bit_negates(fmt):
    if fmt.signed:
        assert value_of(fmt.max_code | fmt.sign_bit, fmt) == -fmt.max
    else:
        assert fmt.sign_bit == 0


@every_format
def test_smallest_subnormal_is_the_first_positive_code(fmt):
    assert value_of(1 if fmt.signed else 0, fmt) == fmt.smallest_subnormal


@every_format
def test_emin_is_the_exponent_of_the_smallest_normal(fmt):
    smallest_normal = ml_dtypes.finfo(DTYPES[fmt]).smallest_normal
    assert 2.0**fmt.emin == float(smallest_normal)


def test_the_scale_format_is_no_operand_format():  # F-4
    assert set(FP8_FORMATS.values()) == {E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ}


def test_e2m1fn_holds_sixteen_numbers():  # F-5
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [value_of(code, E2M1FN) for code in range(16)] == [*numbers, *(-n for n in numbers)]
    assert (
        set(FP4_FORMATS.values())
        == {E2M1FN}
        == set(QUANTIZED_FORMATS.values()) - set(FP8_FORMATS.values())
    )


def test_formats_are_found_by_name():
    assert {name: fmt.name for name, fmt in FORMATS.items()} == {
        fmt.name: fmt.name for fmt in (*DTYPES, *P3109_FORMATS.values())
    }
    assert all(FORMATS[name] is FP8_FORMATS[name] for name in FP8_FORMATS)


def test_a_format_prints_as_its_name():
    assert f"{E4M3FN} {E5M2!r}" == "e4m3fn e5m2"


def test_formats_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        E4M3FN.bias = 8


def test_formats_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        Format("e3m4", 3, 4, 3, "ieee")


def test_a_new_format_is_data_alone():
    """Float8 E3M4 of ml_dtypes, IEEE-like: max 15.5, smallest normal 2^-2, infinity 0x70."""
    e3m4 = Format(name="e3m4", exponent_bits=3, mantissa_bits=4, bias=3)
    info = ml_dtypes.finfo(ml_dtypes.float8_e3m4)
    assert (e3m4.max, e3m4.smallest_normal, e3m4.smallest_subnormal) == (
        float(info.max),
        float(info.smallest_normal),
        float(info.smallest_subnormal),
    )
    assert e3m4.inf_code == 0x70


def test_p3109_has_every_precision_with_and_without_infinities():  # F-7
    """K = 8, precision P: bias 2^(7 - P); one NaN, at the code of -0; the top codes are Inf."""
    assert len(P3109_FORMATS) == 14
    for precision in range(1, 8):
        extended, finite = (P3109_FORMATS[f"binary8p{precision}s{domain}"] for domain in "ef")
        assert (extended.max_code, extended.inf_code, extended.nan_code) == (0x7E, 0x7F, 0x80)
        assert (finite.max_code, finite.inf_code, finite.nan_code) == (0x7F, None, 0x80)
        assert extended.emin == finite.emin == 1 - 2 ** (7 - precision)
        assert extended.bits == finite.bits == 8


def test_e4m3_is_a_format_but_its_name_is_refused():  # F-6
    """Who writes e4m3 means e4m3fn nearly always: the two differ above 240."""
    assert (E4M3.max, E4M3.inf_code) == (240, 0x78)
    assert by_name(E4M3) is E4M3
    with pytest.raises(ValueError, match=r"got 'e4m3'\. Did you mean 'e4m3fn'"):
        by_name("e4m3")


@pytest.mark.parametrize("fmt", [torch.float8_e4m3fn, "torch.float8_e4m3fn", "float8_e4m3fn"])
def test_a_dtype_names_its_format(fmt):
    assert formats.by_name(fmt) is formats.E4M3FN


def test_other_dtypes_name_theirs():
    assert formats.by_name(torch.float4_e2m1fn_x2) is formats.E2M1FN
    assert formats.by_name(np.dtype(ml_dtypes.float8_e8m0fnu)) is formats.E8M0FNU
