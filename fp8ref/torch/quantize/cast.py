"""A bare cast to FP8, without a scale: torch's own conversion, to nearest even (spec C).

``scaling`` casts scaled tensors, as torchao's conversion does. Tensors in e2m1fn hold its numbers
in float8_e4m3fn (``four_bits``).
"""

import torch
from torch import Tensor

from fp8ref import formats
from fp8ref.formats import E2M1FN, FP8_FORMATS, Format
from fp8ref.torch.quantize import float_values, four_bits

__all__ = [
    "DTYPES",
    "FORMATS",
    "HIGH_PRECISION",
    "checked",
    "code_bits",
    "decode",
    "encode",
    "native",
    "to_f32",
    "to_fp8",
]

DTYPES = {
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "e2m1fn": torch.float8_e4m3fn,
}
"""{name of a format: torch's dtype of its tensors}; those in e2m1fn hold its numbers."""

FORMATS = {DTYPES[name]: fmt for name, fmt in FP8_FORMATS.items()}
"""{torch's dtype of codes: their format}."""

HIGH_PRECISION = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that may be cast to FP8."""


def encode(x: Tensor, fmt: Format, *, saturate: bool = True) -> Tensor:
    """Round x once to nearest even and return the codes.

    Shapes:   x any shape, empty too, float32, float16 or bfloat16; codes uint8 of the same shape,
              on x's device, of e2m1fn one a byte.
    Specials: as the simulator: NaN -> fmt.nan_code; -0 and underflow keep their sign, except in
              fnuz; above fmt.max, infinities included: max if saturate, else Inf, or NaN in a
              format without infinities.
    Raises:   ValueError: fmt neither FP8 nor e2m1fn; x of another dtype (float64 would be rounded
              twice); e2m1fn without saturate.
    Source:   spec C-1 to C-6, C-9.
    """
    value = to_f32(x)
    codes = code_bits(to_fp8(value, fmt), fmt)
    if not saturate:
        formats.check_saturates(fmt, saturate)
        # torch >= 2.12 saturates in eager mode and earlier versions do not, so overflow is decided
        # here: at and above the midpoint between max and the number that would follow it, which is
        # even where max is odd, and the reverse.
        step = fmt.max - decode(
            torch.tensor(fmt.max_code - 1, dtype=torch.uint8, device=x.device), fmt
        )
        tie_overflows = fmt.max_code % 2 == 1
        above = (
            value.abs() >= fmt.max + step / 2 if tie_overflows else value.abs() > fmt.max + step / 2
        )
        overflow = fmt.nan_code if fmt.inf_code is None else fmt.inf_code | (codes & fmt.sign_bit)
        codes = torch.where(above, overflow, codes)
    # torch's NaN keeps the sign; C-5 emits one code
    return torch.where(value.isnan(), fmt.nan_code, codes).to(torch.uint8)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Decode uint8 codes, or a native float8 tensor, to float32 of the same shape, exactly.

    Every NaN code is NaN.

    Raises:   ValueError: fmt neither FP8 nor e2m1fn; codes of another dtype.
    """
    dtype = native(fmt)
    if not isinstance(codes, Tensor):
        raise ValueError(
            f"codes of {fmt} are a torch.Tensor; got {type(codes).__name__}. Convert with "
            "torch.as_tensor."
        )
    if codes.dtype == torch.uint8:
        codes = from_code_bits(codes, fmt)
    if codes.dtype != dtype:
        raise ValueError(f"codes of {fmt} are torch.uint8 or {dtype}; got {codes.dtype}.")
    return float_values.decode(codes)


def to_fp8(x: Tensor, fmt: Format) -> Tensor:
    """As a saturating encode, but the native float8 tensor; its NaNs may carry a sign.

    Raises as encode.
    """
    dtype = native(fmt)
    if fmt == E2M1FN:
        return four_bits.rounded(to_f32(x)).to(dtype)
    return to_f32(x).clamp(-fmt.max, fmt.max).to(dtype)


def code_bits(native: Tensor, fmt: Format) -> Tensor:
    """The codes, uint8, of a native tensor: its bytes, or of e2m1fn a code of 4 bits a byte."""
    return four_bits.codes(native) if fmt == E2M1FN else native.view(torch.uint8)


def from_code_bits(codes: Tensor, fmt: Format) -> Tensor:
    """The native tensor of uint8 codes: the reverse of ``code_bits``."""
    return four_bits.numbers(codes) if fmt == E2M1FN else codes.view(native(fmt))


def to_f32(x: Tensor) -> Tensor:
    """x widened to float32; ValueError when its dtype would be rounded."""
    return checked(x).to(torch.float32)


def checked(x: Tensor) -> Tensor:
    """x itself; ValueError unless it is a tensor of float32, float16 or bfloat16, outside of
    torch.vmap."""
    if not isinstance(x, Tensor):
        raise ValueError(
            f"casts take a torch.Tensor; got {type(x).__name__}. Convert with torch.as_tensor."
        )
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(x):
        raise ValueError(
            "casts to FP8 have no rule for torch.vmap; got a tensor within it. Cast the whole "
            "batch, or loop over its examples."
        )
    if x.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"casts take float32, float16 or bfloat16; got {x.dtype}. Convert with .float()."
        )
    return x


def native(fmt: Format) -> torch.dtype:
    """torch's dtype for tensors in FP8 or e2m1fn; ValueError for any other format."""
    formats.check(fmt)
    if fmt.name not in DTYPES:
        raise ValueError(f"casts go to one of {', '.join(DTYPES)}; got {fmt}.")
    return DTYPES[fmt.name]
