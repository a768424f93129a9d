"""CUDA's own header on the host, compiled here, against the simulator: every bfloat16 and float16
input.
"""

import importlib.util

import numpy as np
import pytest

from fp8ref.conformance.inputs import dtypes
from fp8ref.conformance.libraries import cuda_header
from fp8ref.formats import E4M3FN, E4M3FNUZ, E5M2, E8M0FNU
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scales import scales_from_amax

pytestmark = pytest.mark.skipif(
    not cuda_header.available(), reason="cuda_fp8.hpp or a C++ compiler is not installed"
)

BITS = np.arange(1 << 16, dtype=np.uint16)


def values(source):
    return (
        (BITS.astype(np.uint32) << 16).view(np.float32)
        if source == "bfloat16"
        else BITS.view(np.float16).astype(np.float32)
    )


@pytest.mark.parametrize("source", ["bfloat16", "float16"])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2])
@pytest.mark.parametrize("saturate", [True, False])
def test_every_16_bit_input(source, fmt, saturate):  # C-1 to C-6
    found = cuda_header.encode_bits(BITS, source, fmt, saturate=saturate)
    # A negative overflow that does not saturate is the NaN with a sign; a NaN input never is (C-5).
    np.testing.assert_array_equal(
        cast.canonical_nans(found, fmt), cast.encode(values(source), fmt, saturate=saturate)
    )
    assert set(found[np.isnan(values(source))]) == {0x7F}


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2])
@pytest.mark.parametrize("saturate", [True, False])
def test_float32_inputs_at_random_and_near_ties(fmt, saturate):  # C-1 to C-6
    near = (
        (values("bfloat16").view(np.int32)[:, None] + np.array([-1, 0, 1]))
        .astype(np.int32)
        .view(np.float32)
        .ravel()
    )
    x = np.concatenate(
        [near, (dtypes.random(0, 1 << 18) >> np.uint64(32)).astype(np.uint32).view(np.float32)]
    )
    found = cast.canonical_nans(cuda_header.encode(x, fmt, saturate=saturate), fmt)
    np.testing.assert_array_equal(found, cast.encode(x, fmt, saturate=saturate))


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2])
def test_every_code_reads_back(fmt):  # F-1, F-2
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(
        cuda_header.decode(codes, fmt).astype(np.float32), cast.decode(codes, fmt)
    )


def test_e8m0_rounded_up_is_that_of_te_mxfp8_for_every_bfloat16_quotient():  # S-14
    """A sign is dropped, zero is code 0, a saturated infinity 2^127."""
    x = values("bfloat16")
    found = cuda_header.encode_e8m0(x, up=True, saturate=True)
    np.testing.assert_array_equal(found, cuda_header.encode_e8m0(np.abs(x), up=True, saturate=True))
    # An amax of 448 x has the quotient x, where that is a float32.
    with np.errstate(over="ignore", invalid="ignore"):
        amax = np.abs(x) * np.float32(448)
        exact = (amax.astype(np.float64) == np.abs(x).astype(np.float64) * 448) | ~np.isfinite(x)
    assert exact.sum() > 60_000
    for policy in ("te_mxfp8", "te_mxfp8_2.13"):
        np.testing.assert_array_equal(
            found[exact],
            cast.encode(scales_from_amax(amax[exact], E4M3FN, policy).scale_inv, E8M0FNU),
        )
    assert [int(code) for code in found[[0, 0x8000, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC0]]] == [
        0,
        0,
        127,
        128,
        254,
        254,
        255,
    ]


def test_e8m0_toward_zero_cuts_the_mantissa():
    x = np.abs(values("bfloat16"))
    normal = np.isfinite(x) & (x >= 2.0**-126)
    np.testing.assert_array_equal(
        cuda_header.encode_e8m0(x, up=False, saturate=True)[normal], x[normal].view(np.uint32) >> 23
    )


def test_what_it_does_not_cast():
    with pytest.raises(ValueError, match="e4m3fn and e5m2; got uint16 as float16, e4m3fnuz"):
        cuda_header.encode_bits(BITS, "float16", E4M3FNUZ, saturate=True)
    with pytest.raises(ValueError, match="decodes uint8 codes"):
        cuda_header.decode(BITS, E5M2)


def test_no_header_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cuda_header, "Path", lambda *parts: __import__("pathlib").Path("/nowhere"))
    assert not cuda_header.available()
    with pytest.raises(cuda_header.NoHeaderError, match=r"pip install 'fp8ref\[cuda\]'"):
        cuda_header.include_folders()


def test_one_number_of_no_dimension():
    one = np.array(1.5, np.float32)
    code = cuda_header.encode_bits(one, "float32", E4M3FN, saturate=True)
    assert (code.shape, cuda_header.decode(code, E4M3FN).shape) == ((), ())
    assert cuda_header.encode_e8m0(one, up=True, saturate=True).shape == ()
