"""Scales of an amax, by a policy (spec S-3, S-4, S-9, S-14, S-17)."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchao.float8.float8_utils import amax_to_scale

from fp8ref.formats import FP4_FORMATS, Format
from fp8ref.policy import ScalePolicy
from fp8ref.shared import errors
from fp8ref.spec import support
from fp8ref.torch.quantize import cast

__all__ = ["Scales", "implemented", "scale_from_amax", "scales_from_amax"]


class Scales(NamedTuple):
    """scale multiplies into FP8, scale_inv out of it; float32 of one shape."""

    scale: Tensor
    scale_inv: Tensor


def scales_from_amax(amax: Tensor, fmt: Format, policy: str | ScalePolicy = "torchao") -> Scales:
    """Compute scale and scale_inv from an amax, bit for bit as the simulator (S-3, S-4, S-9, S-14,
    S-17).

    Shapes:   amax float32, any shape; both scales float32 of that shape.
    Order:    RN32(fmt.max / max(amax, eps)), its power of two if asked, RN32(1 / scale); exactly
              2^-k and 2^k under e8m0; or a float32 scale_inv first, and its reciprocal (S-17).
    Specials: zero amax -> RN32(fmt.max / eps); Inf -> 0; NaN -> NaN. e8m0: S-14.
    Raises:   ValueError: a policy that this backend does not implement, or not for e2m1fn; one of
              two levels (``two_level``); another fmt that is not FP8.
    Source:   torchao's amax_to_scale, except ``mask`` and policies that make scale_inv.
    """
    policy, dtype = implemented(policy), cast.native(fmt)
    if fmt.name in FP4_FORMATS:
        support.require("scale policies of e2m1fn", "torch", policy)
    errors.require(
        policy.two_level is None,
        f"policy {policy.name!r} needs amaxes of blocks and of the tensor; got one amax. Use "
        "scaling.quantize (S-22).",
    )
    if policy.unscaled:
        return Scales(
            torch.ones_like(amax, dtype=torch.float32), torch.ones_like(amax, dtype=torch.float32)
        )
    if policy.e8m0:
        return _e8m0_scales(amax, fmt, policy)
    if policy.makes_scale_inv:
        scale_inv = _scale_inv_ratio(amax, fmt, policy)
        return Scales(scale_inv.reciprocal(), scale_inv)
    scale = amax_to_scale(
        amax, dtype, round_scales_to_power_of_2=policy.power_of_two == "exp2_log2"
    )
    if policy.power_of_two == "mask":
        masked = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, masked)
    return Scales(scale, scale.reciprocal())


def scale_from_amax(amax: Tensor, fmt: Format, policy: str | ScalePolicy = "torchao") -> Tensor:
    """The factor into FP8: ``scales_from_amax(...).scale``. Its docstring applies."""
    return scales_from_amax(amax, fmt, policy).scale


def implemented(policy: str | ScalePolicy) -> ScalePolicy:
    """The policy, if this backend implements it (``spec.support``): torchao's with torchao's eps
    (S-9), or one that makes scale_inv (S-14, S-17). ValueError for any other."""
    return support.scale_policy(policy, "torch")


def _scale_inv_ratio(amax: Tensor, fmt: Format, policy: ScalePolicy) -> Tensor:
    """scale_inv before any power of two, float32 of amax's shape (S-14, S-17)."""
    floored = amax.clamp(min=policy.eps)  # a NaN stays
    if policy.ratio == "amax*(1/max)":
        return floored * float(np.float32(1 / fmt.max))
    # In float64, rounded once: on a GPU torch computes tensor / number as tensor * (1 / number),
    # which rounds twice.
    return (floored.double() / fmt.max).float()


def _e8m0_scales(amax: Tensor, fmt: Format, policy: ScalePolicy) -> Scales:
    """scale_inv = 2^k, k in [-127, 127], or NaN; scale = 2^-k, or by the policy's rules (S-14)."""
    assert policy.e8m0 is not None
    if policy.e8m0.scale_of_nan == "as_infinite":
        amax = amax.nan_to_num(math.inf, posinf=math.inf)
    nan = amax.isnan()
    if policy.ratio == "exponents":
        k = (amax.view(torch.int32) >> 23) - 127 - (math.frexp(fmt.max)[1] - 1)
    else:
        quotient = _scale_inv_ratio(amax, fmt, policy)
        # an integer for powers of two, and not for their float32 neighbors
        log2 = quotient.double().log2()
        k = (log2.float() if policy.power_of_two == "exp2_log2" else log2).ceil()
    k = torch.where(nan, 0, k.clamp(-127, 127)).to(torch.int32)
    scale = torch.where(k == -127, policy.e8m0.scale_of_code_0, _two_to_the(-k))
    nan_scale = 0.0 if policy.e8m0.scale_of_nan == "zero" else math.nan
    return Scales(torch.where(nan, nan_scale, scale), torch.where(nan, math.nan, _two_to_the(k)))


def _two_to_the(k: Tensor) -> Tensor:
    """2^k, built from its bits, for int32 k in [-127, 127]; 2^-127 is a subnormal."""
    return torch.where(k == -127, 1 << 22, (k + 127) << 23).to(torch.int32).view(torch.float32)
