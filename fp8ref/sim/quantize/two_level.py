"""Scales of blocks in an 8-bit format, under a float32 scale of the tensor or row (spec S-22).

Every product and quotient is rounded once to float32, in the order of the library that a policy is
of. There is no compiled twin: scales are few.
"""

from typing import NamedTuple

import numpy as np

from fp8ref import formats
from fp8ref import policy as policies
from fp8ref.formats import E2M1FN, FLOAT32, Format
from fp8ref.policy import ScalePolicy
from fp8ref.shared.errors import require
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scales import magnitudes

__all__ = ["TwoLevelScales", "four_over_six", "scales_from_amaxes"]

_LARGEST = np.float32(FLOAT32.max)


class TwoLevelScales(NamedTuple):
    """The scales of a tensor and of its blocks (S-22).

    scale             float32 of the blocks' shape: a cast multiplies by it.
    scale_inv         float32 of that shape, numbers of e4m3fn: the scale of a block.
    tensor_scale_inv  float32 (), or a row's [M, 1]: x ~ decode(codes) * scale_inv *
                      tensor_scale_inv.
    """

    scale: np.ndarray
    scale_inv: np.ndarray
    tensor_scale_inv: np.ndarray


def scales_from_amaxes(
    amax,
    tensor_amax,
    fmt: Format | str = E2M1FN,
    policy: str | ScalePolicy = "te_nvfp4",
    *,
    times: float = 1,
) -> TwoLevelScales:
    """The scales of blocks from their amaxes and the tensor's. Of four over six, those of blocks
    that are scaled to 6; with times 1.5, to 4.

    Shapes:   amax float32 of the blocks' shape; tensor_amax float32 (), or rowwise with 1
              in place of the reduced axis's blocks; scales as ``TwoLevelScales``.
    Order:    ``encode``: S = min(RN(2688 / tensor_amax), float32's max), 1 where tensor_amax or S
              is 0; block = RN(amax * RN(S * RN(1/6))); scale = min(RN(1 / RN(block * RN(1/S))),
              float32's max). ``decode``: T = RN(tensor_amax / 2688); block = RN(RN(amax / 6) / T);
              scale = RN(RN(1/T) / block). ``none``: T = 1 throughout. block is raised to the
              policy's smallest, lowered to 448, and rounded to e4m3fn before scale is made. Of
              four over six block = RN(RN(RN(amax / 6) * S) * times), and 6 * largest is for 2688.
    Specials: as IEEE 754 computes these. A NaN amax gives NaN scales, a zero tensor NaN ones under
              ``decode``, and under ``encode`` blocks of 0 with float32's max as their scale.
    Raises:   ValueError: a fmt other than e2m1fn, a policy without two_level, amaxes as
              ``scales.magnitudes``, or a tensor_amax of another shape.
    Source:   next to each policy in ``fp8ref/policy.py``.

    >>> scales_from_amaxes(np.float32([6, 3]), np.float32(6)).scale_inv
    array([448., 224.], dtype=float32)
    """
    policy, fmt = policies.by_name(policy), formats.by_name(fmt)
    rule = policy.two_level
    if rule is None or fmt != E2M1FN:
        raise ValueError(
            f"two-level scales need {E2M1FN} and one of {', '.join(policies.FP4_POLICIES)}; got "
            f"{fmt}, policy {policy.name!r}. Use scales.scales_from_amax."
        )
    amax, tensor = magnitudes(amax, "amax"), magnitudes(tensor_amax, "tensor_amax")
    _check_shape(tensor.shape, amax.shape, rule)
    unit, top = np.float32(1), np.float32(fmt.max)
    with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
        if rule.tensor == "encode":
            encode = _encode_scale(tensor, rule)
            to_six = amax / top * encode if rule.error else amax * (encode * (unit / top))
            block = _block_scale(to_six * np.float32(times), rule)
            inverse = np.asarray(unit / encode)
            scale = np.minimum(unit / (block * inverse), _LARGEST)
        else:
            largest = np.float32(rule.block_fmt.max * fmt.max)
            inverse = np.asarray(tensor / largest if rule.tensor == "decode" else unit)
            block = _block_scale(amax / top / inverse, rule)
            scale = unit / inverse / block
    return TwoLevelScales(np.asarray(scale)[()], block, inverse.astype(np.float32)[()])


