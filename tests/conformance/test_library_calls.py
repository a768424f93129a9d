import numpy as np
import pytest

from fp8ref.conformance import library_calls
from fp8ref.formats import E4M3FN
from fp8ref.recipe import CastSpec


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
def test_compiled_is_eager():
    """How a GPU's compiled casts are examined, on a CPU."""
    import torch

    x = np.float32([0, -0.0, 1, 1.0625, -3.3, 200, 2.0**-9, 447.9])
    eager, compiled = (library_calls.on_torch("cpu", compiled=how)(library_calls.fp8ref_torch_cast(E4M3FN)) for how in (False, True))
    np.testing.assert_array_equal(compiled(x), eager(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("who", ["sim", "jax", "torch"])
def test_every_quantizer_rounds_its_input_to_the_named_dtype_and_returns_plain_arrays(who):
    x = np.array([[1.0, -448.0], [2.0, 3.5]], np.float32)
    codes, scale = library_calls.quantizers([who])[who].quantize(x, CastSpec(fmt=E4M3FN, granularity="rowwise"), axis=1, dtype="bfloat16")
    assert (codes.dtype, codes.shape, scale.dtype, scale.shape) == (np.uint8, (2, 2), np.float32, (2, 1))
    # by hand: scales 448 / 448 and 448 / 3.5; 1 -> 0x38, -448 -> 0xFE, 256 -> 0x78, 448 -> 0x7E
    np.testing.assert_array_equal(codes, [[0x38, 0xFE], [0x78, 0x7E]])
    np.testing.assert_array_equal(scale, [[1], [128]])
    x[0, 0] = 1 + 2.0**-9  # 1 in bfloat16
    rounded, _ = library_calls.quantizers([who])[who].quantize(x, CastSpec(fmt=E4M3FN), axis=1, dtype="bfloat16")
    np.testing.assert_array_equal(rounded[0], [0x38, 0xFE])


@pytest.mark.parametrize("who", ["sim", "jax", "torch"])
def test_every_encoder_saturates(who):
    np.testing.assert_array_equal(
        library_calls.quantizers([who])[who].encode(np.array([1e9, -1e9, 1.0], np.float32), E4M3FN), [0x7E, 0xFE, 0x38]
    )
