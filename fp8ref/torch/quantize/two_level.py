"""Scales of blocks in an 8-bit format, under a float32 scale of the tensor (spec S-22).

Every product and quotient is rounded once to float32. Quotients are taken in float64 and rounded,
which rounds as once: on a GPU torch multiplies by a reciprocal, and Triton's float32 division is
approximate. So are products that a sum follows, which a compiler might fuse with it.
"""

import torch
from torch import Tensor
from torch.nn import functional

from fp8ref.formats import E2M1FN, FLOAT32, Format
from fp8ref.policy import ScalePolicy, TwoLevel
from fp8ref.shared import errors
from fp8ref.torch.quantize import cast, four_bits

__all__ = ["check", "scales"]

_SIX = E2M1FN.max
TwoLevelScales = tuple[Tensor, Tensor, Tensor | None]
"""scale and scale_inv of the blocks, float32; that of the tensor, (), or None where it has none."""


def check(fmt: Format, granularity: str, policy: ScalePolicy) -> None:
    """ValueError unless two levels of scales go with a format and a granularity."""
    rule, name = policy.two_level, policy.name
    assert rule is not None
    errors.one_of(f"the format of {name}", fmt.name, (E2M1FN.name,))
    errors.one_of(f"granularity of {name}", granularity, rule.granularities)


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
    six = _scaled_to(amax, tensor_amax, rule)
    if not rule.error:
        return six
    four = _scaled_to(amax, tensor_amax, rule, times=1.5)
    sums = [_errors(x, scales, tensor_amax, rule, axis) for scales in (six, four)]
    chosen = sums[1] < sums[0]
    scale, scale_inv = torch.where(chosen, four[0], six[0]), torch.where(chosen, four[1], six[1])
    return scale, scale_inv, six[2]


def _scaled_to(amax: Tensor, tensor: Tensor, rule: TwoLevel, times: float = 1) -> TwoLevelScales:
    """The scales by which amaxes become 6; with times 1.5, 4."""
    one = torch.ones_like(tensor)
    if rule.tensor == "encode":
        encode = _encode_scale(tensor, rule)
        if rule.error:
            to_six = _quotient(amax, _SIX) * encode * times
        else:
            to_six = amax * (encode * _quotient(one, _SIX))
        inverse = _quotient(one, encode)
        block = _block_scale(to_six, rule)
        return _quotient(one, block * inverse).clamp(max=FLOAT32.max), block, inverse
    decodes = rule.tensor == "decode"
    inverse = _quotient(tensor, rule.block_fmt.max * _SIX) if decodes else one
    block = _block_scale(_quotient(_quotient(amax, _SIX), inverse), rule)
    return _quotient(_quotient(one, inverse), block), block, inverse if decodes else None


def _encode_scale(tensor: Tensor, rule: TwoLevel) -> Tensor:
    """S, which multiplies into the range of the blocks' scales."""
    scale = _quotient(torch.full_like(tensor, rule.largest * _SIX), tensor)
    return torch.where((tensor == 0) | (scale == 0), 1.0, scale.clamp(max=FLOAT32.max))


def _block_scale(value: Tensor, rule: TwoLevel) -> Tensor:
    """value, at least the rule's smallest, rounded to its format, saturating; a NaN stays."""
    fmt = rule.block_fmt
    return cast.decode(cast.to_fp8(value.clamp(min=rule.smallest), fmt), fmt)


def _errors(x: Tensor, scales: TwoLevelScales, tensor: Tensor, rule: TwoLevel, axis: int) -> Tensor:
    """The sum of errors of each block of 16 along axis, of the blocks' shape."""
    axis = axis if axis < 0 else axis - x.ndim
    lines = torch.atleast_2d(x.detach().float()).movedim(axis, -1)  # [..., M, K]
    scale, block = (torch.atleast_2d(s).movedim(axis, -1)[..., None, :, None] for s in scales[:2])
    (*batch, m, k), n = lines.shape, scale.shape[-4]
    rows = 1 if m == n else 16
    lines = functional.pad(lines, (0, -k % 16, 0, -m % rows))
    blocks = lines.reshape(*batch, n, rows, -1, 16)
    q = four_bits.rounded(blocks * scale) * block  # exact
    if rule.error_unit == "block":
        e = q - _product(blocks, _encode_scale(tensor, rule))
    else:
        e = _quotient(q * tensor, _SIX * rule.largest) - blocks
    parts = (e.abs() if rule.error == "mae" else _product(e, e)).unbind(-1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    while (half := total.shape[-2] // 2) > 0:
        total = total[..., :half, :] + total[..., half:, :]
    return total[..., 0, :].movedim(-1, axis).reshape(scales[0].shape)


def _quotient(a: Tensor, b: Tensor | float) -> Tensor:
    return (a.double() / (b.double() if isinstance(b, Tensor) else b)).float()


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() * b.double()).float()