def _check_shape(tensor: tuple[int, ...], blocks: tuple[int, ...], rule: policies.TwoLevel) -> None:
    """ValueError unless amaxes of a tensor or its rows have the shape of their granularity."""
    shapes: list[tuple[int, ...]] = [()]
    if rule.tensor_granularity == "rowwise":
        shapes = [(*blocks[:i], 1, *blocks[i + 1 :]) for i in range(len(blocks))]
    require(
        tensor in shapes,
        f"{rule.tensor_granularity} amaxes of a tensor have shape "
        f"{' or '.join(map(str, shapes))}; got {tensor}. Use "
        f"scaling.amax(x, {rule.tensor_granularity!r}).",
    )


def _encode_scale(tensor: np.ndarray, rule: policies.TwoLevel) -> np.ndarray:
    """S, which multiplies into the range of the blocks' scales; float32 of the amaxes' shape."""
    with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
        bounded = np.minimum(np.float32(rule.largest * E2M1FN.max) / tensor, _LARGEST)
    return np.where((tensor == 0) | (bounded == 0), np.float32(1), bounded)


def _block_scale(value: np.ndarray, rule: policies.TwoLevel) -> np.ndarray:
    """value, at least the rule's smallest, rounded to its format, saturating; float32."""
    raised = np.maximum(value, np.float32(rule.smallest))  # a NaN stays
    return cast.round_to(raised, rule.block_fmt, saturate=True)


def four_over_six(
    x: np.ndarray, amax: np.ndarray, tensor_amax: np.ndarray, policy: ScalePolicy, axis: int
) -> TwoLevelScales:
    """The scales of blocks of 16 along axis that four over six chooses (S-22).

    Shapes:   x of one axis or more; amax float32 of the blocks' shape, of its rank; tensor_amax as
              ``scales_from_amaxes``.
    Order:    of each scale and element e = RN(RN(RN(RN(q * block) * tensor_amax) / 6 largest) - x),
              q = RN(x * scale) cast to e2m1fn; of the unit ``block`` e = RN(q * block - RN(x *
              S)); the sum of |e|, or of RN(e * e), along the block;
              of a block of 16 rows, rows 8 apart are added, then 4, 2 and 1 apart. A block is
              scaled to 4 where that sum is smaller.
    """
    rule, fmt = policy.two_level, E2M1FN
    assert rule is not None
    axis = axis if axis < 0 else axis - np.ndim(x)
    lines = np.moveaxis(np.atleast_2d(x.astype(np.float32)), axis, -1)  # [..., M, K]
    grid = np.moveaxis(np.atleast_2d(amax), axis, -1)  # [..., M / rows, K / 16]
    rows = 1 if lines.shape[-2] == grid.shape[-2] else 16
    missing = [(0, 0)] * (lines.ndim - 2) + [(0, -lines.shape[-2] % rows), (0, 0)]
    blocks = np.pad(lines, missing).reshape(*grid.shape[:-1], rows, grid.shape[-1], 16)

    def by_block(scale: np.ndarray) -> np.ndarray:
        """A scale of each block, to broadcast with blocks."""
        scales = np.broadcast_to(scale, amax.shape)
        return np.moveaxis(np.atleast_2d(scales), axis, -1)[..., None, :, None]

    tensor, encode = by_block(tensor_amax), by_block(_encode_scale(tensor_amax, rule))
    both = [scales_from_amaxes(amax, tensor_amax, fmt, policy, times=t) for t in (1, 1.5)]
    sums = []
    with np.errstate(over="ignore", invalid="ignore"):
        for scales in both:
            scale, block = map(by_block, scales[:2])
            q = cast.round_to(np.clip(blocks * scale, -fmt.max, fmt.max), fmt, saturate=True)
            if rule.error_unit == "block":
                e = q * block - blocks * encode
            else:
                e = q * block * tensor / np.float32(fmt.max * rule.largest) - blocks
            e = np.abs(e) if rule.error == "mae" else e * e
            sums.append(_sum_of_blocks(e))
    to_four = np.moveaxis(sums[1] < sums[0], -1, axis).reshape(amax.shape)
    six, four = both
    return TwoLevelScales(
        np.where(to_four, four.scale, six.scale),
        np.where(to_four, four.scale_inv, six.scale_inv),
        six.tensor_scale_inv,
    )


def _sum_of_blocks(e: np.ndarray) -> np.ndarray:
    """float32 [..., rows, blocks, 16] -> [..., blocks]: along a row in order; rows in a tree."""
    total = np.add.accumulate(e, axis=-1, dtype=np.float32)[..., -1]
    while (half := total.shape[-2] // 2) > 0:
        total = total[..., :half, :] + total[..., half:, :]
    return total[..., 0, :]
