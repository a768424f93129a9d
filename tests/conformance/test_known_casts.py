"""Property tests of library casts and quantizers with the conformance kit, as their own test suites
could have.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8ref.conformance import parameters, require, strategies
from fp8ref.formats import E4M3FN, E5M2, FP8_FORMATS

steady = settings(
    deadline=None, derandomize=True, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)


@steady
@given(st.data(), strategies.formats(), st.sampled_from(strategies.DTYPES))
def test_the_cast_of_ml_dtypes(data, fmt, dtype):
    x = data.draw(strategies.tensors(dtype, fmt=fmt))
    with np.errstate(all="ignore"):
        found = x.astype(getattr(ml_dtypes, f"float8_{fmt}"))
    require.require_cast(x, found, fmt, saturate=False)


@pytest.mark.parametrize(
    ("x", "codes"),
    [p for fmt in FP8_FORMATS.values() for p in parameters.casts(fmt, saturate=False, count=200)],
)
def test_the_cast_of_torch_but_for_overflow(x, codes, request):
    """torch saturates to e4m3fn and the fnuz formats, and not to e5m2 (docs/libraries.md)."""
    import torch

    fmt = FP8_FORMATS[request.node.callspec.id.split("-")[0]]
    x = np.where(np.abs(x) > fmt.max, np.float32(0), x)
    require.require_cast(x, strategies.as_torch(x).to(getattr(torch, f"float8_{fmt}")), fmt)


@steady
@given(strategies.tensors("bfloat16", granularity="rowwise"))
def test_torchaos_rowwise_scaling(x):
    import torch
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    found = hp_tensor_to_float8_dynamic(
        strategies.as_torch(x),
        torch.float8_e4m3fn,
        LinearMMConfig(),
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
    )
    require.require_quantized(x, found._data, E4M3FN, scale=found._scale, granularity="rowwise")


@pytest.mark.parametrize(("mode", "policy"), [("floor", "mx_floor"), ("rceil", "mx_rceil")])
def test_torchaos_mx(mode, policy):  # S-14
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    @steady
    @given(strategies.tensors("bfloat16", granularity="mx_1x32", policy=policy))
    def agrees(x):
        scale, data = to_mx(
            strategies.as_torch(x), torch.float8_e4m3fn, 32, ScaleCalculationMode(mode)
        )
        require.require_quantized(
            x,
            data,
            E4M3FN,
            inverses=require.Inverses(e8m0=scale.view(torch.uint8)),
            granularity="mx_1x32",
            policy=policy,
        )

    agrees()


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_flaxs_quantizer(fmt):  # S-12, S-13
    import jax.numpy as jnp
    from flax.linen import fp8_ops

    dtype = getattr(jnp, f"float8_{fmt}")

    @steady
    @given(strategies.tensors("float32", fmt=fmt, policy="flax", shape=(2, 3)))
    def agrees(x):
        # XLA on a CPU flushes subnormals, scales included
        x = np.where(np.abs(x) < 2.0**-90, np.float32(0), x)
        value = strategies.as_jax(x)
        scale_inv = fp8_ops.compute_scale(
            jnp.max(jnp.abs(value)), jnp.float32(1), jnp.float32(fmt.max)
        )
        found = fp8_ops.quantize(value, dtype, scale_inv, jnp.float32)
        require.require_quantized(
            x, found, fmt, inverses=require.Inverses(scale_inv=scale_inv), policy="flax"
        )

    agrees()


@pytest.mark.grid(2)
@pytest.mark.parametrize("mode", ["nearest_even", "nearest_away", "toward_zero"])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_the_cast_of_gfloat(fmt, mode):
    import gfloat
    from gfloat import formats as infos

    info = {"e4m3fn": infos.format_info_ocp_e4m3, "e5m2": infos.format_info_ocp_e5m2}[fmt.name]
    rounding = {
        "nearest_even": "TiesToEven",
        "nearest_away": "TiesToAway",
        "toward_zero": "TowardZero",
    }[mode]

    @steady
    @given(strategies.tensors("float32", fmt=fmt, finite=True))
    def agrees(x):
        rounded = gfloat.round_ndarray(
            info, x.astype(np.float64), getattr(gfloat.RoundMode, rounding), sat=True
        )
        require.require_cast(
            x, gfloat.encode_ndarray(info, rounded).astype(np.uint8), fmt, rounding=mode
        )

    agrees()


def test_policies_of_torchao_by_parameters():
    import torch
    from torchao.float8.float8_utils import amax_to_scale

    for parameter in parameters.scales(E4M3FN, "torchao_pow2"):
        amax, expected = parameter.values
        found = amax_to_scale(
            strategies.as_torch(amax), torch.float8_e4m3fn, round_scales_to_power_of_2=True
        )
        require.require_scales(amax, found, E4M3FN, policy="torchao_pow2")
        np.testing.assert_array_equal(found.numpy(), expected)
