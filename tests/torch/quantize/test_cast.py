import ml_dtypes
import numpy as np
import pytest
import torch

from fp8ref.conformance.inputs import cast_inputs
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FP8_FORMATS
from fp8ref.sim.quantize import cast as sim
from fp8ref.torch.quantize import cast

fp8 = pytest.mark.parametrize("fmt", FP8_FORMATS.values(), ids=str)
PATTERNS = np.arange(1 << 16, dtype=np.uint16)


@fp8
@pytest.mark.parametrize("saturate", [True, False])
def test_encode_equals_the_simulator_on_every_16_bit_input(fmt, saturate):  # C-1 to C-6
    for dtype, view in ((torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16)):
        found = cast.encode(
            torch.from_numpy(PATTERNS.view(np.int16)).view(dtype), fmt, saturate=saturate
        )
        np.testing.assert_array_equal(
            found.numpy(), sim.encode(PATTERNS.view(view), fmt, saturate=saturate)
        )


@fp8
@pytest.mark.parametrize("saturate", [True, False])
def test_encode_equals_the_simulator_at_every_tie_and_on_random_float32(fmt, saturate, rng):
    x = np.concatenate(
        [
            cast_inputs.edges(fmt),
            rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32),
        ]
    )
    np.testing.assert_array_equal(
        cast.encode(torch.from_numpy(x), fmt, saturate=saturate).numpy(),
        sim.encode(x, fmt, saturate=saturate),
    )


@fp8
def test_decode_equals_the_simulator(fmt):
    codes = np.arange(256, dtype=np.uint8)
    for given in (torch.from_numpy(codes), torch.from_numpy(codes).view(cast.DTYPES[fmt.name])):
        np.testing.assert_array_equal(cast.decode(given, fmt).numpy(), sim.decode(codes, fmt))


@pytest.mark.parametrize(
    ("x", "fmt", "message"),
    [
        (torch.arange(3), E4M3FN, "int64"),
        (torch.ones(3, dtype=torch.float64), E4M3FN, "float64"),
        (torch.ones(3), BFLOAT16, "e4m3fn"),
    ],
)
def test_errors(x, fmt, message):
    with pytest.raises(ValueError, match=message):
        cast.encode(x, fmt)


def test_decode_refuses_codes_of_another_format():
    with pytest.raises(ValueError, match="float8_e5m2"):
        cast.decode(torch.ones(3).to(torch.float8_e4m3fn), E5M2)


@pytest.mark.parametrize("x", [np.ones(16, np.float32), [1.0], None, "x"])
def test_what_is_no_tensor_is_refused(x):
    for call in (
        lambda: cast.encode(x, E4M3FN),
        lambda: cast.to_fp8(x, E4M3FN),
        lambda: cast.decode(x, E4M3FN),
    ):
        with pytest.raises(
            ValueError,
            match=rf"torch\.Tensor; got {type(x).__name__}\. Convert with torch\.as_tensor",
        ):
            call()
