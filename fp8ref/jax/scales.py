"""From an amax to the scales of a policy (SEMANTICS S-3, S-4, S-9, S-14)."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8ref import formats
from fp8ref import policy as policies
from fp8ref.formats import Format
from fp8ref.policy import ScalePolicy


class Scales(NamedTuple):
    """scale multiplies into FP8, scale_inv out of it; float32 of one shape."""

    scale: jax.Array
    scale_inv: jax.Array


def scales_from_amax(amax: jax.Array, fmt: Format, policy: str | ScalePolicy = "torchao") -> Scales:
    """scale and scale_inv of a policy (SEMANTICS S-3, S-4, S-9, S-14): the simulator's, bit for bit.

    Shapes:   amax float32, any shape; both scales float32 of that shape.
    Order:    RN32(fmt.max / max(amax, eps)), its power of two if asked, RN32(1 / scale); or exactly 2^-k and 2^k under e8m0.
    Specials: zero amax -> RN32(fmt.max / eps); Inf -> 0; NaN -> NaN. e8m0: S-14.
    Raises:   ValueError: a policy that this backend does not implement.
    """
    policy = implemented(policy)
    formats.check(fmt)
    if policy.e8m0:
        return _e8m0_scales(amax, fmt, policy)
    return with_inverse(_floored_quotient(amax, fmt, policy)) if policy.power_of_two is None else _power_of_two_scales(amax, fmt, policy)


def scale_from_amax(amax: jax.Array, fmt: Format, policy: str | ScalePolicy = "torchao") -> jax.Array:
    """The factor that multiplies into FP8: ``scales_from_amax(...).scale``."""
    return scales_from_amax(amax, fmt, policy).scale


def with_inverse(scale: jax.Array) -> Scales:
    """The scale and RN32(1 / scale), past a barrier without which XLA makes amax / 448 of 1 / (448 / amax)."""
    scale = lax.optimization_barrier(scale)
    return Scales(scale, 1 / scale)


def flax_scale_inv(amax: jax.Array, previous: jax.Array, fmt: Format) -> jax.Array:
    """scale_inv of policy ``flax`` (SEMANTICS S-9, S-13), past no barrier: XLA then makes of it what it makes of flax's own.

    Specials: an amax of zero, Inf or NaN gives the previous one through two reciprocals; one that XLA flushes is zero.
    Source:   flax 0.12.8 linen/fp8_ops.py, compute_scale.
    """
    kept = 1 / previous
    scale = jnp.where(amax > 0, jnp.float32(fmt.max) / amax, kept)
    return 1 / jnp.where(jnp.isfinite(amax), scale, kept)


def times_e8m0(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RN32(x * scale), with a scale of 2^-127 too, a subnormal that XLA on a CPU would flush to zero."""
    least = lax.bitcast_convert_type(scale, jnp.int32) == 1 << 22
    return (x * jnp.where(least, 2.0**-64, 1)) * jnp.where(least, 2.0**-63, scale)


def implemented(policy: str | ScalePolicy) -> ScalePolicy:
    """The policy, if this backend implements it: those of torchao with eps and power of two of one's own (S-9), and e8m0 ones (S-14).

    Raises:   ValueError: any other; an eps below 1e-27. Below that a float32 subnormal, which XLA on a CPU flushes to zero, could
              leave a trace in the codes: 2^-126 * 57344 / 1e-27 < 2^-18, and with it no format shows one (S-3).
    """
    policy = policies.by_name(policy)
    if not policy.floored_quotient and policy.e8m0 is None:
        known = ", ".join(name for name, p in policies.POLICIES.items() if p.floored_quotient or p.e8m0)
        raise ValueError(f"fp8ref.jax scales by {known}; got policy {policy.name!r}. Use one of these, or fp8ref.sim for {policy.name!r}.")
    if policy.floored_quotient and policy.eps < 1e-27:
        raise ValueError(
            f"fp8ref.jax needs eps >= 1e-27, as XLA flushes subnormals (S-3); got policy {policy.name!r} with eps={policy.eps}."
        )
    return policy


def _floored_quotient(amax: jax.Array, fmt: Format, policy: ScalePolicy) -> jax.Array:
    return jnp.where(amax < _smallest(policy), np.float32(fmt.max / policy.eps), np.float32(fmt.max) / amax)


