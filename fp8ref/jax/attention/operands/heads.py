"""Quantize the tensors of attention: which elements share a scale, and the codes (spec A-2).

Tensors are [batch, heads, tokens, features]. Amaxes, scales and casts are those of ``scaling``,
``scales`` and ``cast``; only the groups are attention's own.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from fp8ref import policy as policies
from fp8ref.formats import BFLOAT16, FLOAT32, Format
from fp8ref.jax.quantize import cast, division, scales, scaling
from fp8ref.jax.quantize.scales import Scales
from fp8ref.policy import ScalePolicy
from fp8ref.spec.attention.variant import Granularity, blocks

_DTYPES = {BFLOAT16.name: jnp.bfloat16, FLOAT32.name: jnp.float32}


class Heads(NamedTuple):
    """A tensor of attention: hp ~ decode(codes) * scale_inv, scales spread over their groups.

    codes             native float8 [B, H, T, D]; in high precision the rounded tensor itself.
    amax              float32 of ``scale``'s shape: the amaxes of the groups.
    scale, scale_inv  float32: () for ``tensor`` and in high precision; [B, Hkv, 1, 1] for ``head``;
                      [B, H, ceil(T / 128), 1] for ``rows_128``; [B, H, T, D / 32], or along the
                      tokens [B, H, ceil(T / 32), D], for ``mx_1x32``.
    """

    codes: Array
    amax: Array
    scale: Array
    scale_inv: Array


def amax(
    x: Array,
    granularity: Granularity | None,
    *,
    heads: int,
    along_tokens: bool = False,
    over: tuple[str, ...] = (),
) -> Array:
    """The amax of each group of x [B, H, T, D], as ``Heads`` shapes them; NaN if an element is.

    over      mesh axes, inside shard_map, along which the amax of a tensor is taken too.

    Raises:   ValueError: for mx_1x32, features that 32 does not divide.
    """
    block = blocks(granularity, x.shape, heads=heads, along_tokens=along_tokens)
    return scaling.block_amax(x, block, over=over if granularity in ("tensor", None) else ())


def spread(
    scale: Array,
    shape: tuple[int, ...],
    granularity: Granularity | None,
    *,
    along_tokens: bool = False,
) -> Array:
    """Scales repeated over their groups, so that they broadcast against a tensor of this shape."""
    heads = scale.shape[1] if granularity == "head" else shape[1]
    return scaling.spread(
        scale, shape, blocks(granularity, shape, heads=heads, along_tokens=along_tokens)
    )


def quantize(
    x: Array,
    fmt: Format,
    granularity: Granularity | None,
    policy: str,
    *,
    heads: int,
    along_tokens: bool = False,
    scale: Array | None = None,
    over: tuple[str, ...] = (),
) -> Heads:
    """Codes of x; in high precision x rounded to fmt.

    heads         heads of keys and values, whose groups ``head`` means.
    along_tokens  MX blocks lie along the tokens.
    scale         given, of earlier steps; None: made of x's amaxes.
    over          mesh axes, inside shard_map, that cut a group ``tensor``.
    Shapes:   x hp [B, H, T, D]; see ``Heads``.
    Order:    amax; scale by the policy (S-9, S-14); RN32(x * scale); saturate; round to nearest
              even (S-5).
    Specials: an infinity or a NaN makes NaN of its group's codes, by the policy (S-3).
    Raises:   ValueError: a given scale of another shape or dtype; as amax.
    """
    amaxes = amax(x, granularity, heads=heads, along_tokens=along_tokens, over=over)
    if granularity is None:
        one = jnp.ones((), jnp.float32)
        return Heads(to_hp(x, fmt), amaxes, one, one)
    scale_policy = implemented(policy)
    if scale is None:
        by = scales_from_amax(amaxes, fmt, scale_policy)
    else:
        by = scales.with_inverse(given_scale(scale, amaxes.shape))
    # a given scale is any number, and no policy's scale_inv is stored here
    product = scale_policy if scale is None and scale_policy.e8m0 else None
    block = blocks(granularity, x.shape, heads=heads, along_tokens=along_tokens)
    codes = scaling.quantize_blocks(x, by, fmt, block, policy=product)
    return Heads(codes, amaxes, *by)


def implemented(policy: str) -> ScalePolicy:
    """The policy, if attention implements it here; ValueError otherwise."""
    rule = policies.by_name(policy)
    return rule if rule.finite_quotient else scales.implemented(rule)


def scales_from_amax(amax: Array, fmt: Format, policy: ScalePolicy) -> Scales:
    """scale and scale_inv of a policy (S-9, S-14), float32 of the shape of amax.

    Specials: under a ``finite_quotient`` the scale of a zero, infinite or NaN amax is 1, and one
              above float32's range is its maximum, whose scale_inv XLA flushes to zero.
    """
    if not policy.finite_quotient:
        return scales.scales_from_amax(amax, fmt, policy)
    # By bits, as XLA on a CPU takes a subnormal amax for zero. The quotient by any overflows.
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    normal = (bits >= 1 << 23) & jnp.isfinite(amax)
    scale = division.divide(fmt.max, jnp.where(normal, amax, jnp.float32(1)))
    scale = jnp.where(normal, jnp.minimum(scale, jnp.finfo(jnp.float32).max), jnp.float32(1))
    subnormal = (bits > 0) & (bits < 1 << 23)
    return scales.with_inverse(jnp.where(subnormal, jnp.finfo(jnp.float32).max, scale))


def given_scale(scale, shape: tuple[int, ...]) -> Array:
    """A scale of earlier steps. ValueError: another shape or dtype than float32."""
    kind = jnp.shape(scale), getattr(scale, "dtype", type(scale).__name__)
    if kind[0] != shape or kind[1] != jnp.float32:
        raise ValueError(f"a passed scale is float32 of shape {shape}; got {kind[1]} {kind[0]}.")
    return lax.stop_gradient(jnp.asarray(scale))


def to_hp(x: Array, fmt: Format) -> Array:
    """x rounded to a format of high precision, saturated, in its dtype."""
    value = cast.to_f32(x)
    if fmt == FLOAT32:
        return value
    # XLA may leave out a conversion to bfloat16 and back; this it keeps.
    return lax.reduce_precision(jnp.clip(value, -fmt.max, fmt.max), 8, 7).astype(_DTYPES[fmt.name])


def values(tensor: Heads, fmt: Format) -> Array:
    """The numbers of the codes, float32, without their scales."""
    return cast.decode(tensor.codes, fmt) if fmt.bits == 8 else tensor.codes.astype(jnp.float32)
