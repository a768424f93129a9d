"""Kernels of casts, interpreted, give NumPy's codes and amaxes."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")

from fp8ref.kernels import casts
from fp8ref.kernels.jit import interpret


@pytest.mark.parametrize("e5m2", [False, True])
def test_codes_of_all_bfloat16_numbers_in_both_orders(e5m2):
    x = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256)
    scale = np.float32([3.1415927])
    launch = casts.cast(x.shape, (256, 1), e5m2=e5m2)
    codes, transposed = np.zeros((2, 256, 256), np.uint8)
    amaxes = np.zeros(launch.programs, np.int32)
    arrays = [x, scale, codes, transposed, amaxes]
    interpret(launch, arrays, [str(array.dtype) for array in arrays])
    dtype, largest = (ml_dtypes.float8_e5m2, 57344) if e5m2 else (ml_dtypes.float8_e4m3fn, 448)
    with np.errstate(all="ignore"):
        expected = np.clip(x.astype(np.float32) * scale, -largest, largest)
        expected[np.isnan(expected)] = np.nan  # of one sign
        expected = expected.astype(dtype).view(np.uint8)
    assert (codes == expected).all()
    assert (transposed == expected.T).all()
    assert np.isnan(amaxes.max().view(np.float32))
