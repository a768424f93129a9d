"""Quantization statistics of attention's operands (spec Q-13)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from fp8ref.formats import Format
from fp8ref.selection.statistics import COUNTS, FIELDS
from fp8ref.spec.attention.products import AttentionOperand, along_tokens, first_use
from fp8ref.spec.attention.variants import Variant
from fp8ref.torch.attention import observer as attention_observer
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import MX, Heads
from fp8ref.torch.attention.operands.problem import Problem
from fp8ref.torch.observe import statistics as stats
from fp8ref.torch.observe.statistics import Parts
from fp8ref.torch.quantize.scaling import Quantized


@torch.no_grad()
def measure(
    x: torch.Tensor, tensor: Heads, fmt: Format, variant: Variant, *, along_tokens: bool = False
) -> torch.Tensor:
    """float64 [FIELDS] of x [B, H, T, D] and its quantized form.

    along_tokens  MX blocks lie along the tokens.
    Order:    as ``stats.measure``; scales of heads and of 128 tokens as those of their rows.
    """
    if variant.granularity == "tensor":
        return stats.measure(
            x, Quantized(tensor.codes, tensor.scale, tensor.scale_inv, fmt, "tensorwise", -1)
        )
    if variant.granularity in ("head", "rows_128"):
        spread = (
            heads.spread(s, tuple(x.shape), variant.granularity)
            for s in (tensor.scale, tensor.scale_inv)
        )
        scale, inverse = (s.expand(*x.shape[:3], 1) for s in spread)
        return stats.measure(x, Quantized(tensor.codes, scale, inverse, fmt, "rowwise", -1))
    axis = 2 if along_tokens else 3
    widths = [0, 0] * (3 - axis) + [0, -x.shape[axis] % MX]
    # Zeros fill the last block up. They are in no count but that of all elements, which is put
    # right.
    codes = functional.pad(tensor.codes.view(torch.uint8), widths).view(tensor.codes.dtype)
    fields = stats.measure(
        functional.pad(x, widths),
        Quantized(codes, tensor.scale, tensor.scale_inv, fmt, "mx_1x32", axis),
    )
    fields[COUNTS.index("count")] = x.numel()
    return fields


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
            measured = measure(
                x, tensor, same[0].fmt, variant, along_tokens=along_tokens(product, role)
            )
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
def counted(amax: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """float64 [FIELDS] of P or dS, of which the amax and counts are recorded: the other fields are
    0.
    """
    fields = torch.zeros(len(FIELDS), dtype=torch.float64, device=amax.device)
    for name, value in (
        ("count", counts[0]),
        ("overflows", counts[1]),
        ("underflows", counts[2]),
        ("amax", amax),
    ):
        fields[FIELDS.index(name)] = value
    return fields


def counts_of(problem: Problem, saturated: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """int64 [3]: how many scores are of keys that are seen (A-3), and how many elements a pass
    clipped and lost.
    """
    device, batch = saturated.device, problem.shape.batch
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tile in operands.tiles(problem):
        seen = operands.seen(tile, problem, device)
        whole = batch * (tile.last - tile.first) * tile.width
        total = total + (whole if seen is None else seen.expand(batch, *seen.shape[1:]).sum())
    counts = (total * problem.shape.heads, saturated, lost)
    return torch.stack([torch.as_tensor(x, device=device) for x in counts]).long()
