"""``require_*`` for e2m1fn: codes, scales of MX, and scales of two levels."""

import numpy as np
import pytest
import torch
from helpers.quantize.fp4_libraries import (
    torchao_mx,
    torchao_nvfp4,
    torchao_nvfp4_one_level,
    transformer_engine,
)

from fp8ref.conformance.require import (
    Inverses,
    require_cast,
    require_dequantized,
    require_quantized,
    require_scales,
)
from fp8ref.formats import E2M1FN
from fp8ref.sim.quantize import cast, packing, scaling, two_level


def test_require_cast(rng):  # C-9
    x = np.float32([0, -0.0, 0.25, 0.75, 5, 7, -9, np.inf, np.nan, *rng.standard_normal(99)])
    codes = cast.encode(x, E2M1FN)
    require_cast(x, codes, E2M1FN)
    codes[4] = 7
    with pytest.raises(AssertionError, match="1 of 108 codes of e2m1fn differ"):
        require_cast(x, codes, E2M1FN)


def test_require_scales_of_mx():  # S-14
    amax = np.float32([0, 6, 7.5, 1e-40, np.inf])
    scales = scaling.scale_from_amax(amax, E2M1FN, "mx_floor")
    require_scales(amax, scales, E2M1FN, policy="mx_floor")
    with pytest.raises(AssertionError, match="1 of 5 scales to e2m1fn differ"):
        require_scales(amax, np.where(amax == 6, scales * 2, scales), E2M1FN, policy="mx_floor")
    with pytest.raises(ValueError, match="needs amaxes of blocks and of the tensor"):
        require_scales(amax, scales, E2M1FN, policy="te_nvfp4")


def test_require_quantized_takes_libraries_and_shows_a_fault(rng):  # S-22, S-14
    x = rng.standard_normal((32, 64)).astype(np.float32)
    given = torch.from_numpy(x)
    two, one, (pairs, e8m0) = (
        torchao_nvfp4(given),
        torchao_nvfp4_one_level(given),
        torchao_mx("rceil")(given),
    )
    how = {"granularity": "nvfp4_1x16", "policy": "torchao_nvfp4"}
    codes, block, tensor = (
        packing.unpack(two.qdata.numpy()),
        two.scale.float(),
        two.per_tensor_scale,
    )
    require_quantized(
        x, codes, E2M1FN, inverses=Inverses(scale_inv=block, tensor_scale_inv=tensor), **how
    )
    require_quantized(
        x,
        packing.unpack(one.qdata.numpy()),
        E2M1FN,
        inverses=Inverses(scale_inv=one.scale.float()),
        granularity="nvfp4_1x16",
        policy="torchao_nvfp4_one_level",
    )
    require_quantized(
        x,
        packing.unpack(pairs.numpy()),
        E2M1FN,
        inverses=Inverses(e8m0=e8m0.view(torch.uint8)),
        granularity="mx_1x32",
        policy="mx_rceil",
    )
    with pytest.raises(AssertionError, match="tensor_scale_inv of e2m1fn differs:") as error:
        require_quantized(
            x, codes, E2M1FN, inverses=Inverses(scale_inv=block, tensor_scale_inv=tensor * 2), **how
        )
    assert "T = RN32(the tensor's amax / 2688), at least 0.015625 (S-22)" in str(error.value)
    with pytest.raises(AssertionError, match="scale_inv of a block = RN32"):
        require_quantized(
            x, codes, E2M1FN, inverses=Inverses(scale_inv=block * 2, tensor_scale_inv=tensor), **how
        )
    with pytest.raises(AssertionError, match="cast to nearest even"):
        require_quantized(
            x,
            codes ^ np.uint8(1),
            E2M1FN,
            inverses=Inverses(scale_inv=block, tensor_scale_inv=tensor),
            **how,
        )
    with pytest.raises(ValueError, match="policy 'torchao_nvfp4' needs tensor_scale_inv"):
        require_quantized(x, codes, E2M1FN, inverses=Inverses(scale_inv=block), **how)
    with pytest.raises(ValueError, match="policy 'mx_rceil' has no tensor_scale_inv"):
        require_quantized(
            x,
            codes,
            E2M1FN,
            inverses=Inverses(e8m0=e8m0.view(torch.uint8), tensor_scale_inv=tensor),
            granularity="mx_1x32",
            policy="mx_rceil",
        )
    assert two_level.scales_from_amaxes(np.float32([1]), np.float32(1)).tensor_scale_inv.shape == ()


def test_rows_with_a_scale_each(rng):  # S-22, S-8
    x = rng.standard_normal((4, 64)).astype(np.float32)
    how = {"granularity": "nvfp4_1x16", "policy": "te_nvfp4_row"}
    pairs, block, amax = transformer_engine(torch.from_numpy(x), row_scaled=True)
    codes, block = packing.unpack(pairs.numpy()), block.float()
    rows = 1 / np.minimum(np.float32(2688) / amax.numpy(), np.float32(3e38))  # [M]
    require_quantized(
        x, codes, E2M1FN, inverses=Inverses(scale_inv=block, tensor_scale_inv=rows), **how
    )
    numbers = scaling.dequantize(scaling.quantize(x, E2M1FN, **how))
    scales = {"scale_inv": block, "tensor_scale_inv": rows[:, None], "granularity": "nvfp4_1x16"}
    require_dequantized(codes, numbers, E2M1FN, **scales)
    with pytest.raises(AssertionError, match="numbers of e2m1fn differ"):
        require_dequantized(codes, numbers, E2M1FN, **scales | {"tensor_scale_inv": rows[0]})
    wrong = Inverses(scale_inv=block, tensor_scale_inv=rows[[0, 2, 1, 3]])
    with pytest.raises(AssertionError, match=r"scale_inv of row \[\d, 0\], of amax") as error:
        require_quantized(x, codes, E2M1FN, inverses=wrong, **how)
    assert "S = RN32(2688 / the row's amax) (S-22)" in str(error.value)
    with pytest.raises(ValueError, match=r"tensor_scale_inv is float32 of shape \(4, 1\); got"):
        require_quantized(
            x, codes, E2M1FN, inverses=Inverses(scale_inv=block, tensor_scale_inv=rows[:1]), **how
        )


def test_codes_of_nan_are_not_compared():  # C-9
    """ml_dtypes gives NaN code 8 and -NaN code 0, torchao 3 and 11: none is right, and none
    wrong.
    """
    x = np.array([1.0, np.nan, -np.nan, 6.0], np.float32)
    right = cast.encode(x, E2M1FN)
    for codes in ((8, 0), (3, 11), (7, 7)):
        found = right.copy()
        found[1:3] = codes
        require_cast(x, found, E2M1FN)
        found[0] = 5
        with pytest.raises(AssertionError, match="1 of 4 codes"):
            require_cast(x, found, E2M1FN)
