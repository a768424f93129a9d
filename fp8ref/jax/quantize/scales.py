"""Scales from an amax (spec S-3, S-4, S-9, S-14, S-17): the simulator's bits, under XLA.

XLA's log2 and exp2 are approximations and XLA on a CPU flushes subnormals. So powers of two are
taken from the bits of the amax, with a table of 256 entries that NumPy computes, one for each
exponent field (``_steps``).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref import formats
from fp8ref.formats import FP4_FORMATS, Format
from fp8ref.jax.quantize import division
from fp8ref.policy import ScalePolicy
from fp8ref.shared import errors
from fp8ref.spec import support

__all__ = ["Scales", "implemented", "scale_from_amax", "scales_from_amax", "with_inverse"]


class Scales(NamedTuple):
    """scale multiplies into FP8, scale_inv out of it; float32 of one shape."""

    scale: Array
    scale_inv: Array


class TwoLevelScales(NamedTuple):
    """``Scales`` of blocks, and tensor_scale_inv, float32 () or None: it multiplies out of FP4 too
    (S-22)."""

    scale: Array
    scale_inv: Array
    tensor_scale_inv: Array | None


# traced once for all layers of a shape
@functools.partial(jax.jit, static_argnames=("fmt", "policy"))
def scales_from_amax(amax: Array, fmt: Format, policy: str | ScalePolicy = "torchao") -> Scales:
    """scale and scale_inv of a policy (spec S-3, S-4, S-9, S-14, S-17): the simulator's bits.

    Shapes:   amax float32, any shape; both scales float32 of that shape.
    Order:    RN32(fmt.max / max(amax, eps)), its power of two if asked, RN32(1 / scale); exactly
              2^-k and 2^k under e8m0; or a float32 scale_inv first, and its reciprocal (S-17).
    Specials: zero amax -> RN32(fmt.max / eps); Inf -> 0; NaN -> NaN. e8m0: S-14.
    Raises:   ValueError: a policy that this backend does not implement, or not for e2m1fn.
    """
    policy = implemented(policy)
    formats.check(fmt)
    if fmt.name in FP4_FORMATS:
        support.require("scale policies of e2m1fn", "jax", policy)
    errors.require(
        policy.two_level is None,
        f"policy {policy.name!r} needs the amax of the tensor too; got those of blocks alone. Use "
        "scaling.quantize.",
    )
    if policy.unscaled:
        return Scales(jnp.ones_like(amax, jnp.float32), jnp.ones_like(amax, jnp.float32))
    if policy.e8m0:
        return _e8m0_scales(amax, fmt, policy)
    if policy.makes_scale_inv:
        return _ratio_scales(amax, fmt, policy)
    if policy.power_of_two is None:
        return _quotient_scales(amax, fmt, policy)
    return _power_of_two_scales(amax, fmt, policy)


def scale_from_amax(amax: Array, fmt: Format, policy: str | ScalePolicy = "torchao") -> Array:
    """The factor that multiplies into FP8: ``scales_from_amax(...).scale``. Shapes, order, specials
    and what it raises are the same."""
    return scales_from_amax(amax, fmt, policy).scale


def with_inverse(scale: Array) -> Scales:
    """The scale, float32 of any shape, and RN32(1 / scale)."""
    # Without the barrier XLA makes 1 / (448 / amax) amax / 448, which rounds once, not twice.
    scale = lax.optimization_barrier(scale)
    return Scales(scale, division.divide(1, scale))


def flax_scale_inv(amax: Array, previous: Array, fmt: Format) -> Array:
    """scale_inv of policy ``flax`` (S-9, S-13). No barrier: XLA rewrites it as it does Flax's own.

    Shapes:   amax and previous, the scale_inv before, float32 of one shape; and so the result.
    Specials: an amax of zero, Inf or NaN keeps the previous one, through two reciprocals; a
              subnormal amax that XLA flushes counts as zero.
    Source:   flax 0.12.8 linen/fp8_ops.py, compute_scale.
    """
    kept = 1 / previous
    scale = jnp.where(amax > 0, jnp.float32(fmt.max) / amax, kept)
    return 1 / jnp.where(jnp.isfinite(amax), scale, kept)


def times_e8m0(x: Array, scale: Array) -> Array:
    """RN32(x * scale); also for 2^-127, a subnormal scale that XLA on a CPU would flush to zero."""
    least = lax.bitcast_convert_type(scale, jnp.int32) == 1 << 22
    return (x * jnp.where(least, 2.0**-64, 1)) * jnp.where(least, 2.0**-63, scale)


def implemented(policy: str | ScalePolicy) -> ScalePolicy:
    """The policy, if this backend implements it (``spec.support``): torchao's with any eps and
    power of two (S-9), and those that make scale_inv (S-14, S-17). ValueError for any other."""
    return support.scale_policy(policy, "jax")


def _quotient_scales(amax: Array, fmt: Format, policy: ScalePolicy) -> Scales:
    """The quotient of S-3 and its reciprocal; barriers keep them from being recomputed."""
    scale = jnp.where(
        amax < _smallest(policy), np.float32(fmt.max / policy.eps), division.divide(fmt.max, amax)
    )
    # XLA would rewrite 1 / (448 / amax) as amax / 448, which rounds once instead of twice. It does
    # not see that these bits stay as they are: no scale is negative.
    bits = lax.bitcast_convert_type(scale, jnp.int32) & np.int32(0x7FFFFFFF)
    inverse = division.divide(1, lax.bitcast_convert_type(bits, jnp.float32))
    return Scales(lax.optimization_barrier(scale), lax.optimization_barrier(inverse))


def _ratio_scales(amax: Array, fmt: Format, policy: ScalePolicy) -> Scales:
    """scale_inv from the floored amax, and RN32(1 / scale_inv) (S-17)."""
    floored = jnp.where(amax < _smallest(policy), np.float32(policy.eps), amax)
    # XLA makes a division by a constant a product with its reciprocal, which rounds twice, past a
    # barrier too. To XLA this divisor is no constant; in fact no amax is negative.
    divisor = jnp.where(floored < 0, jnp.float32(1), jnp.float32(fmt.max))
    scale_inv = (
        floored * np.float32(1 / fmt.max)
        if policy.ratio == "amax*(1/max)"
        else division.divide(floored, divisor)
    )
    # Without this barrier XLA rewrites 1 / (amax / max) as max / amax, which rounds once.
    scale_inv = lax.optimization_barrier(scale_inv)
    return Scales(division.divide(1, scale_inv), scale_inv)


def _power_of_two_scales(amax: Array, fmt: Format, policy: ScalePolicy) -> Scales:
    """The power of two at most the quotient of S-3, and its exact reciprocal (S-4)."""
    # The scale is the result of a division: XLA would repeat integer operations for every element
    # that is scaled, but it does not repeat a division.
    inverse = lax.bitcast_convert_type(_exponent_field(amax, fmt, policy) << 23, jnp.float32)
    scale = division.divide(1, jnp.where(jnp.isnan(amax), amax, inverse))
    # 2^k of the bits of 2^-k: scale_inv needs no kernel, nor all of the above an element.
    inverse = lax.bitcast_convert_type(
        (254 << 23) - lax.bitcast_convert_type(scale, jnp.int32), jnp.float32
    )
    return Scales(scale, jnp.where(scale > 0, inverse, jnp.inf - scale))


def _smallest(policy: ScalePolicy) -> np.float32:
    """The smallest float32 not below eps."""
    smallest = np.float32(policy.eps)
    if float(smallest) >= policy.eps:
        return smallest
    return np.nextafter(smallest, np.float32(1))


def _e8m0_scales(amax: Array, fmt: Format, policy: ScalePolicy) -> Scales:
    """scale_inv = 2^k, -127 <= k <= 127, or NaN; scale = 2^-k unless the rule differs (S-14)."""
    assert policy.e8m0 is not None
    if policy.e8m0.scale_of_nan == "as_infinite":
        amax = jnp.where(jnp.isnan(amax), jnp.inf, amax)
    field = _exponent_field(amax, fmt, policy)
    nan = jnp.isnan(amax)
    scale = jnp.where(
        field == 0, jnp.float32(policy.e8m0.scale_of_code_0), _two_to_the(254 - field)
    )
    nan_scale = 0.0 if policy.e8m0.scale_of_nan == "zero" else jnp.nan
    return Scales(jnp.where(nan, nan_scale, scale), jnp.where(nan, jnp.nan, _two_to_the(field)))


def _two_to_the(field: Array) -> Array:
    """2^(field - 127) from its bits, field in [0, 254]; 2^-127 is subnormal."""
    return lax.bitcast_convert_type(jnp.where(field == 0, 1 << 22, field << 23), jnp.float32)


def _exponent_field(amax: Array, fmt: Format, policy: ScalePolicy) -> Array:
    """k + 127 of scale_inv = 2^k; 255 for infinity, arbitrary for NaN (S-4, S-14)."""
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    # A table look-up, because XLA's log2 is an approximation.
    field = lax.bitcast_convert_type(amax, jnp.uint32) >> 23
    steps = jnp.asarray(_steps(fmt, policy)).at[field].get(mode="promise_in_bounds")
    return (bits + steps) >> 23


@functools.lru_cache(maxsize=256)
def _steps(fmt: Format, policy: ScalePolicy) -> np.ndarray:
    """int32 [256]: by amax's exponent field, what to add to amax's bits so that the exponent field
    becomes scale_inv's. In a binade scale_inv at most doubles past a mantissa, as a carry does."""
    binade = np.arange(256) << 23
    first = _rounded_field(binade, fmt, policy)
    # By bisection over the 23 mantissa bits.
    # the last mantissa of that value, found a bit at a time; infinity has but one
    last = np.zeros(256, np.int64)
    for bit in 2 ** np.arange(22, -1, -1):
        last[:255] += bit * (
            _rounded_field((binade + last + bit)[:255], fmt, policy) == first[:255]
        )
    return ((first << 23) - binade + (2**23 - 1 - last)).astype(np.int32)


def _rounded_field(bits: np.ndarray, fmt: Format, policy: ScalePolicy) -> np.ndarray:
    """The exponent fields of scale_inv for amax's bits (S-4, S-14); in NumPy."""
    amax = np.maximum(
        bits.astype(np.int32).view(np.float32).astype(np.float64),
        np.float32(policy.eps) if policy.e8m0 else policy.eps,
    )
    with np.errstate(divide="ignore", over="ignore"):
        if policy.ratio == "exponents":
            k = (bits >> 23) - 127 - math.floor(math.log2(fmt.max))
        else:
            if policy.ratio == "amax*(1/max)":
                quotient = amax.astype(np.float32) * np.float32(1 / fmt.max)
            else:
                quotient = amax / fmt.max if policy.e8m0 else fmt.max / amax
            quotient = quotient.astype(np.float32).astype(np.float64)
            log2 = np.log2(quotient if policy.e8m0 else 1 / quotient)
            k = np.ceil(log2.astype(np.float32) if policy.power_of_two == "exp2_log2" else log2)
    return np.clip(k + 127, *((0, 254) if policy.e8m0 else (1, 255))).astype(np.int64)
