"""Rows that move between ranks that hold different experts (spec X-13).

    moved = expert_parallel.dispatch(x, ends, group)      # x [M, K]: this rank's rows, in groups of
    all experts
    y = grouped.apply(moved.rows, w, moved.ends, recipe="rowwise")  # w: the rank's own experts
    y = expert_parallel.combine(y, moved, group)          # [M, N], in the order of x

Rank r of a group of R has the experts from r E / R on. Each sends its rows of an expert to the rank
that has it, by one all-to-all whose sizes the host reads. ``dispatch_quantized`` sends codes and
scales. ``cut`` leaves each rank its own experts of a model's grouped linears.
"""

from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fp8ref.spec.granularity import by_name
from fp8ref.torch.experts import layer
from fp8ref.torch.quantize.scaling import Quantized

__all__ = [
    "Moved",
    "all_to_all",
    "check",
    "combine",
    "cut",
    "dispatch",
    "dispatch_quantized",
    "plan",
]


class Moved(NamedTuple):
    """Rows of this rank's own experts, from all ranks.

    rows     [M', C], in groups by expert, and in a group by sending rank, then as they were sent.
    ends     int32 [E / R]: where each group ends.
    order    int64 [M']: where each row is in what was received.
    given, taken
             how many rows this rank sent to each rank, and received from it.
    held     M: how many rows it has, those of no group included.
    """

    rows: Tensor
    ends: Tensor
    order: Tensor
    given: list[int]
    taken: list[int]
    held: int


def dispatch(x: Tensor, ends: Tensor, group: ProcessGroup) -> Moved:
    """Send rows x [M, C], in groups of all E experts that end at ends, to the experts' ranks.

    Order:    bits are moved, none is computed. The groups are those that one process with all rows
              would have, if the ranks' rows are its own in the order of the ranks.
    Gradient: of rows; each comes back to the rank that sent it.
    Raises:   ValueError: E that the number of ranks does not divide.
    """
    in_splits, out_splits, order, own = plan(ends, group)
    received = _AllToAll.apply(x[: sum(in_splits)], out_splits, in_splits, group)
    return Moved(received[order], own, order, in_splits, out_splits, len(x))


def dispatch_quantized(q: Quantized, ends: Tensor, group: ProcessGroup) -> tuple[Quantized, Moved]:
    """``dispatch`` of rows that are cast already along their columns: codes, a byte an element, and
    scales [M, 1] or [M, blocks] move (X-12). The rows of Moved are the codes.

    Raises:   ValueError: as dispatch; scales that cover several rows.
    """
    if q.axis not in (-1, 1) or by_name(q.granularity).other != 1:
        raise ValueError(
            f"codes move only with one scale per row; got {q.granularity!r} along axis {q.axis}. "
            "Move the tensor, then cast (X-12)."
        )
    in_splits, out_splits, order, own = plan(ends, group)
    count = sum(in_splits)
    codes, scale, scale_inv = (
        all_to_all(v[:count].contiguous(), out_splits, in_splits, group)[order]
        for v in (q.codes.view(torch.uint8), q.scale, q.scale_inv)
    )
    codes = codes.view(q.codes.dtype)
    return q._replace(codes=codes, scale=scale, scale_inv=scale_inv), Moved(
        codes, own, order, in_splits, out_splits, len(q.codes)
    )


def combine(y: Tensor, moved: Moved, group: ProcessGroup) -> Tensor:
    """Send results [M', N] of moved rows back: [M, N], in the order in which their rows were
    dispatched; zeros in rows of no group."""
    received = torch.empty_like(moved.order).index_copy(
        0, moved.order, torch.arange(len(moved.order), device=y.device)
    )
    returned = _AllToAll.apply(y[received], moved.given, moved.taken, group)
    return torch.cat([returned, returned.new_zeros(moved.held - len(returned), returned.shape[1])])


def check(model: nn.Module, mesh: DeviceMesh) -> None:
    """ValueError where ``cut`` cannot cut: no grouped linear; experts that ranks do not divide."""
    linears = layer.grouped_linears(model)
    if not linears:
        raise ValueError(
            "expert parallelism needs grouped linears; the model has none. Drop the mesh dim "
            "expert."
        )
    for name, linear in linears.items():
        if len(linear.weight) % mesh.size():
            raise ValueError(
                f"experts are divisible by the {mesh.size()} ranks that share them; got "
                f"{len(linear.weight)} of {name}."
            )


def cut(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Leave each rank of a 1-dim mesh its experts of ``GroupedLinear``s, DTensors cut along dim 0.

    Returns:  the modules that hold grouped linears: what ``fully_shard`` shards apart, over the
              ranks that have the same experts.
    Raises:   ValueError: as ``check``, before anything is changed.
    """
    check(model, mesh)
    linears = layer.grouped_linears(model)
    for linear in linears.values():
        own = len(linear.weight) // mesh.size()
        piece = linear.weight.detach()[mesh.get_local_rank() * own :][:own].clone()
        linear.weight = nn.Parameter(
            DTensor.from_local(piece, mesh, [Shard(0)], run_check=False),
            linear.weight.requires_grad,
        )
    return list(dict.fromkeys(model.get_submodule(name.rpartition(".")[0]) for name in linears))


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; the gradient moves back."""

    @staticmethod
    def forward(
        ctx, x: Tensor, out_splits: list[int], in_splits: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.out_splits, ctx.in_splits, ctx.group = out_splits, in_splits, group
        return all_to_all(x.contiguous(), out_splits, in_splits, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return (
            all_to_all(grad.contiguous(), ctx.in_splits, ctx.out_splits, ctx.group),
            None,
            None,
            None,
        )


def all_to_all(
    x: Tensor, out_splits: list[int], in_splits: list[int], group: ProcessGroup
) -> Tensor:
    """[sum(out_splits), C] of x [sum(in_splits), C]."""
    out = x.new_empty(sum(out_splits), *x.shape[1:])
    distributed.all_to_all_single(out, x, out_splits, in_splits, group=group)
    return out


def plan(ends: Tensor, group: ProcessGroup) -> tuple[list[int], list[int], Tensor, Tensor]:
    """(given, taken, order, ends of the rank's own groups) of ``Moved``. ValueError as dispatch."""
    ranks, experts = group.size(), len(ends)
    if experts % ranks:
        raise ValueError(
            f"experts are divisible by the {ranks} ranks that share them; got {experts}."
        )
    sizes = torch.diff(ends.long(), prepend=ends.new_zeros(1).long()).reshape(ranks, -1)
    received = torch.empty_like(sizes)  # [R, E / R], of each sender
    distributed.all_to_all_single(received, sizes, group=group)
    own = torch.arange(sizes.shape[1], device=ends.device).repeat(ranks)
    order = torch.argsort(own.repeat_interleave(received.reshape(-1)), stable=True)
    return (
        sizes.sum(1).tolist(),
        received.sum(1).tolist(),
        order,
        received.sum(0).cumsum(0).to(torch.int32),
    )
