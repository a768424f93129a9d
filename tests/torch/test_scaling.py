import numpy as np
import pytest
import torch
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

from fp8ref.conformance.inputs import synthetic
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2
from fp8ref.policy import POLICIES
from fp8ref.sim import cast as sim_cast
from fp8ref.sim import scaling as sim
from fp8ref.torch import cast, float8_config, scaling

IMPLEMENTED = [name for name, p in POLICIES.items() if p.floored_quotient]
policies = pytest.mark.parametrize("policy", IMPLEMENTED)
groups = pytest.mark.parametrize(("granularity", "axis"), [("tensorwise", -1), ("rowwise", 0), ("rowwise", -1)])


@policies
@groups
@pytest.mark.parametrize("case", synthetic.tensors())
def test_quantize_equals_the_simulator(case, policy, granularity, axis):  # S-1, S-2, S-5, S-6, S-8
    x = synthetic.tensors()[case]
    for fmt, dtype in ((E4M3FN, torch.float32), (E5M2, torch.bfloat16)):
        q = scaling.quantize(torch.from_numpy(x).to(dtype), fmt, granularity=granularity, policy=policy, axis=axis)
        expected = sim.quantize(x, fmt, granularity=granularity, policy=policy, axis=axis)
        np.testing.assert_array_equal(sim_cast.canonical_nans(q.codes.view(torch.uint8).numpy(), fmt), expected.codes)
        np.testing.assert_array_equal(q.scale.numpy(), expected.scale)
        np.testing.assert_array_equal(q.scale_inv.numpy(), expected.scale_inv)
        np.testing.assert_array_equal(scaling.dequantize(q).numpy(), sim.dequantize(expected))
        assert q.scale.shape == expected.scale.shape


@pytest.mark.parametrize("case", synthetic.tensors())
@pytest.mark.parametrize(
    ("granularity", "policy"),
    [("blockwise_1x128", "torchao"), ("blockwise_128x128", "torchao"), *(("mx_1x32", name) for name, p in POLICIES.items() if p.e8m0)],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_equal_the_simulator(case, granularity, policy, axis):  # S-6, S-14
    """[150, 384] and its transpose: a last block of 22 along the other axis."""
    x = np.resize(synthetic.tensors()[case], (384, 150) if axis == 0 else (150, 384))
    q = scaling.quantize(torch.from_numpy(x), E4M3FN, granularity=granularity, policy=policy, axis=axis)
    expected = sim.quantize(x, E4M3FN, granularity=granularity, policy=policy, axis=axis)
    np.testing.assert_array_equal(sim_cast.canonical_nans(q.codes.view(torch.uint8).numpy(), E4M3FN), expected.codes)
    np.testing.assert_array_equal(q.scale.numpy(), expected.scale)
    np.testing.assert_array_equal(q.scale_inv.numpy(), expected.scale_inv)
    np.testing.assert_array_equal(scaling.dequantize(q).numpy(), sim.dequantize(expected))


def test_quantize_with_is_quantize_by_a_given_scale(rng):
    x = torch.from_numpy(rng.standard_normal((16, 32)).astype(np.float32))
    q = scaling.quantize(x, E5M2)
    again = scaling.quantize_with(x, q.scale, E5M2)
    assert torch.equal(q.codes.view(torch.uint8), again.codes.view(torch.uint8))
    assert torch.equal(q.scale_inv, again.scale_inv)
    with pytest.raises(ValueError, match=r"have shape \(\); got \(1,\)"):
        scaling.quantize_with(x, q.scale.reshape(1), E5M2)


@groups
@pytest.mark.parametrize("pow2", [False, True])
def test_quantize_equals_torchaos_dynamic_cast(granularity, axis, pow2, rng):
    x = torch.from_numpy(rng.standard_normal((48, 80)).astype(np.float32)).bfloat16()
    theirs = hp_tensor_to_float8_dynamic(
        x,
        torch.float8_e4m3fn,
        None,
        scaling_granularity=float8_config.GRANULARITIES[granularity],
        axiswise_dim=axis if granularity == "rowwise" else None,
        round_scales_to_power_of_2=pow2,
    )
    ours = scaling.quantize(x, E4M3FN, granularity=granularity, policy="torchao_pow2" if pow2 else "torchao", axis=axis)
    assert torch.equal(ours.codes.view(torch.uint8), theirs._data.view(torch.uint8))
    assert torch.equal(ours.scale, theirs._scale)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.ones(0, 4), {}, "at least one element"),  # S-7
        (torch.ones(4, 128), {"granularity": "mx_1x32"}, "e8m0 scales.*'torchao'"),
        (torch.ones(4, 100), {"granularity": "blockwise_1x128"}, "divisible by 128"),
        (torch.ones(4, 4, dtype=torch.float64), {}, "float64"),
        (torch.ones(4, 4), {"granularity": "rowwise", "axis": 2}, r"\[-2, 2\)"),
    ],
)
def test_errors(x, options, message):
    with pytest.raises(ValueError, match=message):
        scaling.quantize(x, E4M3FN, **options)


@pytest.mark.parametrize(("fmt", "message"), [("e4m3fn", "fmt is a Format.*got 'e4m3fn'"), (BFLOAT16, "e5m2fnuz; got bfloat16")])
@pytest.mark.parametrize("policy", ["torchao", "mx_rceil"])
def test_a_fmt_that_is_not_fp8_is_refused(fmt, message, policy):
    x = torch.ones(4, 32)
    with pytest.raises(ValueError, match=message):
        scaling.quantize(x, fmt, policy=policy)
    with pytest.raises(ValueError, match=message):
        scaling.quantize_with(x, torch.ones(()), fmt)
    with pytest.raises(ValueError, match=message):
        scaling.scale_from_amax(torch.ones(()), fmt, policy)


def test_codes_are_native_float8():
    assert scaling.quantize(torch.ones(4, 4), E5M2).codes.dtype == cast.DTYPES["e5m2"]
