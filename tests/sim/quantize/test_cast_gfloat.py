"""Casts against gfloat, which shares nothing with the libraries of the backends: its roundings, in
float64, one number at a time or many.
"""

import numpy as np
import pytest
from gfloat import RoundMode, decode_float, encode_ndarray, round_ndarray
from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2, format_info_ocp_e8m0

from fp8ref.conformance.inputs import cast_inputs
from fp8ref.formats import E4M3FN, E5M2, E8M0FNU
from fp8ref.sim.quantize import cast

INFO = {
    "e4m3fn": format_info_ocp_e4m3,
    "e5m2": format_info_ocp_e5m2,
    "e8m0fnu": format_info_ocp_e8m0,
}
MODES = {
    "nearest_even": RoundMode.TiesToEven,
    "nearest_away": RoundMode.TiesToAway,
    "toward_zero": RoundMode.TowardZero,
}


def numbers(fmt) -> np.ndarray:
    """Finite float64: near every number and tie of the format, and with bits that float32 does not
    hold.
    """
    x = cast_inputs.edges(fmt).astype(np.float64)
    x = x[np.isfinite(x)]
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(4000) * 2.0 ** rng.integers(fmt.emin - 6, 18, 4000)
    return np.concatenate([x, x * (1 + 2.0**-45), x * (1 - 2.0**-45), wide])


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E8M0FNU], ids=str)
def test_every_code_has_gfloats_value(fmt):  # F-2, F-4
    ours = cast.decode(np.arange(256, dtype=np.uint8), fmt)
    np.testing.assert_array_equal(
        ours, np.float32([decode_float(INFO[fmt.name], code).fval for code in range(256)])
    )


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("rounding", MODES)
def test_saturating_casts_from_float64(fmt, rounding):  # C-1, C-2, C-3, C-6
    x, info = numbers(fmt), INFO[fmt.name]
    expected = encode_ndarray(info, round_ndarray(info, x, MODES[rounding], sat=True)).astype(
        np.uint8
    )
    np.testing.assert_array_equal(cast.encode(x, fmt, rounding=rounding), expected)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away"])
def test_casts_that_overflow(fmt, rounding):  # C-4
    x, info = numbers(fmt), INFO[fmt.name]
    expected = encode_ndarray(info, round_ndarray(info, x, MODES[rounding], sat=False)).astype(
        np.uint8
    )
    found = cast.encode(x, fmt, rounding=rounding, saturate=False)
    np.testing.assert_array_equal(found, cast.canonical_nans(expected, fmt))
    assert (found != cast.encode(x, fmt, rounding=rounding)).any()
