"""Scales of attention's groups, bit for bit the simulator's (spec A-2, S-9)."""

import numpy as np
import pytest
import torch

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2
from fp8ref.sim.attention.operands import heads as sim
from fp8ref.sim.quantize import cast as sim_cast
from fp8ref.sim.quantize.scales import scales_from_amax
from fp8ref.spec.attention.variant import blocks as blocks_of_scales
from fp8ref.torch.attention.operands import heads as head_scaling
from fp8ref.torch.attention.operands import inputs
from fp8ref.torch.attention.operands.problem import RankCall

GROUPS = [
    ("tensor", "te_current"),
    ("tensor", "torchao"),
    ("head", "te_current"),
    ("rows_128", "te_current"),
    ("mx_1x32", "mx_rceil"),
]


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize(("granularity", "policy"), GROUPS)
def test_codes_and_scales(granularity, policy, along_tokens, fmt, rng):
    x = (rng.normal(size=(2, 4, 150, 64)) * 2.0 ** rng.integers(-20, 20, (2, 4, 150, 64))).astype(
        np.float32
    )
    x[0, 1] = 0
    right = sim.quantize(x, fmt, granularity, policy, heads=2, along_tokens=along_tokens)
    blocks = blocks_of_scales(granularity, x.shape, heads=2, along_tokens=along_tokens)
    amax = head_scaling.amax(torch.from_numpy(x), blocks)
    found = head_scaling.quantize(torch.from_numpy(x), fmt, blocks, policy, amax=amax)
    np.testing.assert_array_equal(found.codes.view(torch.uint8).numpy(), right.codes)
    for name in ("amax", "scale", "scale_inv"):
        np.testing.assert_array_equal(
            getattr(found, name).numpy(), getattr(right, name), err_msg=name
        )
    if granularity == "mx_1x32":
        values = right.values * sim.spread(
            right.scale_inv, x.shape, granularity, along_tokens=along_tokens
        )
        np.testing.assert_array_equal(head_scaling.dequantize(found).numpy(), values)


# S-9: quotients rounded once, and never above float32's range
def test_current_scales_of_all_kinds_of_amaxes(rng):
    amax = np.concatenate(
        [
            np.abs(rng.normal(size=4000)) * 2.0 ** rng.integers(-140, 120, 4000),
            [0, 2.0**-149, 448, 3e38],
        ]
    )
    amax = amax.astype(np.float32)
    right, found = (
        scales_from_amax(amax, E4M3FN, "te_current"),
        head_scaling.scales_of(torch.from_numpy(amax), E4M3FN, "te_current"),
    )
    np.testing.assert_array_equal(found.scale.numpy(), right.scale)
    np.testing.assert_array_equal(found.scale_inv.numpy(), right.scale_inv)


def test_a_scale_of_nothing_finite_makes_nan():
    found = head_scaling.scales_of(torch.tensor([torch.nan, torch.inf, 1.0]), E4M3FN, "te_current")
    assert found.scale_inv.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_what_leaves_the_range(fmt):  # A-8, against a rounding that does not saturate
    middle = fmt.max + 2.0 ** (np.floor(np.log2(fmt.max)) - fmt.mantissa_bits - 1)
    x = np.array(
        [0, fmt.max, np.nextafter(np.float32(middle), np.float32(0)), middle, middle * 1.001, 1e30],
        np.float32,
    )
    right = ~np.isfinite(sim_cast.decode(sim_cast.encode(x, fmt, saturate=False), fmt))
    assert head_scaling.above_range(torch.from_numpy(x), fmt).tolist() == right.tolist()
    assert right.any()
    assert not right.all()


def test_high_precision_is_rounded(rng):
    x = torch.from_numpy(rng.normal(size=(1, 2, 3, 4)).astype(np.float32))
    found = head_scaling.quantize(x, BFLOAT16, None, "te_current", amax=torch.zeros(()))
    assert torch.equal(found.codes, x.bfloat16())
    assert found.scale == found.scale_inv == 1


def test_padding_reaches_float8(rng):
    x = torch.from_numpy(rng.normal(size=(2, 3, 5)).astype(np.float32)).to(torch.float8_e4m3fn)
    for dim in range(3):
        found = head_scaling.pad(x, dim, 4)
        assert found.shape[dim] % 4 == 0
        assert torch.equal(found.narrow(dim, 0, x.shape[dim]).float(), x.float())
        assert not found.narrow(dim, x.shape[dim], found.shape[dim] - x.shape[dim]).float().any()
    assert head_scaling.pad(x, 0, 2) is x


def test_refusals():
    with pytest.raises(ValueError, match="features divisible by 32; got 40"):
        inputs.check(*[torch.ones(1, 1, 4, 40)] * 3, RankCall(variant="mxfp8"))
    with pytest.raises(ValueError, match="got policy 'te_delayed'"):
        head_scaling.scales_of(torch.ones(()), E4M3FN, "te_delayed")
