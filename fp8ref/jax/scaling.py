"""From a tensor to its amax, from an amax to a scale, from a scale to codes (SEMANTICS S), guarded against XLA's rewrites.

Three guards keep XLA to the specification: operands pass ``reduce_precision`` (cast.to_f32), the scale passes an
optimization barrier before its reciprocal (or 1 / (448 / amax) is folded into amax / 448, an ulp off), and powers of
two are taken from bits (XLA's log2 and exp2 are approximations).
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8ref import granularity as granularities
from fp8ref import policy as policies
from fp8ref.formats import Format
from fp8ref.jax import cast
from fp8ref.policy import ScalePolicy

GRANULARITIES = ("tensorwise", "rowwise")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scale", "scale_inv"], meta_fields=["fmt", "granularity", "axis"]
)
@dataclass(frozen=True, kw_only=True)
class Quantized:
    """An FP8 tensor: hp ~ decode(codes) * scale_inv. codes is native float8; fmt, granularity and axis are static."""

    codes: jax.Array
    scale: jax.Array
    scale_inv: jax.Array
    fmt: Format
    granularity: str
    axis: int


def amax(x: jax.Array, granularity: str = "tensorwise", *, axis: int = -1) -> jax.Array:
    """The largest magnitude of every group that shares a scale (SEMANTICS S-2).

    Shapes:   x hp, any rank; float32 of ``scale_shape(granularity, x.shape, axis)``; axis is the reduced one.
    Specials: NaN if any element is NaN; XLA on a CPU takes subnormals for zero, which no policy distinguishes.
    Raises:   ValueError: x empty or not float32, float16 or bfloat16; a granularity other than tensorwise and rowwise.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"fp8ref.jax scales {' or '.join(GRANULARITIES)}; got {granularity!r}.")
    granularities.blocks(granularity, x.shape, axis)  # refuses empty tensors and absent axes
    value = jnp.abs(cast.to_f32(x))
    return jnp.max(value) if granularity == "tensorwise" else jnp.max(value, axis=axis, keepdims=True)


def scale_from_amax(amax: jax.Array, fmt: Format, policy: str | ScalePolicy = "torchao") -> jax.Array:
    """The factor that multiplies into FP8: RN32(fmt.max / max(amax, eps)), then its power of two if asked (SEMANTICS S-3, S-4).

    Shapes:   amax float32, any shape; float32 of the same shape.
    Specials: zero amax -> RN32(fmt.max / eps); Inf -> 0; NaN -> NaN.
    Raises:   ValueError: a policy that this backend does not implement.
    """
    policy = implemented(policy)
    smallest = np.float32(policy.eps)  # the smallest float32 not below eps
    if float(smallest) < policy.eps:
        smallest = np.nextafter(smallest, np.float32(1))
    scale = jnp.where(amax < smallest, np.float32(fmt.max / policy.eps), np.float32(fmt.max) / amax)
    return scale if policy.power_of_two is None else _power_of_two(scale, exp2_log2=policy.power_of_two == "exp2_log2")


def implemented(policy: str | ScalePolicy) -> ScalePolicy:
    """The policy, if this backend implements it: those of torchao, with eps and power of two of one's own (SEMANTICS S-9).

    Raises:   ValueError: any other; an eps below 1e-27. Below that a float32 subnormal, which XLA on a CPU flushes to zero, could
              leave a trace in the codes: 2^-126 * 57344 / 1e-27 < 2^-18, and with it no format shows one (S-3).
    """
    policy = policies.by_name(policy)
    if not policy.floored_quotient:
        known = ", ".join(name for name, p in policies.POLICIES.items() if p.floored_quotient)
        raise ValueError(f"fp8ref.jax scales by {known}; got policy {policy.name!r}. Use one of these, or fp8ref.sim for {policy.name!r}.")
    if policy.eps < 1e-27:
        raise ValueError(
            f"fp8ref.jax needs eps >= 1e-27, as XLA flushes subnormals (S-3); got policy {policy.name!r} with eps={policy.eps}."
        )
    return policy


def quantize(
    x: jax.Array, fmt: Format, *, granularity: str = "tensorwise", policy: str | ScalePolicy = "torchao", axis: int = -1
) -> Quantized:
    """Scale x into fmt's range and round to nearest even, saturating.

    Shapes:   x hp [..., K] (axis is the reduced one); codes native float8 of x's shape; scales of ``scale_shape``.
    Units:    x ~ decode(codes) * scale_inv.
    Order:    amax; scale; RN32(f32(x) * scale); clip to +-fmt.max; round to nearest even; scale_inv = RN32(1 / scale).
    Specials: as the simulator's quantize.
    Gradient: whatever XLA's conversions give; ``linear.apply`` defines its own, and a user of codes should stop it.
    Raises:   ValueError: as amax and scale_from_amax.
    Source:   SEMANTICS S-5.
    """
    return quantize_with(x, scale_from_amax(amax(x, granularity, axis=axis), fmt, policy), fmt, granularity=granularity, axis=axis)


def quantize_with(x: jax.Array, scale: jax.Array, fmt: Format, *, granularity: str = "tensorwise", axis: int = -1) -> Quantized:
    """quantize, by a scale that is there already, such as a delayed state's. Shapes, order, specials and gradient as quantize.

    Raises:   ValueError: a scale of another shape than ``scale_shape`` gives.
    """
    shape = granularities.scale_shape(granularity, x.shape, axis)
    if scale.shape != shape:
        raise ValueError(f"{granularity} scales of x.shape={x.shape} have shape {shape}; got {scale.shape}.")
    scale = lax.optimization_barrier(scale)
    codes = cast.to_fp8(cast.to_f32(x) * scale, fmt)
    return Quantized(codes=codes, scale=scale, scale_inv=1 / scale, fmt=fmt, granularity=granularity, axis=axis)


def dequantize(q: Quantized) -> jax.Array:
    """RN32(decode(codes) * scale_inv), float32 of the codes' shape (SEMANTICS S-8)."""
    return cast.decode(q.codes, q.fmt) * q.scale_inv


def _power_of_two(scale: jax.Array, *, exp2_log2: bool) -> jax.Array:
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    if exp2_log2:  # carry into the exponent the few scales whose float32 logarithm is already the next integer
        bits = bits + jnp.asarray(_ulps_rounded_up())[(bits >> 23) & 0xFF]
    floor = lax.bitcast_convert_type(bits & jnp.int32(np.int32(-(1 << 23))), jnp.float32)
    return jnp.where(jnp.isnan(scale), scale, floor)


@functools.cache
def _ulps_rounded_up() -> np.ndarray:
    """int32 [256]: for each exponent field, how many ulps below the next power of two 2^k RN32(log2 s) is k already (S-4).

    Half an ulp of k, |k| < 128, is at most 2^-18, and log2(2^k (1 - d)) = k - d / ln 2 up to d^2: d <= ln 2 * 2^-18 is
    at most 45 ulps of 2^-24.
    """
    field = np.arange(1, 255)
    k = field - 126
    below = 1 - np.arange(1, 64) * 2.0**-24  # s = 2^k * below, a float32
    log2 = (k[:, None] + np.log2(below)).astype(np.float32)
    counts = np.zeros(256, np.int32)
    counts[field] = (log2 == k[:, None]).sum(1)
    return counts
