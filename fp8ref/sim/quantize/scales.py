"""Scales from an amax, by a policy (spec S-3, S-4, S-9 to S-15, S-17, S-20).

Order (S-9): floor by eps; ratio; overflow; power of two; special amaxes. ``scale`` multiplies into
FP8, ``scale_inv`` out of it. Every quotient is formed of exact numbers and rounded once to float32.
``fp8ref.policy`` holds the decisions as data. There is no compiled twin: amaxes are few.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from fp8ref import formats
from fp8ref import policy as policies
from fp8ref.formats import BFLOAT16, FLOAT32, Format
from fp8ref.policy import ScalePolicy
from fp8ref.sim.quantize import cast

__all__ = ["Scales", "scale_from_amax", "scales_from_amax"]


class Scales(NamedTuple):
    """scale multiplies into FP8, scale_inv out of it (spec S-1); float32 of one shape."""

    scale: np.ndarray
    scale_inv: np.ndarray


def scales_from_amax(
    amax, fmt: Format | str, policy: str | ScalePolicy = "torchao", *, previous=None
) -> Scales:
    """scale and scale_inv of a policy (spec S-3, S-4, S-9 to S-15, S-17, S-20).

    Shapes:   amax float32, any shape; both scales float32 of that shape; previous float32, of that
              shape or ().
    Order:    max(amax, eps); the ratio, of exact numbers, rounded once to float32 (twice in
              ``max*(1/amax)``); overflow; power of two; then what the policy says of an amax that
              is zero, infinite or NaN. scale_inv = RN32(1 / scale), or exactly 2^k where it is e8m0
              (``cast.encode(scale_inv, E8M0FNU)`` are its codes). Where the ratio makes scale_inv,
              scale = RN32(1 / scale_inv).
    Specials: ``ScalePolicy.zero``, ``infinite``, ``nan``. ``previous`` is the scale of the step
              before, 1 by default; under a policy that stores scale_inv, RN32(1 / what was stored).
    Raises:   ValueError: an unknown policy, or one of two levels (S-22); amax or previous negative
              or not float32; previous of another shape, or for a policy that never keeps it (S-11).
    Source:   next to each policy in ``fp8ref/policy.py``.
    """
    policy = policies.by_name(policy)
    fmt = formats.by_name(fmt)
    if policy.two_level is not None:
        raise ValueError(
            f"policy {policy.name!r} needs amaxes of blocks and of the tensor; got one amax. Use "
            "two_level.scales_from_amaxes or scaling.quantize (S-22)."
        )
    amax = magnitudes(amax, "amax")
    previous = _previous(previous, policy, amax.shape)
    if policy.unscaled:
        return Scales(np.ones_like(amax)[()], np.ones_like(amax)[()])
    with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
        if policy.e8m0 is not None:
            return _e8m0_scales(amax, fmt, policy)
        if policy.makes_scale_inv:
            scale_inv = _scale_inv(amax, fmt, policy)
            return Scales((np.float32(1) / scale_inv)[()], scale_inv)
        floored = np.maximum(amax.astype(np.float64), policy.eps)  # a NaN stays
        scale = _overflow(_ratio(floored, fmt, policy), policy)
        if policy.power_of_two is not None:
            scale = round_to_power_of_two(scale, by_log2=policy.power_of_two == "exp2_log2")
        # A previous scale stays, not made a power of two; TE bounds it (delayed_scaling.cu).
        kept = {"one": np.float32(1), "keep": previous, "keep_inverse": np.float32(1) / previous}
        # Asked of the floored amax: under an eps no amax is zero, and the ratio decides.
        for met, special in (
            (floored == 0, policy.zero),
            (np.isinf(floored), policy.infinite),
            (np.isnan(floored), policy.nan),
        ):
            if special != "compute":
                scale = np.where(met, kept[special], scale)
        scale = np.asarray(_overflow(scale, policy), np.float32)[()]
        if policy.inverse != "reciprocal":
            of_amax = dataclasses.replace(policy, ratio=policy.inverse, inverse="reciprocal")
            return Scales(scale, _scale_inv_ratio(amax, fmt, of_amax)[()])
    return Scales(scale, scale_inv_from_scale(scale))


def _previous(previous, policy: ScalePolicy, shape: tuple[int, ...]) -> np.ndarray:
    """The previous scale of each amax; 1 by default."""
    if previous is not None and not policy.keeps:
        raise ValueError(
            f"policy {policy.name!r} keeps no previous scale; got {previous}. Leave it out."
        )
    previous = magnitudes(np.float32(1) if previous is None else previous, "previous")
    if previous.shape not in ((), shape):
        raise ValueError(
            f"previous has amax's shape, {shape}, or (); got {previous.shape}. Keep one per amax."
        )
    return np.broadcast_to(previous, shape)


def scale_from_amax(
    amax, fmt: Format | str, policy: str | ScalePolicy = "torchao", *, previous=None
) -> np.ndarray:
    """The factor that multiplies into FP8: ``scales_from_amax(...).scale``. Shapes, order, specials
    and what it raises are the same.

    >>> from fp8ref.formats import E4M3FN
    >>> [float(scale) for scale in scale_from_amax(np.float32([0, 3.5, np.inf, np.nan]), E4M3FN)]
    [447999985582080.0, 128.0, 0.0, nan]
    """
    return scales_from_amax(amax, fmt, policy, previous=previous).scale


def scale_inv_from_scale(scale) -> np.ndarray:
    """RN32(1 / scale), the factor out of FP8 (S-1): float32 of any shape, as the result.

    Specials: scale 0 -> Inf, Inf -> 0, NaN -> NaN; a scale of 2^-128 or less -> Inf.
    Not for policies whose ratio makes scale_inv, which its scale does not determine (S-14, S-17):
    take both from ``scales_from_amax``. ValueError: not real numbers; masked elements.
    """
    scale = cast.array(scale)
    if scale.dtype.kind in "cOSUb":
        raise ValueError(
            f"scales are float32; got {scale.dtype}. Convert them with .astype(np.float32)."
        )
    # of zero, and of a subnormal scale below 2^-128
    with np.errstate(divide="ignore", over="ignore"):
        return np.float32(1) / scale.astype(np.float32)


def magnitudes(value, name: str) -> np.ndarray:
    """value as an array; ValueError unless it is float32 and nowhere negative."""
    cast.check_subnormals()
    value = cast.array(value)
    if value.dtype != np.float32:
        raise ValueError(
            f"{name} is float32; got {value.dtype}. Convert it with .astype(np.float32)."
        )
    if np.any(value < 0):
        raise ValueError(
            f"{name} is never negative; got {value[value < 0].flat[0]}. Use np.abs first."
        )
    return value


def round_to_power_of_two(scale: np.ndarray, *, by_log2: bool) -> np.ndarray:
    """The largest power of two not above the scale, by its bits or by RN32(log2) (spec S-4).

    Shapes:   float32 of any shape, and so the result.
    Specials: zero, infinity and NaN stay; by its bits a subnormal scale becomes 0; by log2 the 44
              largest scales become infinite.
    """
    if by_log2:
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            k = np.floor(np.log2(scale.astype(np.float64)).astype(np.float32))
            # in float64, exact: on some CPUs NumPy's float32 power of 127 is an ulp too large
            return np.exp2(k.astype(np.float64)).astype(np.float32)
    bits = scale.view(np.uint32) & np.uint32(0xFF800000)
    # a NaN's mantissa is what makes it one
    return np.where(np.isnan(scale), scale, bits.view(np.float32))


def _ratio(amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> np.ndarray:
    """The scale before any power of two; amax is float64: a float32 number or eps."""
    limit = fmt.max * 2.0**-policy.margin
    if policy.ratio == "max*(1/amax)":
        return np.float32(limit) * (1 / amax).astype(np.float32)
    # A float64 quotient of float32 numbers, rounded again to float32, is the quotient rounded once:
    # 53 >= 2 * 24 + 2 (Figueroa, "When is double rounding innocuous?", 1995). eps is a float64 that
    # is not a float32, but then the quotient is one constant, far from a tie.
    return (limit / amax).astype(np.float32)


def _scale_inv_ratio(amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> np.ndarray:
    """scale_inv before any power of two: float32 of amax's shape (S-14, S-17)."""
    floored = np.maximum(amax, np.float32(policy.eps))  # a NaN stays
    if policy.ratio == "amax*(1/max)":
        return floored * np.float32(1 / fmt.max)
    return (floored.astype(np.float64) / fmt.max).astype(np.float32)


