"""Codes that optimizer states are stored in, held to the simulator's cast."""

import numpy as np
import pytest
import torch

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32
from fp8ref.sim.quantize import cast
from fp8ref.torch.quantize import storage

NUMBERS = np.array([0.0, -0.0, 1e-9, -1e-9, 0.3, -7.7, 400.0, 1e6, -1e6], np.float32)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_codes_are_the_simulators(fmt):  # O-8, C-2
    codes = storage.codes(torch.from_numpy(NUMBERS), fmt, None, None, 0)
    expected = cast.encode(NUMBERS, fmt)
    assert codes.dtype == storage.dtype(fmt) == torch.uint8
    np.testing.assert_array_equal(codes.numpy(), expected)
    np.testing.assert_array_equal(storage.values(codes, fmt).numpy(), cast.decode(expected, fmt))


@pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16, FLOAT32], ids=str)
def test_wider_formats_saturate(fmt):  # O-8
    codes = storage.codes(torch.from_numpy(NUMBERS), fmt, None, None, 0)
    expected = cast.round_to(np.clip(NUMBERS, -fmt.max, fmt.max), fmt).astype(np.float32)
    assert codes.dtype == storage.dtype(fmt)
    np.testing.assert_array_equal(storage.values(codes, fmt).numpy(), expected)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, FLOAT16], ids=str)
def test_what_is_not_zero_keeps_a_code_that_is_not(fmt):  # O-8
    tiny = torch.tensor([0.0, 1e-30, -1e-30])
    values = storage.values(storage.codes(tiny, fmt, tiny, None, 0), fmt)
    assert values.tolist() == [0.0, fmt.smallest_subnormal, -fmt.smallest_subnormal]
