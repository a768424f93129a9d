"""Quantize q, k and v of attention: which elements share a scale (spec A-2).

Tensors are [batch, heads, tokens, features]. The blocks are attention's own; casts are those of
``scaling``, scales those of ``scales``, and Transformer Engine's current scaling, which linears of
this backend do not have.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fp8ref import policy as policies
from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32, Format
from fp8ref.policy import ScalePolicy
from fp8ref.spec.granularity import Blocks
from fp8ref.torch.quantize import scaling
from fp8ref.torch.quantize.scales import Scales, scales_from_amax

DTYPES = {FLOAT16.name: torch.float16, BFLOAT16.name: torch.bfloat16, FLOAT32.name: torch.float32}
"""{name of a format above 8 bits: torch's dtype}."""


class Heads(NamedTuple):
    """A tensor of attention: hp ~ codes * scale_inv, scales spread over their blocks.

    codes        native float8 [B, H, T, D]; in high precision the rounded tensor.
    amax         float32 of ``scale``'s shape: the amaxes of the blocks.
    scale        float32: () for ``tensor``; [B, Hkv, 1, 1] for ``head``; [B, H, ceil(T / 128), 1]
                 for ``rows_128``; [B, H, T, D / 32], or along the tokens [B, H, ceil(T / 32), D],
                 for ``mx_1x32``.
    scale_inv    float32 of that shape.
    blocks       the elements that share a scale; None in high precision.
    """

    codes: Tensor
    amax: Tensor
    scale: Tensor
    scale_inv: Tensor
    blocks: Blocks | None


def amax(x: Tensor, blocks: Blocks | None) -> Tensor:
    """The amax of each block, in high precision of x, float32; NaN where there is one."""
    return scaling.block_amax(x, (None,) * x.ndim if blocks is None else blocks).float()


def scales_of(amax: Tensor, fmt: Format, policy: str | ScalePolicy) -> Scales:
    """The scales of amaxes, finite ones (S-9); scale_inv is NaN where an amax is not, so that
    nothing computed with it is finite.

    Raises:   ValueError: a policy that ``scales.implemented`` refuses, unless it is a
              ``finite_quotient``.
    """
    policy = policies.by_name(policy)
    if policy.finite_quotient:
        # Of tensors, in float64: rounded once (``exponentials``), no product with a reciprocal.
        wide = torch.full_like(amax, fmt.max).double() / amax.double()
        quotient = wide.clamp(max=torch.finfo(torch.float32).max).float()
        scale = torch.where((amax > 0) & amax.isfinite(), quotient, 1.0)
        scale_inv = given(scale).scale_inv
    else:
        scale, scale_inv = scales_from_amax(amax, fmt, policy)
    return Scales(scale, torch.where(amax.isfinite(), scale_inv, torch.nan))


def given(scale: Tensor) -> Scales:
    """A given scale, and RN32(1 / scale)."""
    return Scales(scale, scale.double().reciprocal().float())


def quantize(
    x: Tensor,
    fmt: Format,
    blocks: Blocks | None,
    policy: str | ScalePolicy,
    *,
    amax: Tensor,
    scale: Tensor | None = None,
) -> Heads:
    """Codes of x, by the scales of blocks; in high precision x rounded to fmt.

    amax      of ``amax``, of all ranks that share scales.
    scale     given, of earlier steps; None: made of the amaxes.
    Shapes:   x hp; of [B, H, T, D] see ``Heads``.
    Order:    scale by the policy (S-9, S-14); RN32(x * scale); saturate; round to nearest even
              (S-5).
    Specials: a NaN or an infinity makes scale_inv of its block NaN. Under a given scale NaN stays,
              and an infinity saturates.
    Raises:   ValueError: as ``scales_of``.
    """
    if blocks is None:
        unit = torch.ones((), device=x.device, dtype=torch.float32)
        return Heads(rounded(x, fmt), amax, unit, unit, None)
    scales = scales_of(amax, fmt, policy) if scale is None else given(scale)
    codes = scaling.quantize_blocks(x, scales.scale, fmt, blocks)
    return Heads(codes, amax, *scales, blocks)


def codes(x: Tensor, fmt: Format, scale: Tensor | None = None) -> Tensor:
    """The codes of x times a scale that broadcasts to it; in high precision x rounded to fmt."""
    if fmt.bits != 8:
        return rounded(x, fmt)
    return scaling.quantize_blocks(x, scale, fmt)


def rounded(x: Tensor, fmt: Format) -> Tensor:
    """x in the dtype of a format above 8 bits.

    inductor omits a cast to 16 bits that a cast back follows, but not one that ends in integers.
    """
    cast_x = x.to(DTYPES[fmt.name])
    if cast_x.dtype.itemsize != 2 or not torch.compiler.is_compiling():
        return cast_x
    bits = cast_x.view(torch.int16)
    return ((bits & 0x7FFF) | (bits & ~0x7FFF)).view(cast_x.dtype)


def dequantize(x: Heads) -> Tensor:
    """RN32(codes * scale_inv), exact of MX blocks unless it leaves float32's range (S-8)."""
    return x.codes.float() * spread(x.scale_inv, x)


def spread(scale: Tensor, x: Heads) -> Tensor:
    """scale or scale_inv of x, which is in FP8, to broadcast against its codes."""
    assert x.blocks is not None
    return scaling.spread(scale, tuple(x.codes.shape), x.blocks)


def above_range(magnitude: Tensor, fmt: Format) -> Tensor:
    """Whether magnitudes round to more than the format's largest number: those above the midpoint
    between it and the number that would follow, and the midpoint too if the largest code is odd."""
    step = 2.0 ** ((fmt.max_code >> fmt.mantissa_bits) - fmt.bias - fmt.mantissa_bits)
    middle = fmt.max + step / 2
    return magnitude >= middle if fmt.max_code % 2 else magnitude > middle


def pad(x: Tensor, dim: int, multiple: int) -> Tensor:
    """x with zeros behind one of its dims, up to a multiple; float8 too."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    zeros = [0, 0] * (x.ndim - 1 - dim) + [0, missing]
    if x.dtype.itemsize > 1:
        return functional.pad(x, zeros)
    return functional.pad(x.view(torch.uint8), zeros).view(x.dtype)  # code 0 is zero
