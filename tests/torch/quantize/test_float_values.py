"""Float32 numbers of FP8 codes are those of torch's own conversion."""

import numpy as np
import pytest
import torch

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.torch.quantize import cast, float_values


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_every_code_is_decoded(fmt):  # C-3
    codes = torch.arange(256, dtype=torch.uint8).view(cast.native(fmt))
    found, right = float_values.decode(codes), codes.float()
    number = ~right.isnan()
    assert torch.equal(found.isnan(), right.isnan())
    assert torch.equal(found[number].view(torch.int32), right[number].view(torch.int32))  # -0 too
    assert torch.equal(float_values.decode(right.bfloat16())[number], right[number])


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_numbers_are_rounded_as_a_cast_does(fmt):  # C-2, S-5
    """All numbers of the format, the midpoints between neighbors and the float32 numbers next to
    them, and random ones.
    """
    numbers = np.unique(
        torch.arange(256, dtype=torch.uint8)
        .view(cast.native(fmt))
        .float()
        .nan_to_num(0, 0, 0)
        .numpy()
    )
    middles = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    rng = np.random.default_rng(0)
    random = (rng.normal(size=1 << 16) * 2.0 ** rng.integers(-20, 12, 1 << 16)).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    x = torch.from_numpy(
        np.concatenate(
            [numbers, middles, *beside, random, np.float32([1e30, -1e30, np.inf, -np.inf, 1e-40])]
        )
    )
    right = cast.to_fp8(x, fmt).float()
    for scratch in (None, torch.empty_like(x)):
        assert torch.equal(float_values.round_(x.clone(), fmt, scratch), right)
    assert float_values.round_(torch.tensor([torch.nan]), fmt).isnan()
