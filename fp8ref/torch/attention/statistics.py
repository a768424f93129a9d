"""Quantization statistics of attention's operands (spec Q-13)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fp8ref.formats import Format
from fp8ref.selection.statistics import FIELDS
from fp8ref.spec.attention.products import AttentionOperand, first_use
from fp8ref.spec.attention.variant import MX, Variant
from fp8ref.torch.attention import observer as attention_observer
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.problem import Problem
from fp8ref.torch.observe import statistics as stats
from fp8ref.torch.observe.statistics import Parts
from fp8ref.torch.quantize.scaling import Quantized


@torch.no_grad()
def measure(x: Tensor, tensor: Heads, fmt: Format) -> Tensor:
    """float64 [FIELDS] of x [B, H, T, D] and its quantized form.

    Order:    as ``stats.measure``; scales of heads and of 128 tokens as those of their rows.
    """
    codes, scale, scale_inv, blocks = tensor.codes, tensor.scale, tensor.scale_inv, tensor.blocks
    if scale.ndim == 0:
        return stats.measure(x, Quantized(codes, scale, scale_inv, fmt, "tensorwise", -1))
    if blocks is not None and MX in blocks:
        axis = blocks.index(MX)
        return stats.measure(x, Quantized(codes, scale, scale_inv, fmt, "mx_1x32", axis))
    scale, scale_inv = (heads.spread(s, tensor).expand(*x.shape[:3], 1) for s in (scale, scale_inv))
    return stats.measure(x, Quantized(codes, scale, scale_inv, fmt, "rowwise", -1))


@contextmanager
def measuring(
    layers: Mapping[str, nn.Module],
    variant: Variant,
    planned: Sequence[AttentionOperand],
    parts: Parts,
) -> Iterator[None]:
    """Measure planned operands of these modules' attention into parts, in a context of one eager
    forward and backward pass. A rank's part is its sequences and heads."""

    def observer(name, product, role, x, tensor) -> None:
        same = [
            operand
            for operand in planned
            if operand.layer == name
            and first_use(operand.product, operand.role, variant) == (product, role)
        ]
        if not same:
            return
        with _disable_current_modes():
            measured = measure(x, tensor, same[0].fmt)
        for operand in same:
            parts.setdefault(operand.name, []).append(measured)

    def counter(name, product, role, amax, counts) -> None:
        same = [
            operand
            for operand in planned
            if (operand.layer, operand.product, operand.role) == (name, product, role)
        ]
        for operand in same:
            with _disable_current_modes():
                parts.setdefault(operand.name, []).append(counted(amax, counts))

    with attention_observer.observe_attention(layers, observer, counter=counter):
        yield


@torch.no_grad()
def counted(amax: Tensor, counts: Tensor) -> Tensor:
    """float64 [FIELDS] of P or dS: amax and counts; the other fields are 0."""
    values = dict(zip(("count", "overflows", "underflows"), counts, strict=True)) | {"amax": amax}
    none = torch.zeros_like(amax)
    return torch.stack([values.get(name, none).double() for name in FIELDS])


def counts_of(problem: Problem, saturated: Tensor, lost: Tensor) -> Tensor:
    """int64 [3]: visible scores (A-3), clipped and lost elements of a pass."""
    device, batch = saturated.device, problem.shape.batch
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tile in operands.tiles(problem):
        seen = operands.seen(tile, problem, device)
        whole = batch * (tile.last - tile.first) * tile.width
        total = total + (whole if seen is None else seen.expand(batch, *seen.shape[1:]).sum())
    counts = (total * problem.shape.heads, saturated, lost)
    return torch.stack([torch.as_tensor(x, device=device) for x in counts]).long()
