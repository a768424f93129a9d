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

from fp8ref.spec import support
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.problem import Problem, RankCall


def among_ranks(problem: Problem) -> Problem:
    """The problem of this rank's queries and all ranks' keys; as it is without ``call.context``.

    Raises:   ValueError: what cannot be cut along the tokens.
    """
    variant, shape, documents = problem.variant, problem.shape, problem.documents.q is not None
    if problem.call.context is None:
        return problem
    kind = variant.granularity or "real numbers"
    support.require("attention over cut tokens", "torch", variant, scales=kind)
    if documents or shape.queries != shape.keys:
        raise ValueError(
            "context parallelism cuts queries and keys alike, without documents; got "
            f"{shape.queries} queries and {shape.keys} keys on a "
            f"rank{', and documents' * documents}."
        )
    group = problem.call.ranks
    first, keys = group.rank() * shape.queries, group.size() * shape.keys
    return dataclasses.replace(problem, shape=dataclasses.replace(shape, keys=keys, first=first))


def gathered(tensors: dict[str, Heads], call: RankCall) -> dict[str, Heads]:
    """q, k and v with the codes of k and v of all ranks, under ``call.context``."""
    if call.context is None:
        return tensors
    return {
        role: x if role == "q" else x._replace(codes=_all(x.codes, call.ranks))
        for role, x in tensors.items()
    }


def _all(codes: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """[B, Hkv, T / n, D] of each rank -> [B, Hkv, T, D], as bytes."""
    own = codes.contiguous().view(torch.uint8)
    parts = [torch.empty_like(own) for _ in range(group.size())]
    distributed.all_gather(parts, own, group=group)
    return torch.cat([x.view(codes.dtype) for x in parts], dim=2)
