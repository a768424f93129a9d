"""Scales of blocks in an 8-bit format, under a float32 scale of the tensor (spec S-22).

Every product and quotient is rounded once to float32. Quotients are taken in float64 and rounded,
which rounds as once: on a GPU torch multiplies by a reciprocal, and Triton's float32 division is
approximate. So are products that a sum follows, which a compiler might fuse with it.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fp8ref.formats import E2M1FN, FLOAT32, Format
from fp8ref.policy import ScalePolicy, TwoLevel
from fp8ref.shared import errors
from fp8ref.torch.quantize import cast, four_bits

__all__ = ["TwoLevelScales", "check", "scales"]

_SIX = E2M1FN.max


class TwoLevelScales(NamedTuple):
    """As the simulator's: scale and scale_inv of the blocks, float32; that of the tensor, (), or
    None where it has none."""

    scale: Tensor
    scale_inv: Tensor
    tensor_scale_inv: Tensor | None


def check(fmt: Format, granularity: str, policy: ScalePolicy) -> None:
    """ValueError unless two levels of scales go with a format and a granularity."""
    assert policy.two_level is not None
    errors.one_of(f"the format of {policy.name}", fmt.name, (E2M1FN.name,))
    errors.one_of(f"granularity of {policy.name}", granularity, policy.two_level.granularities)


def scales(
    x: Tensor, amax: Tensor, tensor_amax: Tensor, policy: ScalePolicy, axis: int
) -> TwoLevelScales:
    """The scales of a tensor's blocks, and its own.

    Shapes:   x hp [..., M, K], of which only four over six reads the elements; amax float32 of the
              blocks' shape; tensor_amax float32 ().
    Order, specials: as ``sim.quantize.two_level``.
    """
    rule = policy.two_level
    assert rule is not None
    result = _scaled_to(amax, tensor_amax, rule)
    if not rule.error:
        return result
    to_four = _scaled_to(amax, tensor_amax, rule, times=1.5)
    chosen = _errors(x, to_four, tensor_amax, rule, axis) < _errors(
        x, result, tensor_amax, rule, axis
    )
    scale, scale_inv = (
        torch.where(chosen, four, six) for four, six in zip(to_four[:2], result[:2], strict=True)
    )
    return TwoLevelScales(scale, scale_inv, result.tensor_scale_inv)


def _scaled_to(amax: Tensor, tensor: Tensor, rule: TwoLevel, times: float = 1) -> TwoLevelScales:
    """The scales by which amaxes become 6; with times 1.5, 4."""
    one = torch.ones_like(tensor)
    if rule.tensor == "encode":
        encode = _encode_scale(tensor, rule)
        if rule.error:
            to_six = _quotient(amax, one * _SIX) * encode * times
        else:
            to_six = amax * (encode * _quotient(one, one * _SIX))
        inverse = _quotient(one, encode)
        block = _block_scale(to_six, rule)
        scale = _quotient(one, block * inverse).clamp(max=FLOAT32.max)
        return TwoLevelScales(scale, block, inverse)
    decodes = rule.tensor == "decode"
    inverse = _quotient(tensor, one * (rule.block_fmt.max * _SIX)) if decodes else one
    block = _block_scale(_quotient(_quotient(amax, one * _SIX), inverse), rule)
    scale = _quotient(_quotient(one, inverse), block)
    return TwoLevelScales(scale, block, inverse if decodes else None)


def _encode_scale(tensor: Tensor, rule: TwoLevel) -> Tensor:
    """S, which multiplies into the range of the blocks' scales."""
    bounded = _quotient(torch.full_like(tensor, rule.largest * _SIX), tensor).clamp(max=FLOAT32.max)
    return torch.where((tensor == 0) | (bounded == 0), 1.0, bounded)


def _block_scale(value: Tensor, rule: TwoLevel) -> Tensor:
    """value, at least the rule's smallest, rounded to its format, saturating; a NaN stays."""
    return cast.decode(cast.to_fp8(value.clamp(min=rule.smallest), rule.block_fmt), rule.block_fmt)


def _errors(x: Tensor, scales: TwoLevelScales, tensor: Tensor, rule: TwoLevel, axis: int) -> Tensor:
    """The sum of errors of each block of 16 along axis, of the blocks' shape."""
    axis = axis if axis < 0 else axis - x.ndim
    lines = torch.atleast_2d(x.detach().float()).movedim(axis, -1)  # [..., M, K]
    grids = [torch.atleast_2d(scale).movedim(axis, -1) for scale in scales[:2]]
    rows = 1 if lines.shape[-2] == grids[0].shape[-2] else 16
    lines = functional.pad(lines, (0, -lines.shape[-1] % 16, 0, -lines.shape[-2] % rows))
    blocks = lines.reshape(*grids[0].shape[:-1], rows, grids[0].shape[-1], 16)
    scale, block = (grid[..., None, :, None] for grid in grids)
    q = four_bits.rounded(blocks * scale) * block  # exact
    if rule.error_unit == "block":
        e = q - _product(blocks, _encode_scale(tensor, rule))
    else:
        e = _quotient(q * tensor, torch.full_like(tensor, _SIX * rule.largest)) - blocks
    parts = (e.abs() if rule.error == "mae" else _product(e, e)).unbind(-1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    while (half := total.shape[-2] // 2) > 0:
        total = total[..., :half, :] + total[..., half:, :]
    return total[..., 0, :].movedim(-1, axis).reshape(scales.scale.shape)


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() / b.double()).float()


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() * b.double()).float()
