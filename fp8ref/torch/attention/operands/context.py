"""Attention of ranks that have parts of the tokens: context parallelism (spec A-21).

    o = attention.apply(q, k, v, context=mesh["context"].get_group().group_name, variant="cudnn",
    mask=Mask(causal=True))

Rank r of n has tokens r T / n to below (r + 1) T / n of q, k and v. Codes of k and v are gathered,
a byte an element; then each rank's queries meet all tiles in the variant's order, as on one device.
Gradients of k and v are summed in the ranks' order.
"""

import dataclasses

import torch
from torch import Tensor, distributed

from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.inputs import Shape, Spec


def check(spec: Spec, shape: Shape, *, documents: bool) -> None:
    """ValueError for what cannot be cut along the tokens."""
    variant = spec.variant
    if variant.real or variant.granularity not in ("tensor", None):
        raise ValueError(
            "context parallelism takes one scale for a tensor, or none; variant "
            f"{variant.name!r} has scales of {variant.granularity or 'real numbers'}. Use "
            "'cudnn' or 'bf16', or cut sequences and heads instead (amax_group)."
        )
    if documents or shape.queries != shape.keys:
        raise ValueError(
            "context parallelism cuts queries and keys alike, without documents; got "
            f"{shape.queries} queries and {shape.keys} keys on a "
            f"rank{', and documents' * documents}."
        )


def problem(spec: Spec, shape: Shape) -> tuple[Spec, Shape]:
    """The spec of this rank's queries, and the shape of its problem: all ranks' keys.

    As they are without ``spec.context``.
    """
    if spec.context is None:
        return spec, shape
    group = spec.ranks
    placed = dataclasses.replace(spec, first=group.rank() * shape.queries)
    return placed, dataclasses.replace(shape, keys=group.size() * shape.keys)


def gathered(tensors: dict[str, Heads], spec: Spec) -> dict[str, Heads]:
    """Quantized q, k and v with the codes of k and v of all ranks, along the tokens; as they are
    without ``spec.context``.
    """
    if spec.context is None:
        return tensors
    return {
        role: x if role == "q" else x._replace(codes=_all(x.codes, spec))
        for role, x in tensors.items()
    }


def _all(codes: Tensor, spec: Spec) -> Tensor:
    """[B, Hkv, T / n, D] of each rank as [B, Hkv, T, D], as bytes."""
    group = spec.ranks
    own = codes.contiguous().view(torch.uint8)
    parts = [torch.empty_like(own) for _ in range(group.size())]
    distributed.all_gather(parts, own, group=group)
    return torch.cat([x.view(codes.dtype) for x in parts], dim=2)
