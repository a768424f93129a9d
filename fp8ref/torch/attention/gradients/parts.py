"""What the backward passes of attention have in common (spec A-15, A-16): what they take and give,
and steps of a tile in the stated arithmetic.
"""

import math
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fp8ref.spec.attention.variants import Arithmetic
from fp8ref.torch.attention import softmax
from fp8ref.torch.attention.exponentials import exponential, multiply_add, times
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.kept import Kept, Tally
from fp8ref.torch.attention.operands.operands import Tile
from fp8ref.torch.attention.operands.problem import Problem, Report, Shape
from fp8ref.torch.quantize.scales import Scales

_LOG2E = float(np.float32(math.log2(math.e)))


class Saved(NamedTuple):
    """What a backward pass takes of a forward pass.

    inputs       q, k and v in high precision, of a backward pass that casts them itself: in
                 float64, in bfloat16 or of MX blocks; else None.
    o            [B, H, Tq, D], of the output's format; None of real arithmetic, as all below.
    o_scale_inv  of o in FP8; else None.
    lse          float32 [B, H, Tq].
    scale_p      of the probabilities.
    tensors      q, k and v quantized, but in bfloat16.
    """

    inputs: tuple[Tensor, Tensor, Tensor] | None
    o: Tensor
    o_scale_inv: Tensor | None
    lse: Tensor
    scale_p: Scales
    tensors: dict[str, Heads]

    @classmethod
    def from_inputs(cls, inputs: tuple[Tensor, Tensor, Tensor], o: Tensor, lse: Tensor) -> Self:
        """Of a backward pass in bfloat16."""
        unit = torch.ones((), device=o.device, dtype=torch.float32)
        return cls(inputs, o, None, lse, Scales(unit, unit), {})


class Raw(NamedTuple):
    """Gradients before they are rounded to the output's format, float32 of the shapes of q, k and
    v; of ranks that have parts of the queries, the gradients of all ranks' keys.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor


class Sums(NamedTuple):
    """What a pass over all tiles gives.

    d          float32 [B, H, Tq], the row sums D (A-15).
    p, ds      what their casts did.
    scale_ds   what dS was multiplied by; 1 where it has no scale, or blocks.
    """

    raw: Raw
    d: Tensor
    p: Tally
    ds: Tally
    scale_ds: Scales
    kept: Kept


def quantized_do(do: Tensor, problem: Problem, *, report: Report) -> Heads:
    """do as q is quantized (A-15)."""
    variant, blocks, scale = problem.variant, problem.blocks("do"), problem.scales.get("do")
    if report == "nothing" and (blocks is None or scale is not None):
        amax = torch.zeros((), device=do.device, dtype=torch.float32)
    else:
        amax = heads.amax(do, blocks)
        if variant.granularity in ("tensor", None):
            (amax,) = operands.share([amax], problem.call)
    fmt = problem.gradient_fmt
    return heads.quantize(do, fmt, blocks, variant.policy, amax=amax, scale=scale)


def scale_of_ds(tally: Tally, problem: Problem) -> Scales:
    """The scale of dS, of the largest amax of all ranks."""
    (tally.largest,) = operands.share([tally.largest], problem.call)
    return heads.scales_of(tally.largest, problem.gradient_fmt, problem.variant.policy)


def score_gradients(ds: Tensor, p: Tensor, slope: Tensor | None, problem: Problem) -> Tensor:
    """dS of dP - D, in the order of A-15 and A-22."""
    ds = ds * p
    return (ds if slope is None else times(ds, slope)) * problem.softmax_scale


def again(
    s: Tensor, lse: Tensor, tile: Tile, tensors: dict[str, Heads], problem: Problem
) -> tuple[Tensor, Tensor | None]:
    """(P from sums of products s and the log-sum-exp of rows, 0 where a key is not seen; what a
    softcap multiplies dS by, None without one).
    """
    call = problem.call
    factors = operands.score_factors(tensors, tile, problem)
    s, factors = operands.capped(s, factors, call)
    slope = None if call.softcap is None else 1.0 - times(s, s)
    if call.variant.scores == "raw":
        bias = -times(lse, _LOG2E)
        p = exponential(multiply_add(s, factors[0], bias[..., None]), "2", call.arithmetic)
    else:
        p = exponential(softmax.scaled(s, factors) - lse[..., None], "e", call.arithmetic)
    visible = operands.seen(tile, problem, s.device)
    return (p if visible is None else torch.where(visible, p, 0.0)), slope


def rows_of(lse: Tensor, shape: Shape, step: int) -> Tensor:
    """The log-sum-exp [B, H, Tq] as [B, Hkv, Tq, G], padded; 0 of rows that see no key."""
    lse = heads.pad(torch.where(lse == -torch.inf, 0.0, lse), 2, step)
    return lse.view(shape.batch, shape.key_heads, shape.group, -1).transpose(2, 3)


def by_rows(d: Tensor, shape: Shape) -> Tensor:
    """D of rows [B, Hkv, Tq, G], padded, as [B, H, Tq]."""
    return operands.by_head(d[..., None], shape)[..., 0]


def sums_of_rows(a: Tensor, b: Tensor, features: int, arithmetic: Arithmetic = "stated") -> Tensor:
    """Sums of products over the last axis: stated, ascending; fast, torch's order."""
    if arithmetic == "fast":
        return (a.float() * b.float()).sum(-1)
    each = (a.float() * b.float()).unbind(-1)  # products of two short numbers are exact
    total = each[0]
    for product in each[1:features]:
        total = total + product
    return total


def tokens_of(x: Tensor) -> Tensor:
    """[B, Hkv, T, G, D] as [B, Hkv, G, D, T]: for GEMMs that sum over queries."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def add_heads(total: Tensor, head_sums: Tensor, tile: Tile) -> None:
    """Add a key head's query heads, ascending: [B, Hkv, G, keys, D] to total [B, Hkv, Tk, D]."""
    part = total[:, :, tile.keys]
    for head_sum in head_sums.unbind(2):
        part = part + head_sum
    total[:, :, tile.keys] = part


def without_padding(dq: Tensor, dk: Tensor, dv: Tensor, shape: Shape) -> Raw:
    """dq [B, Hkv, Tq, G, D], dk and dv [B, Hkv, Tk, D] in the shapes of q, k and v."""
    at = (slice(None), slice(None), slice(shape.keys), slice(shape.features))
    return Raw(operands.by_head(dq, shape), dk[at], dv[at])
