import numpy as np

from fp8ref.conformance.inputs import dtypes


def test_a_spacing_is_that_of_numpy():
    x = np.float32([1, 1.5, 2, 3e38, 1e-40, 0, 2.0**-126])
    np.testing.assert_array_equal(
        dtypes.spacing(x, dtypes.by_name("float32")), np.spacing(x).astype(np.float64)
    )
