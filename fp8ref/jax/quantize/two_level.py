"""Scales of blocks in e4m3fn under a float32 scale of the tensor, for e2m1fn (spec S-22).

Every product and quotient is rounded once to float32. XLA would make a quotient by a constant, or
by one number for a whole array, a product with its reciprocal, and 1 / (2688 / amax) amax / 2688:
``_quotient`` and barriers keep it from that.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.formats import E2M1FN, FLOAT32
from fp8ref.jax.quantize import cast, division, four_bits
from fp8ref.jax.quantize.scales import TwoLevelScales
from fp8ref.policy import ScalePolicy, TwoLevel

_TOP, _LARGEST = np.float32(E2M1FN.max), np.float32(FLOAT32.max)


def scales_from_amaxes(
    amax: Array, tensor_amax: Array, policy: ScalePolicy, *, times: float = 1
) -> TwoLevelScales:
    """The scales of blocks, and the tensor's; of four over six, those of blocks scaled to 6, or
    with times 1.5 to 4.

    Shapes:   amax float32 of the blocks' shape; tensor_amax float32 ().
    Order:    ``encode``: S = min(RN(2688 / tensor_amax), float32's max), 1 where tensor_amax is 0;
              block = RN(amax * RN(S * RN(1/6))); scale = min(RN(1 / RN(block * RN(1/S))), float32's
              max). ``decode``: T = RN(tensor_amax / 2688); block = RN(RN(amax / 6) / T); scale =
              RN(RN(1/T) / block). ``none``: T = 1. block is raised to the policy's smallest,
              lowered to 448, and rounded to e4m3fn before scale is made. Of four over six block =
              RN(RN(RN(amax / 6) * S) * times), and 6 * largest is for 2688.
    Specials: as IEEE 754 computes these, but for subnormal numbers, which XLA on a CPU flushes:
              those of tensors whose amax is below 2^-114.
    Source:   next to each policy in ``fp8ref/policies.toml``.
    """
    rule = policy.two_level
    assert rule is not None
    if rule.tensor == "encode":
        encode = _encode_scale(tensor_amax, rule)
        inverse = lax.optimization_barrier(division.divide(1, encode))
        by_six = lax.optimization_barrier(encode * (np.float32(1) / _TOP))
        to_six = _quotient(amax, _TOP) * encode if rule.error else amax * by_six
        block = _block_scale(to_six * np.float32(times), rule)
        scale = _smaller(division.divide(1, lax.optimization_barrier(block * inverse)), _LARGEST)
    else:
        inverse = jnp.float32(1)
        if rule.tensor == "decode":
            inverse = _quotient(tensor_amax, np.float32(rule.block_fmt.max * _TOP))
            inverse = lax.optimization_barrier(inverse)
        block = _block_scale(_quotient(_quotient(amax, _TOP), inverse), rule)
        scale = division.divide(lax.optimization_barrier(division.divide(1, inverse)), block)
    has_tensor = rule.tensor != "none"
    return TwoLevelScales(lax.optimization_barrier(scale), block, inverse if has_tensor else None)


def four_over_six(
    x: Array, amax: Array, tensor_amax: Array, policy: ScalePolicy, axis: int
) -> TwoLevelScales:
    """The scales of blocks of 16 along axis that four over six chooses (S-22).

    Shapes:   x of one axis or more; amax float32 of the blocks' shape; tensor_amax float32 ().
    Order:    of each scale and element e = RN(RN(RN(RN(q * block) * tensor_amax) / 6 largest) - x),
              q = RN(x * scale) cast to e2m1fn; of the unit ``block`` e = RN(q * block - RN(x *
              S)); the sum of |e|, or of RN(e * e), along the block; of a block of 16 rows, rows 8
              apart are added, then 4, 2 and 1 apart. A block is scaled to 4 where that is smaller.
    """
    rule = policy.two_level
    assert rule is not None
    lines = jnp.moveaxis(jnp.atleast_2d(cast.to_f32(x)), axis, -1)  # [..., M, K]
    grid = jnp.moveaxis(jnp.atleast_2d(amax), axis, -1)  # [..., M / rows, K / 16]
    rows = 1 if lines.shape[-2] == grid.shape[-2] else 16
    missing = [(0, 0)] * (lines.ndim - 2) + [(0, -lines.shape[-2] % rows), (0, 0)]
    blocks = jnp.pad(lines, missing).reshape(*grid.shape[:-1], rows, grid.shape[-1], 16)
    both = [scales_from_amaxes(grid, tensor_amax, policy, times=times) for times in (1, 1.5)]
    encode = _encode_scale(tensor_amax, rule)
    sums = []
    for by in both:
        scale, block = (v[..., None, :, None] for v in (by.scale, by.scale_inv))
        q = four_bits.rounded(blocks * scale)
        if rule.error_unit == "block":
            e = division.product(q, block) - division.product(blocks, encode)
        else:
            product = division.product(division.product(q, block), tensor_amax)
            most = np.float32(E2M1FN.max * rule.largest)
            e = jnp.copysign(_quotient(jnp.abs(product), most), product) - blocks
        sums.append(_sum_of_blocks(jnp.abs(e) if rule.error == "mae" else division.product(e, e)))
    six, four = both
    to_four = sums[1] < sums[0]
    scale, scale_inv = (
        jnp.moveaxis(jnp.where(to_four, b, a), -1, axis).reshape(amax.shape)
        for a, b in ((six.scale, four.scale), (six.scale_inv, four.scale_inv))
    )
    return TwoLevelScales(scale, scale_inv, six.tensor_scale_inv)


def _encode_scale(tensor_amax: Array, rule: TwoLevel) -> Array:
    """S, which multiplies into the range of the blocks' scales; float32 ()."""
    bounded = _smaller(division.divide(rule.largest * E2M1FN.max, tensor_amax), _LARGEST)
    one = (tensor_amax == 0) | (bounded == 0)
    return lax.optimization_barrier(jnp.where(one, jnp.float32(1), bounded))


def _block_scale(value: Array, rule: TwoLevel) -> Array:
    """value, at least the rule's smallest, rounded to its format, saturating; float32."""
    raised = jnp.where(value < np.float32(rule.smallest), np.float32(rule.smallest), value)
    # ends in integers, so that XLA leaves out no cast and its reverse
    return cast.decode(cast.encode(raised, rule.block_fmt), rule.block_fmt)


def _smaller(a: Array, b: np.float32) -> Array:
    """The smaller one; a NaN stays."""
    return jnp.where(a > b, b, a)


def _quotient(a: Array, b) -> Array:
    """RN32(a / b) of magnitudes a. No a is negative, so that b is no constant to XLA."""
    return division.divide(a, jnp.where(a < 0, jnp.float32(1), b))


def _sum_of_blocks(e: Array) -> Array:
    """float32 [..., rows, blocks, 16] -> [..., blocks]: along a row in order; rows in a tree."""
    total = e[..., 0]
    for i in range(1, e.shape[-1]):
        total = total + e[..., i]
    while (half := total.shape[-2] // 2) > 0:
        total = total[..., :half, :] + total[..., half:, :]
    return total[..., 0, :]
