"""One wrong number of 65,536 is found, and one NaN of them."""

import ml_dtypes
import numpy as np
import pytest

from fp8ref.conformance import identify_cast
from fp8ref.formats import E4M3FN
from fp8ref.sim.quantize import cast


def wrong_for(dtype, bits, code):
    def mine(x):
        codes = cast.encode(x, E4M3FN)
        if x.dtype == dtype:
            codes[x.view(np.uint16) == bits] = code
        return codes

    return mine


@pytest.mark.parametrize(
    ("dtype", "bits", "code", "said"),
    [
        (
            np.float16,
            0x3CCF,
            0x3B,
            "1.2021484375 (float16 0x3CCF): got 0x3B = 1.375, expected 0x3A = 1.25",
        ),
        (np.float16, 0x7C01, 0x00, "nan (float16 0x7C01): got 0x00 = 0, expected 0x7F = nan"),
        (
            ml_dtypes.bfloat16,
            0xFF81,
            0x80,
            "nan (bfloat16 0xFF81): got 0x80 = -0, expected 0x7F = nan",
        ),
    ],
)
def test_one_number_of_a_16_bit_dtype_is_found(dtype, bits, code, said):  # C-1, C-5
    found = identify_cast(wrong_for(dtype, bits, code), E4M3FN, expect="saturating")
    assert not found.ok
    assert said in found.message


def test_another_nan_code_for_a_payload_is_one_nan():  # C-5
    assert identify_cast(wrong_for(np.float16, 0x7C01, 0xFF), E4M3FN, expect="saturating").ok
