"""Invariants of scales, and which policies and libraries break each (spec S-18)."""

import ml_dtypes
import numpy as np
import pytest
import torch
from flax.linen import fp8_ops
from torchao.float8 import float8_utils

from fp8ref.conformance.invariants import SCALES, broken, require_invariants
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize.scales import scales_from_amax

F32 = np.float32
MAX = F32(448)
EXAMPLES = 25

BREAK = {
    # RN32(log2) is coarser for larger exponents (S-4)
    "torchao_pow2": {"power_of_two_equivariance"},
    "mx_rceil": {"power_of_two_equivariance"},
    "msamp": {"power_of_two_equivariance", "finite"},
    "flax": {"finite"},  # 448 / amax overflows (S-9)
    "flax_bf16": {"finite"},
    "mx_floor": {"within_max"},  # floor of the exponent: up to 1.75 times 2^8 (S-14)
    # an eps of 1e-4; scale_inv first (S-17)
    "deepgemm": {"power_of_two_equivariance", "range_used", "reciprocal"},
    "deepgemm_cpu": {"power_of_two_equivariance", "range_used", "reciprocal"},
    "deepgemm_ue8m0": {"power_of_two_equivariance", "range_used"},
    # S-20:
    "mx_ceil": {"range_used"},  # 448 itself gets twice the scale_inv that it needs
    "mx_even": {"within_max"},
    "microxcaling": {"within_max"},
    "gfloat": {"within_max"},
    "torchao_adamw_fp8": {"reciprocal"},  # scale_inv first
    "deepseek_v3": {"power_of_two_equivariance", "range_used", "reciprocal"},
    "deepseek_v3_2024": {"finite", "reciprocal"},  # no eps
    # an eps of 1e-10, above 2^-39
    "vllm": {"power_of_two_equivariance", "range_used", "reciprocal"},
    "sglang": {"power_of_two_equivariance", "range_used", "reciprocal"},
    "deepseek_v3_ue8m0": {"power_of_two_equivariance", "range_used"},
    "qwix": {"reciprocal"},
    "qwix_bf16": {"reciprocal", "within_max"},  # scale_inv in bfloat16, to nearest
    "qwix_mx": {"within_max"},
    "qwix_mx_0.1.8": {"power_of_two_equivariance"},  # RN32(log2)
    # an eps of 1e-10, 4.48e-8, 2^-9, 4.48e-10
    "vllm_ue8m0": {"power_of_two_equivariance", "range_used"},
    "vllm_ue8m0_cuda": {"power_of_two_equivariance", "range_used"},
    "vllm_token": {"power_of_two_equivariance", "range_used", "reciprocal"},
    "vllm_native": {"power_of_two_equivariance", "range_used", "reciprocal"},
    "sglang_cuda": {"power_of_two_equivariance", "range_used", "reciprocal"},
    "sglang_ue8m0": {"power_of_two_equivariance", "range_used"},
    "flashinfer": {"power_of_two_equivariance", "range_used", "reciprocal"},
    # no eps
    "sglang_token": {"finite", "reciprocal"},
    "transformers": {"finite"},
    "verl_torch": {"finite"},
    "compressed_tensors": {"finite", "reciprocal"},
    "compressed_tensors_bf16": {"finite", "reciprocal", "within_max"},
    "modelopt_bf16": {"finite", "reciprocal", "within_max"},
    "modelopt_mx": {"power_of_two_equivariance"},  # RN32(log2)
    "mx_floor_0.19": {"within_max"},
    "mx_ceil_0.19": {"range_used"},
    "mx_even_0.19": {"within_max"},
}
"""The invariants that policies break, each for a reason that their clause states.

The others break none.
"""


@pytest.mark.grid(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy):  # S-18
    def scales(amax):
        return tuple(scales_from_amax(amax, E4M3FN, policy))

    assert set(broken(scales, SCALES, examples=EXAMPLES)) == BREAK.get(policy, set())


def of_torchao(amax):
    return float8_utils.amax_to_scale(torch.from_numpy(amax), torch.float8_e4m3fn)


def of_torchao_pow2(amax):
    return float8_utils.amax_to_scale(
        torch.from_numpy(amax), torch.float8_e4m3fn, round_scales_to_power_of_2=True
    )


def of_flax(amax):
    """compute_scale makes scale_inv."""
    scale_inv = np.asarray(fp8_ops.compute_scale(amax, np.ones_like(amax), MAX))
    with np.errstate(divide="ignore"):
        return F32(1) / scale_inv


@pytest.mark.parametrize(
    ("library", "breaks"), [(of_torchao, set()), (of_torchao_pow2, {"power_of_two_equivariance"})]
)
def test_libraries(library, breaks):  # S-18
    assert set(broken(library, SCALES, examples=EXAMPLES)) == breaks


@pytest.mark.slow
def test_flax():  # S-18
    """The reciprocal of a reciprocal is an ulp off, so that an amax may be scaled to just above
    max; it still rounds to max.
    """
    assert set(broken(of_flax, SCALES, without=("power_of_two_equivariance",), examples=20)) == {
        "finite"
    }


FAULTS = {
    "an eps that is added": (
        lambda a: MAX / (a + F32(1e-3)),
        {"power_of_two_equivariance", "range_used"},
    ),
    "divided by the wrong max": (lambda a: F32(57344) / a, {"within_max"}),
    "scale_inv rounded to bfloat16, downward": (
        lambda a: F32(1) / (a / F32(448)).astype(ml_dtypes.bfloat16).astype(F32),
        {"within_max", "finite"},
    ),
    "a margin of two binades": (lambda a: MAX / 4 / a, {"range_used"}),
    "rounded up to a power of two": (
        lambda a: np.exp2(np.ceil(np.log2(np.float64(448) / a))).astype(F32),
        {"within_max", "finite"},
    ),
    "one scale of all amaxes": (
        lambda a: np.broadcast_to(MAX / a.max(), a.shape),
        {"elementwise", "finite"},
    ),
    "amax for scale": (
        lambda a: a / MAX,
        {"power_of_two_equivariance", "monotone", "within_max", "range_used"},
    ),
    "scale_inv by a second division": (lambda a: (MAX / a, a / MAX), {"reciprocal", "finite"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name):  # S-18
    made, breaks = FAULTS[name]
    found = set(broken(made, SCALES, examples=EXAMPLES))
    assert breaks <= found
    assert found <= breaks | {"finite"}


def test_other_formats_and_messages():  # S-18
    require_invariants(
        lambda a: scales_from_amax(a, E5M2, "torchao").scale, SCALES, E5M2, examples=EXAMPLES
    )
    with pytest.raises(AssertionError) as raised:
        require_invariants(lambda a: F32(1) / a, SCALES, examples=EXAMPLES, without=("finite",))
    assert "breaks:\n  range_used: amax 1 times its scale is 1, below max / 2 (S-18)" in str(
        raised.value
    )
    with pytest.raises(ValueError, match="without names invariants"):
        broken(of_torchao, SCALES, without=("speed",))


def test_what_raises_breaks():
    assert set(broken(lambda a: a[:0], SCALES, examples=2)) == {one.name for one in SCALES}