def _power_of_two_scales(amax: jax.Array, fmt: Format, policy: ScalePolicy) -> Scales:
    """Of the quotient of S-3 the power of two not above it (S-4), from the amax's own bits, and its reciprocal, exact both. The scale comes of a
    division, as XLA repeats integer operations, and a division not, for every element that is scaled.

    fmt.max / amax = 2^k * M / m, with M and m the two significands: not below 2^k while m <= M, and for a few ulps of m more, which rounding
    the quotient, or its logarithm, hides: n ulps of a quotient below 2^k are M / 2 * n ulps of m.
    """
    significand, exponent = math.frexp(fmt.max)
    of_eps, by_log2 = np.float32(fmt.max / policy.eps), policy.power_of_two == "exp2_log2"
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    field, mantissa = bits >> 23, bits & 0x7FFFFF
    n = _hidden_by_logarithm(exponent - 1 - (field - 127)) if by_log2 else 0
    hidden = ((2 * n + 1) * int(significand * 64)) >> 7  # floor((n + 1/2) M / 2), which is never near an integer
    field += (mantissa > int((significand * 2 - 1) * 2**23) + hidden) - (exponent - 1)
    floor = math.floor(np.float32(math.log2(of_eps))) if by_log2 else math.frexp(of_eps)[1] - 1
    field = jnp.where(amax < _smallest(policy), 127 - floor, field)
    scale = 1 / jnp.where(jnp.isfinite(amax), lax.bitcast_convert_type(field << 23, jnp.float32), amax)
    # 2^-k of the bits of 2^k: scale_inv then needs neither a kernel of its own nor all of the above for every element.
    inverse = lax.bitcast_convert_type((254 << 23) - lax.bitcast_convert_type(scale, jnp.int32), jnp.float32)
    return Scales(scale, jnp.where(scale > 0, inverse, jnp.inf - scale))


def _smallest(policy: ScalePolicy) -> np.float32:
    """The smallest float32 not below eps."""
    smallest = np.float32(policy.eps)
    return smallest if float(smallest) >= policy.eps else np.nextafter(smallest, np.float32(1))


def _hidden_by_logarithm(k: jax.Array) -> jax.Array:
    """How many ulps below the next power of two, 2^k, RN32(log2 s) is k already (S-4): floor(ln 2 * 2^e).

    For s = 2^k (1 - n 2^-24), log2 s = k - n 2^-24 / ln 2, which rounds to k if it is not half an ulp away. Just below k lie numbers of
    binade e = floor(log2 j), j = k - 1 if k > 0 and else -k, whose half ulp is 2^(e - 24); from n = 1 on, but for j = 0.
    """
    j = jnp.maximum(jnp.maximum(k - 1, -k), 1)
    return ((1 << (31 - lax.clz(j))) * 45426) >> 16  # 45426 = floor(ln 2 * 2^16), enough for e < 7


def _e8m0_scales(amax: jax.Array, fmt: Format, policy: ScalePolicy) -> Scales:
    """scale_inv = 2^k, k in [-127, 127], or NaN; scale = 2^-k but where the policy's rule says otherwise (S-14)."""
    assert policy.e8m0 is not None
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    field, mantissa = bits >> 23, bits & 0x7FFFFF
    k = field - 127 - (math.frexp(fmt.max)[1] - 1)
    if policy.ratio == "amax/max":  # rounded up, where the mantissa is above fmt.max's, and by more than the roundings hide
        k += mantissa > jnp.asarray(_last_not_rounded_up(fmt, policy)).at[field].get(mode="promise_in_bounds")
        k = jnp.where(field == 255, 127, k)  # of infinity, the quotient is infinite too
    k = jnp.clip(k, -127, 127)
    nan = jnp.isnan(amax)
    scale = jnp.where(k == -127, jnp.float32(policy.e8m0.scale_of_code_0), _two_to_the(-k))
    of_nan = 0.0 if policy.e8m0.scale_of_nan == "zero" else jnp.nan
    return Scales(jnp.where(nan, of_nan, scale), jnp.where(nan, jnp.nan, _two_to_the(k)))


def _two_to_the(k: jax.Array) -> jax.Array:
    """2^k, k in [-127, 127], from its bits: 2^-127 is a subnormal."""
    return lax.bitcast_convert_type(jnp.where(k == -127, 1 << 22, (k + 127) << 23).astype(jnp.int32), jnp.float32)


@functools.cache
def _last_not_rounded_up(fmt: Format, policy: ScalePolicy) -> np.ndarray:
    """int32 [256]: for each exponent field of an amax, the largest mantissa whose RN32(amax / fmt.max) is not rounded up past its power of two.

    That is fmt.max's own mantissa, but for a few ulps that the quotient's rounding, or the logarithm's, hides: 39 at most under
    RN32(log2), as S-14 counts them, so that 64 are looked at.
    """
    own = int(np.float32(fmt.max).view(np.int32)) & 0x7FFFFF
    field, mantissa = np.arange(1, 255)[:, None], own + np.arange(64)
    amax = ((field << 23) | mantissa).astype(np.int32).view(np.float32)
    quotient = (amax.astype(np.float64) / fmt.max).astype(np.float32).astype(np.float64)
    power = 2.0 ** (field - 127 - (math.frexp(fmt.max)[1] - 1))  # of amaxes up to own
    if policy.power_of_two == "exp2_log2":
        with np.errstate(divide="ignore"):
            hidden = np.ceil(np.log2(quotient).astype(np.float32)) <= np.log2(power)
    else:
        hidden = quotient <= power
    last = np.full(256, own, np.int32)
    last[1:255] = own + hidden.sum(1) - 1
    return last
