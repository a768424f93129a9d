"""e2m1fn in PyTorch: casts, codes and MX blocks are the simulator's, bit for bit."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8ref.conformance.inputs import cast_inputs
from fp8ref.formats import E2M1FN
from fp8ref.sim.quantize import cast as sim
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.torch.quantize import cast, four_bits, scaling

CODES = np.arange(16, dtype=np.uint8)
MX = {"granularity": "mx_1x32", "policy": "mx_rceil"}


@pytest.mark.parametrize(
    "compiler",
    [
        None,
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
            ],
        ),
    ],
)
def test_every_16_bit_input_gets_the_simulators_code(compiler):  # C-1 to C-6, C-9
    encode, patterns = cast.encode, np.arange(1 << 16, dtype=np.uint16)
    if compiler is not None:
        encode = torch.compile(encode, fullgraph=True, backend=compiler)
    for dtype, view in ((torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16)):
        x = torch.from_numpy(patterns.view(np.int16)).view(dtype)
        expected = sim.encode(patterns.view(view), E2M1FN)
        np.testing.assert_array_equal(encode(x, E2M1FN).numpy(), expected)
        native = cast.to_fp8(x, E2M1FN)
        np.testing.assert_array_equal(cast.code_bits(native, E2M1FN).numpy(), expected)


def test_ties_and_random_float32_get_the_simulators_codes(rng):  # C-2
    bits = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    near = rng.uniform(-8, 8, 1 << 16).astype(np.float32)
    x = np.concatenate([cast_inputs.edges(E2M1FN), bits.view(np.float32), near])
    found = cast.encode(torch.from_numpy(x), E2M1FN).numpy()
    np.testing.assert_array_equal(found, sim.encode(x, E2M1FN))


def test_codes_and_numbers_are_the_reverse_of_each_other():  # F-5
    numbers = four_bits.numbers(torch.from_numpy(CODES))
    np.testing.assert_array_equal(numbers.float().numpy(), sim.decode(CODES, E2M1FN))
    np.testing.assert_array_equal(four_bits.codes(numbers).numpy(), CODES)
    for codes in (numbers, torch.from_numpy(CODES)):
        values = cast.decode(codes, E2M1FN).numpy()
        np.testing.assert_array_equal(values, sim.decode(CODES, E2M1FN))
        np.testing.assert_array_equal(np.signbit(values), CODES >= 8)


@pytest.mark.parametrize("shape", [(64, 96), (40, 64), (1, 32)])
@pytest.mark.parametrize("axis", [-1, 0])
def test_mx_blocks_are_the_simulators(shape, axis, rng):  # S-14
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, shape)).astype(np.float32)
    x.flat[:4] = np.nan, np.inf, -np.inf, -0.0
    x = x.astype(ml_dtypes.bfloat16)
    value = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    expected = sim_scaling.quantize(x, E2M1FN, axis=axis, ragged=True, **MX)
    q = scaling.quantize(value, E2M1FN, axis=axis, ragged=True, **MX)
    np.testing.assert_array_equal(q.code_bits.numpy(), expected.codes)
    np.testing.assert_array_equal(q.scale.numpy(), expected.scale)
    np.testing.assert_array_equal(q.scale_inv.numpy(), expected.scale_inv)
    np.testing.assert_array_equal(scaling.dequantize(q).numpy(), sim_scaling.dequantize(expected))


def test_what_is_not_emulated_is_refused():  # R-9, C-9
    x = torch.ones(32, 32)
    with pytest.raises(ValueError, match="so casts saturate; got saturate=False"):
        cast.encode(x, E2M1FN, saturate=False)
    with pytest.raises(
        ValueError, match=r"torch scales e2m1fn by mx_.*te_nvfp4.*got policy 'torchao'"
    ):
        scaling.quantize(x, E2M1FN)