def _scale_inv(amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> np.ndarray:
    """scale_inv, unless e8m0: float32 of amax's shape (S-17, S-20)."""
    scale_inv = _scale_inv_ratio(amax, fmt, policy)
    # Rounded before the comparison, as in arrays of that dtype, and again after the factor.
    scale_inv = np.asarray(cast.round_to(scale_inv, policy.compute))
    scale_inv = np.where(scale_inv < policy.one_below, np.float32(policy.replaced), scale_inv)
    scale_inv = np.asarray(
        cast.round_to(scale_inv * np.float32(policy.factor), policy.scale_dtype), np.float32
    )
    if policy.power_of_two == "cut":
        scale_inv = (scale_inv.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    elif policy.power_of_two == "up":  # infinity stays, and so does a NaN
        up = (scale_inv.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)
        scale_inv = np.where(np.isnan(scale_inv), scale_inv, up.view(np.float32))
    elif policy.power_of_two == "exp2_log2":
        k = np.ceil(np.log2(scale_inv.astype(np.float64)).astype(np.float32))
        scale_inv = np.exp2(k.astype(np.float64)).astype(np.float32)
    return scale_inv[()]


_LARGEST = {"float32_max": np.float32(FLOAT32.max), "bfloat16_max": np.float32(BFLOAT16.max)}


def _overflow(scale: np.ndarray, policy: ScalePolicy) -> np.ndarray:
    """The policy's largest scale in place of an infinite one."""
    if policy.overflow == "inf":
        return scale
    return np.where(np.isinf(scale), _LARGEST[policy.overflow], scale)


def _e8m0_scales(amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> Scales:
    """scale_inv = 2^k, -127 <= k <= 127, or NaN; scale = 2^-k unless the rule differs (S-14)."""
    assert policy.e8m0 is not None
    if policy.e8m0.scale_of_nan == "as_infinite":
        amax = np.where(np.isnan(amax), np.float32(np.inf), amax)
    elif policy.e8m0.scale_of_nan == "as_zero":
        amax = np.where(np.isnan(amax), np.float32(0), amax)
    emax = math.frexp(fmt.max)[1] - 1
    if policy.of_exponents:
        k = _exponent(amax, fmt, policy) - emax
    else:
        quotient = _scale_inv_ratio(amax, fmt, policy).astype(np.float64)
        if policy.power_of_two == "exp2_log2":
            k = np.ceil(np.log2(quotient).astype(np.float32))
        else:
            fraction, k = np.frexp(
                quotient
                # quotient = fraction * 2^k, fraction in [0.5, 1); at 0.5 a power of two stays
            )
            k = np.where(
                np.isinf(quotient), 127, np.where(quotient == 0, -127, k - (fraction == 0.5))
            )
    # an amax is infinite after it is rounded
    infinite = np.isinf(amax) | ((policy.ratio == "exponents_even") & (k + emax > 127))
    nan = np.isnan(amax) | (infinite & (policy.e8m0.infinite == "as_nan"))
    k = np.where(nan, 0, np.clip(k, -127, 127)).astype(np.int64)
    scale = np.where(k == -127, policy.e8m0.scale_of_code_0, np.ldexp(1.0, -k))
    scale = np.where(nan, 0.0 if policy.e8m0.scale_of_nan == "zero" else np.nan, scale)
    scale_inv = np.where(nan, np.nan, np.ldexp(1.0, k))
    return Scales(scale.astype(np.float32)[()], scale_inv.astype(np.float32)[()])


def _exponent(amax: np.ndarray, fmt: Format, policy: ScalePolicy) -> np.ndarray:
    """log2 of amax as an integer, with the policy's rule (S-14, S-20); arbitrary for NaN."""
    if policy.power_of_two == "exp2_log2":
        return np.floor(np.log2(amax.astype(np.float64)).astype(np.float32))
    # By the exponent field: that of a subnormal is 0, far below the clip all the same.
    bits = amax.view(np.uint32)
    if policy.ratio == "exponents_even":  # half of the format's last place is added: ties go up
        bits = np.where(np.isnan(amax), bits, bits + np.uint32(1 << (22 - fmt.mantissa_bits)))
    up = (bits & np.uint32(0x7FFFFF) != 0) & (policy.ratio == "exponents_up")
    return (bits >> np.uint32(23)).astype(np.int64) - 127 + up
