import ml_dtypes
import numpy as np

from fp8ref.conformance.inputs import quantizer_inputs


def test_samples_are_bfloat16_and_are_what_their_names_say():
    tensors = quantizer_inputs.samples()
    for name, value in tensors.items():
        assert value.dtype == np.float32
        if name not in ("nan", "inf"):
            np.testing.assert_array_equal(
                value, value.astype(ml_dtypes.bfloat16).astype(np.float32), err_msg=name
            )
    assert np.isnan(tensors["nan"]).sum() == 1
    assert np.isinf(tensors["inf"]).sum() == 1
    assert not tensors["zero"].any()
    assert 0 < np.abs(tensors["subnormal"]).max() < 2.0**-126
    assert (np.signbit(tensors["negative_zero"]) & (tensors["negative_zero"] == 0)).any()
    assert (tensors["zero_rows"] == 0).all(1).sum() == 16
    assert np.abs(tensors["outlier"]).max() > 1000 * np.median(np.abs(tensors["outlier"]))
    assert 0 < np.abs(tensors["tiny"]).max() < 1e-12  # below torchao's eps
    assert np.abs(tensors["huge"]).max() > 9e37
