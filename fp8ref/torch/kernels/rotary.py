"""Rotary embedding, and its gradient cast in both orders, as operators of PyTorch.

Shapes:   x [B, T, H, D], contiguous; g [B, T, H, D] of any strides but along D, a power of two; cos
          and sin float32 [T, D], contiguous; codes [B T, H D] and [H D, B T]. Partial amaxes are
          int32.
"""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8ref.torch.kernels import launch
from fp8ref.torch.kernels.memory import codes, parts

if TYPE_CHECKING:
    from fp8ref.kernels.jit import Launch

__all__ = ["gradient_amax", "gradient_cast", "rotate"]

ROWS = 64
"""Tokens of a tile, which is as wide as a head."""


@functools.lru_cache(maxsize=256)
def _launch(name: str, *arguments, **options: bool) -> "Launch":
    from fp8ref.kernels import rotary

    return getattr(rotary, name)(*arguments, **options)


@torch.library.custom_op("fp8ref::rotate", mutates_args=())
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x, rotated by tables [T, D]."""
    out = torch.empty_like(x)
    launch.run(_launch("rotate", tuple(x.shape)), x, cos, sin, out)
    return out


@rotate.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fp8ref::rotary_gradient_amax", mutates_args=())
def gradient_amax(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Partial amaxes of the gradient of what was rotated."""
    out = _empty_amax(g, cos, sin)
    launch.run(_launch("amax", tuple(g.shape), g.stride()[:3]), g, cos, sin, out)
    return out


@gradient_amax.register_fake
def _empty_amax(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, tokens, heads, _ = g.shape
    return parts(g, -(-batch * tokens // ROWS) * heads)


@torch.library.custom_op("fp8ref::rotary_gradient_cast", mutates_args=())
def gradient_cast(
    g: Tensor, cos: Tensor, sin: Tensor, scale: Tensor, e5m2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of the gradient of what was rotated by a scale (), transposed codes, and partial
    amaxes."""
    out = _empty_cast(g, cos, sin, scale, e5m2)
    made = _launch("cast", tuple(g.shape), g.stride()[:3], e5m2=e5m2)
    launch.run(made, g, cos, sin, scale, *out)
    return out


@gradient_cast.register_fake
def _empty_cast(
    g: Tensor, cos: Tensor, sin: Tensor, scale: Tensor, e5m2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, width = g.shape
    return *codes(g, (batch * tokens, heads * width), e5m2), _empty_amax(g, cos, sin)
