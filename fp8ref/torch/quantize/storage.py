"""Codes that an optimizer stores, and their numbers: of FP8, float16, bfloat16 and float32
(spec O-8, C-2).

On a CPU comparisons, ``where`` and conversions from float8 take 5 to 30 times as long as a product:
arithmetic on codes replaces them.
"""

import torch
from torch import Tensor

from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32, Format
from fp8ref.torch.quantize import cast, float_values, philox
from fp8ref.torch.quantize.float_values import eager_on_cpu

__all__ = ["DTYPES", "codes", "dtype", "rounded", "values"]

DTYPES = {FLOAT16.name: torch.float16, BFLOAT16.name: torch.bfloat16, FLOAT32.name: torch.float32}
"""{name of a format above 8 bits: torch's dtype}."""


def dtype(fmt: Format) -> torch.dtype:
    """The dtype of codes: uint8 of an FP8 format, or the format's own."""
    return torch.uint8 if fmt.bits == 8 else DTYPES[fmt.name]


def codes(
    scaled: Tensor, fmt: Format, nonzero: Tensor | None, key: philox.Key | None, start: int
) -> Tensor:
    """The codes of float32 numbers, saturated.

    nonzero  a tensor whose elements that are not zero keep codes that are not; None: codes may
             underflow.
    key      of stochastic rounding, of which start is the flat index of the first element; None:
             to nearest.
    Source:  spec O-8.
    """
    if fmt == FLOAT32:
        return scaled
    if key is not None:
        drawn = philox.codes(scaled, fmt, key, start)
        if nonzero is not None:
            drawn = torch.where((nonzero != 0) & (drawn & ~fmt.sign_bit == 0), drawn | 1, drawn)
        if fmt.bits == 8:
            return drawn.to(torch.uint8)
        return drawn.to(torch.int16).view(dtype(fmt))
    if fmt.bits == 8:
        return _nearest_fp8(scaled, fmt, nonzero)
    if nonzero is not None:
        # Asked before the cast, which the compiler leaves out where a cast back follows.
        lost = (nonzero != 0) & (scaled.abs() <= fmt.smallest_subnormal / 2)
        least = torch.copysign(torch.full_like(nonzero, fmt.smallest_subnormal), nonzero)
        scaled = torch.where(lost, least, scaled)
    return scaled.clamp(-fmt.max, fmt.max).to(dtype(fmt))


def _nearest_fp8(scaled: Tensor, fmt: Format, nonzero: Tensor | None) -> Tensor:
    if not eager_on_cpu(scaled):
        nearest = cast.encode(scaled, fmt)
        if nonzero is None:
            return nearest
        return torch.where((nonzero != 0) & (nearest & 0x7F == 0), nearest | 1, nearest)
    nearest = cast.to_fp8(scaled, fmt).view(torch.uint8)
    magnitude = nearest & 0x7F
    if nonzero is not None:
        nearest += torch.maximum(magnitude, nonzero.bool().view(torch.uint8)) - magnitude
    # torch's NaN is 0x7F or 0xFF, and C-5's is 0x7F: 0x7F + 1 alone has the bit of the sign.
    return nearest.bitwise_and_(magnitude.add_(1).bitwise_and_(0x80).bitwise_not_())


def values(codes: Tensor, fmt: Format) -> Tensor:
    """The float32 numbers of codes, in a new tensor."""
    if fmt.bits != 8:
        return codes.to(torch.float32, copy=True)
    return float_values.decode(codes.view(cast.native(fmt)))


def rounded(codes: Tensor) -> Tensor:
    """Codes that are read where they were made.

    inductor leaves out a cast to 16 bits that a cast back follows, but not one that ends in
    integers.
    """
    if codes.dtype.itemsize != 2 or not torch.compiler.is_compiling():
        return codes
    bits = codes.view(torch.int16)
    return ((bits & 0x7FFF) | (bits & ~0x7FFF)).view(codes.dtype)
