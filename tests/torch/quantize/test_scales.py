import ml_dtypes
import numpy as np
import pytest
import torch

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.policy import POLICIES, ScalePolicy
from fp8ref.sim.quantize import scales as sim
from fp8ref.torch.quantize import scales

AMAX_BF16 = np.arange(0x7F81, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
IMPLEMENTED = [p for p in POLICIES.values() if p.in_backends]
formats = pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)


def amaxes(fmt, rng):
    """Every bfloat16, a million float32, the neighbors of fmt.max * 2^k, where scales pass a power
    of two, and NaNs."""
    random = rng.integers(0, 0x7F800001, 1 << 20, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        powers = (fmt.max * 2.0 ** np.arange(-160, 118)[:, None]).astype(np.float32)
    near = (powers[np.isfinite(powers).ravel()].view(np.int32) + np.arange(-100, 101)).clip(
        0, 0x7F800000
    )
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32).view(np.float32)
    return np.concatenate([AMAX_BF16, random, near.astype(np.int32).view(np.float32).ravel(), nans])


@pytest.mark.parametrize("policy", IMPLEMENTED, ids=lambda p: p.name)
@formats
def test_scales_equal_the_simulators(policy, fmt, rng):  # S-3, S-4, S-14, S-17
    """All bits of both, subnormals included: torch flushes none."""
    amax = amaxes(fmt, rng)
    found, expected = (
        scales.scales_from_amax(torch.from_numpy(amax), fmt, policy),
        sim.scales_from_amax(amax, fmt, policy),
    )
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(
            np.where(mine.isnan(), -1, mine.view(torch.int32)),
            np.where(np.isnan(theirs), -1, theirs.view(np.int32)),
        )


@pytest.mark.parametrize(
    "policy", [p for p in POLICIES.values() if p not in IMPLEMENTED], ids=lambda p: p.name
)
def test_other_policies_are_refused(policy):
    with pytest.raises(
        ValueError,
        match="te_mxfp8, te_mxfp8_2.13, deepgemm, deepgemm_cpu, deepgemm_ue8m0, sglang, "
        f"vllm_native, sglang_token; got policy '{policy.name}'.*fp8ref.sim",
    ):
        scales.scale_from_amax(torch.ones(()), E4M3FN, policy)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (ScalePolicy(name="other", eps=1e-9), "torchao's eps"),
        (ScalePolicy(name="room", eps=1e-12, margin=1), "'room'.*fp8ref.sim"),
    ],
)
def test_errors(policy, message):
    with pytest.raises(ValueError, match=message):
        scales.scale_from_amax(torch.ones(()), E4M3FN, policy)


@pytest.mark.parametrize("policy", ["mx_rceil", "te_mxfp8", "te_mxfp8_2.13"])
def test_quotients_below_the_table_have_the_least_exponent(policy):  # S-14
    """RN32(amax / 448) from the least subnormal number to 2^-127: k is -127, whose bits are
    00400000.
    """
    quotients = np.append(
        np.arange(1, 1 << 22, 4099, dtype=np.uint32).view(np.float32), np.float32(2.0**-127)
    )
    amaxes = (quotients.astype(np.float64) * 448).astype(np.float32)
    amaxes = amaxes[(amaxes.astype(np.float64) / 448).astype(np.float32) <= np.float32(2.0**-127)]
    assert len(amaxes) > 1000
    found = np.asarray(scales.scales_from_amax(torch.from_numpy(amaxes), E4M3FN, policy).scale_inv)
    assert (found.view(np.uint32) == 0x00400000).all()


def test_a_compiler_reads_what_a_custom_policy_decides():
    amax = torch.tensor([0.0, 1.0, 300.0])
    policy = ScalePolicy(name="mine", eps=1e-12)
    compiled = torch.compile(scales.scales_from_amax, fullgraph=True, backend="eager")
    expected = scales.scales_from_amax(amax, E4M3FN)
    for mine, torchaos in zip(compiled(amax, E4M3FN, policy), expected, strict=True):
        assert torch.equal(mine, torchaos)
