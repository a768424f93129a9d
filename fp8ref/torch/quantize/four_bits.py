"""e2m1fn by FP8 tensors: its numbers in float8_e4m3fn, and its codes (spec F-5, C-9).

Every number of e2m1fn is one of e4m3fn. So a tensor in e2m1fn is held as its numbers in
float8_e4m3fn: scaling, GEMMs, transposes and gathers are those of FP8. torch.float4_e2m1fn_x2 has
no arithmetic, and a byte of two codes can be neither transposed nor cut between them. What shows
codes calls ``codes``.
"""

import torch
from torch import Tensor

from fp8ref.formats import E2M1FN
from fp8ref.torch.quantize import float_values

_HALF = 0x30  # the code of 0.5, e2m1fn's only subnormal, in e4m3fn
_BIASES = 12  # e4m3fn's exponent field is larger by 6, which is 12 in units of an e2m1fn code
_SIGNS = 4  # the number of bits between the two signs


def rounded(x: Tensor) -> Tensor:
    """float32 x, rounded to nearest even and saturated: the numbers of e2m1fn, float32.

    Specials: a NaN of either sign is 6; -0 and what underflows keep their sign.
    Source:   spec C-1 to C-6, C-9.
    """
    # in place, as in float_values
    inside = x.detach().nan_to_num(E2M1FN.max).clamp_(-E2M1FN.max, E2M1FN.max)
    return float_values.round_(inside.clone(), E2M1FN, inside=True).copysign_(inside)


def codes(numbers: Tensor) -> Tensor:
    """The codes, uint8 up to 15, of numbers of e2m1fn in float8_e4m3fn."""
    bits = numbers.view(torch.uint8).to(torch.int16)
    magnitude = bits & 0x7F
    # Both formats have the same lowest exponent but for the subnormal, which is code 1.
    code = ((magnitude >> 2) - _BIASES).maximum((magnitude > 0).to(torch.int16))
    return (code | ((bits & 0x80) >> _SIGNS)).to(torch.uint8)


def numbers(codes: Tensor) -> Tensor:
    """The numbers, float8_e4m3fn, of uint8 codes of e2m1fn: the reverse of ``codes``."""
    magnitude = (codes & 7).to(torch.int16)
    bits = torch.where(magnitude < 2, magnitude * _HALF, (magnitude + _BIASES) << 2)
    signed = bits | ((codes.to(torch.int16) & 8) << _SIGNS)
    return signed.to(torch.uint8).view(torch.float8_e4m3fn)
