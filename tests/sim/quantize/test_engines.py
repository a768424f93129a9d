"""Casts of serving engines and trainers, transcribed, are those of their policies: codes and scales,
bit for bit.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.quantize import engines

from fp8ref.conformance import identify_quantizer
from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.sim.quantize import cast, scaling

LAYOUTS = {"mx_1x32": (1, 32), "rowwise": (1, 256), "blockwise_128x128": (128, 128)}
EVERY = engines.KERNELS | engines.IN_PYTORCH | engines.OF_BFLOAT16


def tensor(rng, dtype):
    """[256, 256], float32: groups of many sizes, tiny ones, zeros, infinities and NaNs along both
    axes, ties, and the largest numbers."""
    x = rng.standard_normal((256, 256)) * np.exp2(rng.uniform(-12, 12, (256, 256 // 32))).repeat(
        32, 1
    )
    x[:, 32:64] *= np.exp2(rng.uniform(-140, 100, (256, 1)))
    x[:32, 64:96] = 0
    x[5, 64:96], x[40, 64:96] = 2.0**-149, -(2.0**-133)
    x[41, 64:96] = 2.0 ** rng.integers(-20, 0, 32)  # powers of two, and ties of most scales
    x[42, 64:96] = np.arange(32) * 14 + 7
    x[43, 96:128], x[44, 96] = np.finfo(np.float32).max, 2.0**-60
    x[45, 96:128] = 448
    x[192, 200], x[193, 200:208], x[194, 201] = np.inf, -np.inf, np.nan
    x[195, 128:160] = np.nan
    x[196, 130:140] = -0.0
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    return cast.round_to(x, BFLOAT16) if dtype is torch.bfloat16 else x


def groups(x, block):
    """[M, K] -> [groups, elements]."""
    (m, k), (rows, columns) = x.shape, block
    return (
        x.reshape(m // rows, rows, k // columns, columns)
        .transpose(1, 2)
        .reshape(-1, rows * columns)
    )


def ours(x, policy, granularity, axis):
    """(codes, scale_inv) of the simulator by groups of the transposed tensor, if axis is 0."""
    q = scaling.quantize(
        x.T if axis == 0 else x, E4M3FN, granularity=granularity, policy=policy, axis=axis
    )
    codes, scale_inv = (q.codes.T, q.scale_inv.T) if axis == 0 else (q.codes, q.scale_inv)
    return groups(torch.from_numpy(codes.copy()), LAYOUTS[granularity]).numpy(), scale_inv.reshape(
        -1, 1
    )


def theirs(x, function, granularity, dtype):
    codes, stored = function(groups(torch.from_numpy(x).to(dtype), LAYOUTS[granularity]))
    return codes.view(torch.uint8).numpy(), stored.float().numpy()


def assert_equal(found, expected, among):
    np.testing.assert_array_equal(found[1][among], expected[1][among])
    np.testing.assert_array_equal(
        *(cast.canonical_nans(codes[among], E4M3FN) for codes in (found[0], expected[0]))
    )


both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
both_axes = pytest.mark.parametrize("axis", [-1, 0])


@both_dtypes
@both_axes
@pytest.mark.parametrize("granularity", LAYOUTS)
@pytest.mark.parametrize("policy", engines.IN_PYTORCH)
def test_casts_in_pytorch_are_their_policies(
    policy, granularity, axis, dtype, rng
):  # S-9 S-15 S-20
    # of bfloat16 numbers: in bfloat16 it is another policy, or its floor is rounded
    if dtype is torch.bfloat16 and policy in ("compressed_tensors", "torchao_adamw_fp8"):
        dtype = torch.float32
    x = tensor(rng, dtype)
    x = np.where(x == 0, np.float32(0), x)  # compressed-tensors adds a zero_point of 0
    with np.errstate(all="ignore"):
        found = theirs(x, engines.IN_PYTORCH[policy], granularity, dtype)
    expected = ours(x, policy, granularity, axis)
    assert np.isnan(expected[1]).any() or policy in ("transformers", "modelopt_mx")
    assert_equal(found, expected, np.full(len(found[1]), True))


@both_axes
@pytest.mark.parametrize("granularity", LAYOUTS)
@pytest.mark.parametrize("policy", engines.OF_BFLOAT16)
def test_casts_of_bfloat16_are_their_policies(policy, granularity, axis, rng):  # S-20
    x = tensor(rng, torch.bfloat16)
    found = theirs(x, engines.OF_BFLOAT16[policy], granularity, torch.bfloat16)
    assert_equal(found, ours(x, policy, granularity, axis), np.full(len(found[1]), True))


@both_dtypes
@both_axes
@pytest.mark.parametrize("granularity", LAYOUTS)
@pytest.mark.parametrize("policy", engines.KERNELS)
def test_kernels_are_their_policies_but_where_fmaxf_drops_a_nan(
    policy, granularity, axis, dtype, rng
):  # S-17, S-20
    x = tensor(rng, dtype)
    found = theirs(x, engines.KERNELS[policy], granularity, dtype)
    expected = ours(x, policy, granularity, axis)
    by_group = groups(torch.from_numpy(x), LAYOUTS[granularity]).numpy()
    nan, infinite = (
        np.isnan(by_group).any(1),
        np.isinf(by_group).any(1) & ~np.isnan(by_group).any(1),
    )
    zero = (np.abs(by_group) < 2.0**-120).all(1) & (policy == "sglang_token")
    ordinary = ~(nan | infinite | zero)
    assert ordinary.mean() > 0.5 or granularity == "blockwise_128x128"
    assert_equal(found, expected, ordinary)
    # A NaN is dropped from the amax, and becomes max; so does what an infinite scale makes a NaN.
    np.testing.assert_array_equal(found[0][np.isnan(by_group)], 0x7E)
    assert not np.isnan(found[1][nan]).any()
    assert np.isnan(expected[1][nan]).all()
    if policy != "sglang_ue8m0":  # its code is 255, which reads as NaN
        np.testing.assert_array_equal(found[1][infinite], expected[1][infinite])
    if zero.any():
        np.testing.assert_array_equal(expected[0][zero & (by_group == 0).all(1)] & 0x7F, 0x7F)
        np.testing.assert_array_equal(found[0][zero & (by_group == 0).all(1)], 0x7E)


@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
def test_transformers_weights_as_they_are_installed(block, rng):  # S-15
    fine = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = SimpleNamespace(weight_block_size=block, scale_fmt=None)
    x = torch.from_numpy(tensor(rng, torch.float32))
    found = fine.Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one(
        "a.weight", x
    )
    codes, stored = engines.transformers(groups(x, block))
    torch.testing.assert_close(
        found["a.weight_scale_inv"].reshape(-1, 1), stored, rtol=0, atol=0, equal_nan=True
    )
    np.testing.assert_array_equal(
        *(
            cast.canonical_nans(c.view(torch.uint8).numpy(), E4M3FN)
            for c in (groups(found["a.weight"], block), codes)
        )
    )


def quantizer(policy):
    """The cast of a policy in groups of 32, in the dtype of which the policy is."""
    dtype = torch.bfloat16 if policy in engines.OF_BFLOAT16 else torch.float32

    def quantize(x):
        codes, stored = EVERY[policy](groups(x.to(dtype), (1, 32)))
        return codes.reshape(x.shape), stored.reshape(len(x), -1).float()

    return quantize


@pytest.mark.grid(3)
# Under an infinite amax the kernel of sglang_ue8m0 scales by -inf.
@pytest.mark.parametrize("policy", [p for p in EVERY if p != "sglang_ue8m0"])
def test_the_kit_names_the_policy_of_a_transcription(policy, monkeypatch):  # S-16
    """Of kernels as they would be if their maxima kept NaNs: as they are, the kit tells it."""
    monkeypatch.setattr(engines, "fmax", lambda x: engines.amax(x.float()))
    monkeypatch.setattr(engines, "codes_on_gpu", engines.codes)
    found = identify_quantizer(quantizer(policy), E4M3FN, framework="torch", expect=policy)
    assert (found.ok, found.found["policy"]) == (True, policy), found.differences
    assert found.found["profiles"]


def test_a_maximum_that_drops_nans_is_a_difference():  # S-16
    found = identify_quantizer(quantizer("vllm"), E4M3FN, framework="torch", expect="vllm")
    assert not found.ok
    assert "an amax of NaN has scale_inv" in found.found["deviation"]
