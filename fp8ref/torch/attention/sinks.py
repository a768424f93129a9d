"""Attention sinks: a learned logit a query head, in every row's sum, without a value (A-23)."""

import math

import numpy as np
import torch
from torch import Tensor

from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Arithmetic
from fp8ref.torch.attention.exponentials import divide, exponential, times
from fp8ref.torch.attention.operands.problem import Shape

FAR = 64.0
"""A sink so far above a row's maximum, in units of the exponent, leaves nothing of its keys."""

_LOG2E = float(np.float32(math.log2(math.e)))


def add(
    o: Tensor,
    total: Tensor,
    maximum: Tensor,
    sinks: Tensor,
    factor: Tensor | float | None,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, sums, maxima) of rows after their sinks joined, before the end (A-10).

    sinks     float32, one for each row: they broadcast against the sums.
    factor    of raw scores in the stated form, to broadcast against scores (A-5); None of scaled
              ones.
    Shapes:   o [..., D], sums and maxima [...].
    Order:    A-23.
    """
    variant = call.variant
    z = times(sinks, _LOG2E) if variant.base == "2" else sinks
    row_factor = factor[..., 0] if isinstance(factor, Tensor) and factor.ndim else factor
    ahead = z - (maximum if row_factor is None else times(maximum, row_factor))
    far = ahead > FAR
    exponent = torch.where(far, 0.0, ahead) + float(variant.offset)
    p = exponential(exponent, variant.base, call.arithmetic)
    at = z
    if isinstance(row_factor, Tensor):
        at = times(sinks, divide(torch.full_like(row_factor, _LOG2E), row_factor))
    elif row_factor is not None:
        at = times(sinks, float(np.float32(_LOG2E) / np.float32(row_factor)))
    total = torch.where(far, 2.0**variant.offset, total + p)
    return torch.where(far[..., None], 0.0, o), total, torch.where(far, at, maximum)


def by_rows(sinks: Tensor, shape: Shape) -> Tensor:
    """Sinks [H] for rows [B, Hkv, Tq, G]: float32 [1, Hkv, 1, G]."""
    return sinks.float().view(1, shape.key_heads, 1, shape.group)


def gradient(d: Tensor, lse: Tensor, sinks: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The gradient of the sinks, float32 [H], of this rank's rows.

    Shapes:   d [B, H, Tq], the row sums D of A-15, and lse of its shape, float32; sinks [H].
    Order:    stated: A-23, with sums of float64 numbers in torch's order; fast: torch's own.
    """
    p = exponential(sinks.float()[None, :, None] - lse, "e", arithmetic)
    products = times(p, d)
    return -(products.double() if arithmetic == "stated" else products).sum((0, 2)).float()
