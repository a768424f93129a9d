"""DeepGEMM's casts, transcribed in torch, against the simulator and both backends: codes and
scales, bit for bit (spec S-14, S-17).

Source: DeepGEMM (commit 54e22612), deep_gemm/utils/math.py. On a GPU torch computes tensor / number
as tensor * (1 / number); so the transcription takes its division from the device whose casts it
stands for.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fp8ref.conformance import identify_quantizer
from fp8ref.formats import E4M3FN
from fp8ref.jax.quantize import scaling as jax_scaling
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize import cast, scales, scaling
from fp8ref.torch.quantize import scaling as torch_scaling

FLOOR = np.float32(1e-4)
DIVISIONS = {
    "gpu": lambda amax: amax * torch.tensor(1 / 448, dtype=torch.float32),  # BinaryDivTrueKernel.cu
    "cpu": lambda amax: amax / 448.0,
}
CASTS = [
    ("gpu", False, "deepgemm"),
    ("cpu", False, "deepgemm_cpu"),
    ("gpu", True, "deepgemm_ue8m0"),
    ("cpu", True, "deepgemm_ue8m0"),
]
casts = pytest.mark.parametrize(("device", "ue8m0", "policy"), CASTS)
# (granularity, reduced axis): per_token, per_channel and per_block of 128, and per_custom_dims of
# the first dim
GROUPS = [
    ("blockwise_1x128", -1),
    ("blockwise_1x128", 0),
    ("blockwise_128x128", -1),
    ("rowwise", -1),
]


def up_to_power_of_two(sf):
    """ceil_to_ue8m0: the exponent field, plus one if the mantissa is not zero, from 1 to 254."""
    bits = sf.view(torch.int32)
    field = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()
    return (field.clamp(1, 254) << 23).view(torch.float32)


def scale_factors(amax, device, ue8m0):
    sf = DIVISIONS[device](amax.clamp(1e-4))
    return up_to_power_of_two(sf) if ue8m0 else sf


def deepgemm(x, granularity, axis, device, ue8m0):
    """(e4m3fn codes, sf): x [M, N] viewed as blocks, whose last are filled with zeros."""
    m, n = x.shape
    rows, columns = {"blockwise_128x128": (128, 128), "rowwise": (1, n)}.get(
        granularity, (1, 128) if axis == -1 else (128, 1)
    )
    padded = torch.zeros(m + -m % rows, n + -n % columns, dtype=x.dtype)
    padded[:m, :n] = x
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    sf = scale_factors(blocks.abs().float().amax(dim=(1, 3), keepdim=True), device, ue8m0)
    codes = (blocks * (1.0 / sf)).to(torch.float8_e4m3fn).view_as(padded)[:m, :n]
    return codes.contiguous().view(torch.uint8).numpy(), sf.squeeze((1, 3)).numpy()


def bits(values):
    """float32 bits, any NaN equal to any other."""
    values = np.asarray(values)
    return np.where(np.isnan(values), -1, values.view(np.int32))


def amaxes():
    """Zeros, subnormals, amaxes around the floor, 448 * 2^k and 2^k with 64 neighbors, random ones,
    the largest, Inf and NaN.
    """
    k = np.arange(-149, 128)
    with np.errstate(over="ignore"):
        centers = np.concatenate([np.ldexp(448.0, k[:-9]), np.ldexp(1.0, k), [1e-4]]).astype(
            np.float32
        )
    near = (
        np.clip(centers.view(np.int32)[:, None] + np.arange(-64, 65), 0, 0x7F7FFFFF)
        .astype(np.int32)
        .view(np.float32)
        .ravel()
    )
    random = (
        np.random.default_rng(0).integers(0, 0x7F800000, 1 << 18, dtype=np.uint32).view(np.float32)
    )
    return np.concatenate([near, random, np.float32([0, np.inf, np.nan])])


@casts
def test_scales_of_every_kind_of_amax(device, ue8m0, policy):  # S-14, S-17
    amax = amaxes()
    expected = scale_factors(torch.from_numpy(amax), device, ue8m0).numpy()
    found = scales.scales_from_amax(amax, E4M3FN, policy)
    np.testing.assert_array_equal(bits(found.scale_inv), bits(expected))
    np.testing.assert_array_equal(
        bits(found.scale), bits((1.0 / torch.from_numpy(expected)).numpy())
    )
    for backend, made in (
        (jax_scaling.scales, jnp.asarray(amax)),
        (torch_scaling.scales, torch.from_numpy(amax)),
    ):
        for mine, theirs in zip(backend.scales_from_amax(made, E4M3FN, policy), found, strict=True):
            np.testing.assert_array_equal(
                bits(np.asarray(mine)), bits(theirs), err_msg=backend.__name__
            )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, in inductor
@pytest.mark.parametrize("policy", ["deepgemm", "deepgemm_cpu", "deepgemm_ue8m0"])
def test_inductor_changes_no_bit(policy):  # S-14, S-17
    amax = torch.from_numpy(amaxes())
    compiled = torch.compile(
        lambda amax: torch_scaling.scales.scales_from_amax(amax, E4M3FN, policy), fullgraph=True
    )
    for mine, eager in zip(
        compiled(amax), torch_scaling.scales.scales_from_amax(amax, E4M3FN, policy), strict=True
    ):
        np.testing.assert_array_equal(bits(mine.numpy()), bits(eager.numpy()))


def tensors():
    """[130, 256] or [256, 130], by name."""
    rng = np.random.default_rng(1)
    normal = rng.standard_normal((256, 256)).astype(np.float32)
    spread = (normal * 2.0 ** rng.integers(-40, 40, (256, 1))).astype(np.float32)
    special = spread.copy()
    special[::7, ::9], special[3, 5], special[40, 200], special[129, 1], special[200, 7] = (
        0,
        np.inf,
        np.nan,
        -np.inf,
        -0.0,
    )
    floor = (
        normal
        / np.abs(normal).max(1, keepdims=True)
        * np.linspace(0.5, 2, 256, dtype=np.float32)[:, None]
        * FLOOR
    )
    exact = np.ldexp(np.float32(1), rng.integers(-30, 30, (256, 256))) * np.float32(448)
    tiny = (normal * 1e-40).astype(np.float32)
    return {
        "normal": normal,
        "spread": spread,
        "special": special,
        "floor": floor,
        "exact": exact,
        "subnormal": tiny,
        "zeros": normal * 0,
    }


@pytest.mark.grid(8)
@casts
@pytest.mark.parametrize(("granularity", "axis"), GROUPS)
@pytest.mark.parametrize("kind", tensors())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# S-5, S-6, S-14, S-17
def test_codes_and_scales(device, ue8m0, policy, granularity, axis, kind, dtype):
    x = tensors()[kind]
    x = torch.from_numpy(x[:, :130] if axis == 0 else x[:130]).to(dtype)
    codes, sf = deepgemm(x, granularity, axis, device, ue8m0)
    value = x.float().numpy()
    expected = scaling.quantize(value, E4M3FN, granularity=granularity, policy=policy, axis=axis)
    np.testing.assert_array_equal(bits(expected.scale_inv), bits(sf))
    # Before torch 2.12, and on GPUs, an infinity is cast to NaN (C-8). Under scale 0 it is NaN
    # everywhere.
    decided = ~np.isinf(value)
    np.testing.assert_array_equal(
        cast.canonical_nans(expected.codes, E4M3FN)[decided],
        cast.canonical_nans(codes, E4M3FN)[decided],
    )
    jax_x = jnp.asarray(value).astype(jnp.bfloat16 if dtype is torch.bfloat16 else jnp.float32)
    for found in (
        torch_scaling.quantize(x, E4M3FN, granularity=granularity, policy=policy, axis=axis),
        jax_scaling.quantize(jax_x, E4M3FN, granularity=granularity, policy=policy, axis=axis),
    ):
        theirs = (
            found.codes.view(torch.uint8).numpy()
            if isinstance(found.codes, torch.Tensor)
            else np.asarray(found.codes).view(np.uint8)
        )
        np.testing.assert_array_equal(bits(np.asarray(found.scale_inv)), bits(sf))
        np.testing.assert_array_equal(
            cast.canonical_nans(theirs, E4M3FN), cast.canonical_nans(expected.codes, E4M3FN)
        )


def test_a_gpus_casts_have_other_scales_than_a_cpus():  # S-17
    """Of all mantissas 54.8 % have another scale_inv, by one float32 number; under powers of two
    none has.
    """
    amax = np.arange(0x3F800000, 0x40000000, dtype=np.uint32).view(np.float32)
    gpu, cpu = (
        scales.scales_from_amax(amax, E4M3FN, policy).scale_inv.view(np.int32)
        for policy in ("deepgemm", "deepgemm_cpu")
    )
    assert np.abs(gpu - cpu).max() == 1
    assert (gpu != cpu).sum() == 4593760
    by_product, by_quotient = (
        scale_factors(torch.from_numpy(amax), device, True) for device in DIVISIONS
    )
    assert torch.equal(by_product, by_quotient)


def test_where_deepgemms_former_log2_rounded_down():  # S-17
    """Until commit 7f2a703 ceil_to_ue8m0 was 2^ceil(log2(sf)): one power too low next above 448 *
    2^k, for 3,102 amaxes from the floor up.
    """
    near = (
        np.ldexp(448.0, np.arange(-30, 120))[:, None].astype(np.float32).view(np.int32)
        + np.arange(-64, 65)
    ).astype(np.int32)
    amax = near.view(np.float32).ravel()
    amax = amax[np.isfinite(amax) & (amax >= FLOOR)]
    former = torch.pow(2.0, torch.ceil(torch.log2(torch.from_numpy(amax) / 448.0))).numpy()
    now = scales.scales_from_amax(amax, E4M3FN, "deepgemm_ue8m0").scale_inv
    np.testing.assert_array_equal(
        former, scales.scales_from_amax(amax, E4M3FN, "mx_rceil").scale_inv
    )
    assert set((now / former).tolist()) == {1, 2}
    assert (now != former).sum() == 3102


@pytest.mark.parametrize(
    "granularity", ["blockwise_1x128", pytest.param("blockwise_128x128", marks=pytest.mark.slow)]
)
@casts
def test_the_conformance_kit_names_the_policy(device, ue8m0, policy, granularity):  # S-16, S-17
    def quantize(x):
        codes, sf = deepgemm(torch.from_numpy(x), granularity, -1, device, ue8m0)
        infinite = np.isinf(x) if ue8m0 else False  # as torch 2.12 and later on a CPU (C-8)
        return np.where(infinite, 0x7E + 128 * (x < 0), codes).astype(np.uint8), sf

    found = identify_quantizer(
        quantize, E4M3FN, framework="numpy", expect=policy, granularity=granularity
    )
    assert found.identified, found.message
    assert found.found["policy"] == policy
    assert not found.found["same_policies"]
    assert not found.differences


def test_the_eps_is_that_of_the_casts():  # S-17
    assert {POLICIES[policy].eps for *_, policy in CASTS} == {1e-4}


@pytest.mark.gpu
@pytest.mark.parametrize(("ue8m0", "policy"), [(False, "deepgemm"), (True, "deepgemm_ue8m0")])
def test_on_a_gpu_the_division_is_a_product(ue8m0, policy):  # S-17
    amax = amaxes()
    sf = torch.from_numpy(amax).cuda().clamp(1e-4) / 448.0
    found = up_to_power_of_two(sf) if ue8m0 else sf
    np.testing.assert_array_equal(
        bits(found.cpu().numpy()), bits(scales.scales_from_amax(amax, E4M3FN, policy).scale_inv)
    )
