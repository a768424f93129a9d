"""From a tensor to its amax, from an amax to a scale, from a scale to codes (SEMANTICS S), by torchao's own functions."""

from typing import NamedTuple

import torch
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import EPS, amax_to_scale, tensor_to_amax

from fp8ref import granularity as granularities
from fp8ref import policy as policies
from fp8ref.formats import Format
from fp8ref.policy import ScalePolicy
from fp8ref.torch import cast

GRANULARITIES = {"tensorwise": ScalingGranularity.TENSORWISE, "rowwise": ScalingGranularity.AXISWISE}


class Quantized(NamedTuple):
    """An FP8 tensor: hp ~ decode(codes) * scale_inv. codes is native float8."""

    codes: torch.Tensor
    scale: torch.Tensor
    scale_inv: torch.Tensor
    fmt: Format
    granularity: str
    axis: int


def amax(x: torch.Tensor, granularity: str = "tensorwise", *, axis: int = -1) -> torch.Tensor:
    """The largest magnitude of every group that shares a scale (SEMANTICS S-2).

    Shapes:   x hp, any rank; float32 of ``scale_shape(granularity, x.shape, axis)``; axis is the reduced one.
    Specials: NaN if any element is NaN.
    Raises:   ValueError: x empty or not float32, float16 or bfloat16; a granularity other than tensorwise and rowwise.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"fp8ref.torch scales {' or '.join(GRANULARITIES)}; got {granularity!r}.")
    granularities.blocks(granularity, tuple(x.shape), axis)  # refuses empty tensors and absent axes
    cast.to_f32(x[:0] if x.ndim else x)  # refuses other dtypes
    return tensor_to_amax(x, scaling_granularity=GRANULARITIES[granularity], axiswise_dim=axis).to(torch.float32)


def scale_from_amax(amax: torch.Tensor, fmt: Format, policy: str | ScalePolicy = "torchao") -> torch.Tensor:
    """The factor that multiplies into FP8: RN32(fmt.max / max(amax, eps)), then its power of two if asked (SEMANTICS S-3, S-4).

    Shapes:   amax float32, any shape; float32 of the same shape.
    Specials: zero amax -> RN32(fmt.max / eps); Inf -> 0; NaN -> NaN.
    Raises:   ValueError: a policy that this backend does not implement.
    """
    policy = implemented(policy)
    scale = amax_to_scale(amax, cast.DTYPES[fmt.name], round_scales_to_power_of_2=policy.power_of_two == "exp2_log2")
    if policy.power_of_two == "mask":
        masked = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, masked)
    return scale


def implemented(policy: str | ScalePolicy) -> ScalePolicy:
    """The policy, if this backend implements it: those of torchao, with its eps (SEMANTICS S-9); ValueError for any other."""
    policy = policies.by_name(policy)
    if not policy.floored_quotient:
        known = ", ".join(name for name, p in policies.POLICIES.items() if p.floored_quotient)
        raise ValueError(
            f"fp8ref.torch scales by {known}; got policy {policy.name!r}. Use one of these, or fp8ref.sim for {policy.name!r}."
        )
    if policy.eps != EPS:
        raise ValueError(f"torchao's eps is {EPS}; got policy {policy.name!r} with eps={policy.eps}. Use policy 'torchao'.")
    return policy


def quantize(
    x: torch.Tensor, fmt: Format, *, granularity: str = "tensorwise", policy: str | ScalePolicy = "torchao", axis: int = -1
) -> Quantized:
    """Scale x into fmt's range and round to nearest even, saturating.

    Shapes:   x hp [..., K] (axis is the reduced one); codes native float8 of x's shape; scales of ``scale_shape``.
    Units:    x ~ decode(codes) * scale_inv.
    Order:    amax; scale; RN32(f32(x) * scale); clip to +-fmt.max; round to nearest even; scale_inv = RN32(1 / scale).
    Specials: as the simulator's quantize.
    Gradient: none; the codes and scales are detached.
    Raises:   ValueError: as amax and scale_from_amax.
    Source:   SEMANTICS S-5; torchao's hp_tensor_and_scale_to_float8.
    """
    scale = scale_from_amax(amax(x, granularity, axis=axis), fmt, policy)
    codes = hp_tensor_and_scale_to_float8(x.detach(), scale, cast.DTYPES[fmt.name])._data
    return Quantized(codes, scale, scale.reciprocal(), fmt, granularity, axis)


def dequantize(q: Quantized) -> torch.Tensor:
    """RN32(decode(codes) * scale_inv), float32 of the codes' shape (SEMANTICS S-8)."""
    return cast.decode(q.codes, q.fmt) * q.scale_inv
