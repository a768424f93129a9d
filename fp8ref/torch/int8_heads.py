"""Quantize q, k and v as SageAttention does: q and k in INT8, k less its mean over the tokens, v by feature (spec A-26).

Tensors are [batch, heads, tokens, features], and are rounded to bfloat16 first.
"""

import torch
from torch import Tensor

from fp8ref.formats import BFLOAT16, Format
from fp8ref.torch import cast, head_scaling
from fp8ref.torch.elementary import divide, times
from fp8ref.torch.head_scaling import KEYS, THREADS, Heads, pad

LARGEST = 127.0
"""The largest magnitude of an INT8 code."""

SMALLEST = 1.00000001168609742e-07
"""What is added to a scale_inv, so that none is zero: the float32 number 1e-7."""

_ZERO = 2.0**-100
"""An amax of v below it has scale 1."""


def quantize(q: Tensor, k: Tensor, v: Tensor, fmt: Format) -> dict[str, Heads]:
    """q, k and v by role; fmt is v's.

    Shapes:   q [B, H, Tq, D], k and v [B, Hkv, Tk, D], hp. Codes of q and k are int8; scale_inv of q is [B, H, 8 ceil(Tq / 16), 1], of k
              [B, Hkv, 4 ceil(Tk / 128), 1], of v [B, Hkv, 1, D].
    Specials: a NaN or an infinity makes scale_inv of its group NaN or infinite, and so NaN of all scores with it.
    """
    q, k, v = (_bfloat16(x.detach()) for x in (q, k, v))
    k = _bfloat16(k - mean(k))
    b, h, _, d = q.shape
    amax_q = pad(q.abs(), 2, THREADS).view(b, h, -1, 2, 8, d).amax((3, 5)).flatten(2)[..., None]
    b, h, _, d = k.shape
    amax_k = pad(k.abs(), 2, KEYS).view(b, h, -1, KEYS // 8, 4, 2, d).amax((3, 5, 6)).flatten(2)[..., None]
    return {"q": _int8(q, amax_q), "k": _int8(k, amax_k), "v": _by_feature(v, fmt)}


def mean(k: Tensor) -> Tensor:
    """The mean of k over its tokens, in bfloat16: float32 [B, Hkv, 1, D].

    Order:    zeros up to a power of two of tokens; the halves are added, until one is left; times RN32(1 / T); to bfloat16.
    """
    k = _bfloat16(k.detach())
    total = pad(k, 2, 1 << (k.shape[2] - 1).bit_length())
    while total.shape[2] > 1:
        half = total.shape[2] // 2
        total = total[:, :, :half] + total[:, :, half:]
    inverse = torch.full((), float(k.shape[2]), device=k.device, dtype=torch.float32).double().reciprocal().float()
    return _bfloat16(times(total, inverse))


def taken(q: Tensor, k: Tensor) -> Tensor:
    """What smoothing takes from the scores of a row, before the softmax scale: float32 [B, H, Tq].

    Order:    products of q and the mean of k, features ascending, each addition rounded; to bfloat16.
    """
    of_k = mean(k)
    # exact: bfloat16 times bfloat16
    products = _bfloat16(q.detach()) * of_k.repeat_interleave(q.shape[1] // of_k.shape[1], dim=1)
    total = products[..., 0]
    for n in range(1, q.shape[3]):
        total = total + products[..., n]
    return _bfloat16(total)


def _int8(x: Tensor, amax: Tensor) -> Heads:
    """INT8 codes of x: RN32(x / scale_inv), half of one added away from zero, rounded, and cut off."""
    scale_inv = divide(amax, torch.full_like(amax, LARGEST)) + SMALLEST
    quotient = divide(x, head_scaling.spread(scale_inv, tuple(x.shape), "int8_thread"))
    codes = (quotient + torch.where(quotient >= 0, 0.5, -0.5).to(quotient.dtype)).to(torch.int8)
    return Heads(codes, amax, head_scaling.inverse(scale_inv), scale_inv)


def _by_feature(v: Tensor, fmt: Format) -> Heads:
    amax = v.abs().amax(2, keepdim=True)
    largest = torch.full_like(amax, fmt.max)
    safe = torch.where(amax < _ZERO, largest, amax)
    scale = divide(largest, safe)
    return Heads(cast.to_fp8(v * scale, fmt), amax, scale, divide(safe, largest))


def _bfloat16(x: Tensor) -> Tensor:
    """x rounded to bfloat16, in float32."""
    return head_scaling.rounded(x, BFLOAT16).float()
