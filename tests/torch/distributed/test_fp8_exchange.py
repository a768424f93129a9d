"""Sums of codes without ranks. Those of ranks: ``test_gradient_reduction.py``."""

import math

import pytest
import torch

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.torch.distributed import fp8_exchange
from fp8ref.torch.quantize import cast


def test_codes_are_added_in_rank_order_in_float32():  # P-21
    """2^-24 is half of what 1 can take: each alone is lost beside 1, two together are not."""
    parts = torch.tensor([[1.0], [2.0**-24], [2.0**-24]])
    assert fp8_exchange._added(parts, torch.float32).tolist() == [1.0]
    assert fp8_exchange._added(parts.flip(0), torch.float32).tolist() == [1.0 + 2.0**-23]
    codes = cast.to_fp8(torch.tensor([[448.0, -1.0], [0.5, 1.0], [-448.0, math.nan]]), E4M3FN).view(
        torch.uint8
    )
    added = fp8_exchange._added(codes, torch.float8_e4m3fn)
    assert added[0] == 0.5
    assert added[1].isnan()


@pytest.mark.parametrize(("fmt", "largest"), [(E4M3FN, 464.0), (E5M2, 61440.0)])
def test_what_a_cast_clips_is_counted(fmt, largest):  # P-22
    """Up to the midpoint of the largest number and the next one a value rounds to the largest: 448
    + 16, and 57344 + 4096.
    """
    x = torch.tensor(
        [largest, -largest, math.nextafter(largest, math.inf) * 1.001, -2 * largest, 0.0]
    )
    assert fp8_exchange._saturated(x, fmt) == 2


@pytest.mark.parametrize("amax", [math.inf, math.nan])
def test_an_amax_that_is_not_finite_makes_the_scale_nan(amax):  # P-21
    found = fp8_exchange.GradientCast().scale(torch.tensor([1.0, amax]), 0.5)
    assert found[0] == 224.0
    assert found[1].isnan()


def test_without_a_process_group_nothing_is_summed():
    with pytest.raises(ValueError, match="there is none"):
        fp8_exchange.group_of(None)
