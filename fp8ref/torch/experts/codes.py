"""Rows that move between ranks with different experts as FP8 codes (spec X-14).

    cast = expert_codes.cast_of([gate, up], "input")          # None: rows move in their own dtype
    moved, q = expert_codes.dispatch(x, ends, group, [gate, up])
    y = gate(moved.rows, moved.ends, input_codes=q)           # moved.rows only stand for the rows
    slot = expert_codes.Slot()
    y = expert_codes.combine(down(h, moved.ends, grad_codes=slot), moved, ends, group, down, slot)

One scale of all of an expert's rows serves both GEMMs that take them, so codes alone are enough.
The sender casts: under dynamic scaling by the amaxes of each expert's rows on all ranks, which one
all-reduce brings. The tensor that goes through autograd in place of the rows has no memory, and is
NaN: what reads it shows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8ref.recipe import CastSpec, Role
from fp8ref.selection.grouped import moved_cast
from fp8ref.torch import delayed
from fp8ref.torch.experts import grouped, operands, parallel
from fp8ref.torch.experts.grouped import Slot
from fp8ref.torch.experts.layer import GroupedLinear
from fp8ref.torch.experts.operands import Groups
from fp8ref.torch.experts.parallel import Moved
from fp8ref.torch.quantize.scaling import Quantized

__all__ = ["Slot", "cast_of", "combine", "dispatch"]


def cast_of(linears: Sequence[GroupedLinear], role: Role) -> CastSpec | None:
    """``selection.grouped.moved_cast`` of these linears' recipes; None while rows are observed."""
    if grouped.observers:
        return None
    return moved_cast((linear.recipe for linear in linears), role)


def dispatch(
    x: Tensor, ends: Tensor, group: ProcessGroup, linears: Sequence[GroupedLinear]
) -> tuple[Moved, Quantized | None]:
    """Send rows x [M, K], in groups of all E experts that end at ends, to the ranks that have the
    experts, whose linears take them.

    linears   under delayed scaling have observed the same rows, at the same steps, since they were
              converted, loaded or switched: the first one's scale is that of all. On a GPU this is
              not checked, as the host would wait.
    Returns:  as ``parallel.dispatch``, and the rows in FP8; None where ``cast_of`` is None. Then
              rows are what moved.
    Order:    under delayed scaling the linears observe the rows before they move.
    Raises:   ValueError: linears on a CPU whose states have other scales.
    Gradient: as ``parallel.dispatch``, in x's dtype.
    """
    cast = cast_of(linears, "input")
    if cast is None:
        return parallel.dispatch(x, ends, group), None
    if cast.delayed is not None:
        _check_alike(linears)
    groups = operands.groups_of(ends, len(x))
    rows = groups.only(x.detach())
    for linear in linears:
        linear.observe_rows("input", rows, groups)
    q = _quantized(rows, "input", cast, groups, group, linears[0])
    in_splits, out_splits, order, own = parallel.plan(ends, group)
    carrier, codes = _Sent.apply(
        x, q.codes.view(torch.uint8)[: sum(in_splits)], order, (out_splits, in_splits, group)
    )
    moved = Moved(carrier, own, order, in_splits, out_splits, len(x))
    return moved, _own(q, codes, group)


def _check_alike(linears: Sequence[GroupedLinear]) -> None:
    """ValueError for different delayed input scales, if they can be read without a wait."""
    scales = [
        linear.states["input"].scale
        for linear in linears
        if isinstance(linear.states["input"], delayed.RoleState)
    ]
    first = scales[0]
    if (
        type(first) is Tensor
        and first.device.type == "cpu"
        and not all(torch.equal(first, other) for other in scales)
    ):
        raise ValueError(
            "linears of the same rows need equal delayed scales of input; got "
            f"{[float(scale) for scale in scales]}. Use expert_parallel.dispatch (X-14)."
        )


def combine(
    y: Tensor, moved: Moved, ends: Tensor, group: ProcessGroup, linear: GroupedLinear, slot: Slot
) -> Tensor:
    """``parallel.combine`` of what a linear made with this slot: its gradient moves to the linear
    as codes, which the slot takes to it.

    ends      as they were dispatched: of all E experts' rows on this rank.
    """
    exchange = linear, (moved.taken, moved.given, group), moved.held, slot
    state = linear.states["grad_output"].scale if "grad_output" in linear.states else None
    return _Returned.apply(y, ends, moved.order, state, exchange)


def _quantized(
    rows: Tensor,
    role: Role,
    cast: CastSpec,
    groups: Groups,
    group: ProcessGroup,
    linear: GroupedLinear,
    state: Tensor | None = None,
) -> Quantized:
    """rows [M, C] with the scale of the expert's rank: scales () or [E], of all experts."""
    if cast.delayed is not None and state is None:
        state = linear.states[role].scale  # type: ignore[assignment]
    over = (group.group_name, linear.shared) if linear.shared is not None else (group.group_name,)
    return operands.quantize_rows(rows, cast, -1, groups, "group", state, over)


def _own(q: Quantized, codes: Tensor, group: ProcessGroup) -> Quantized:
    """Rows that arrived, with the scales of this rank's experts."""
    scale, scale_inv = (
        s if s.ndim == 0 else s.reshape(group.size(), -1)[group.rank()]
        for s in (q.scale, q.scale_inv)
    )
    return q._replace(codes=codes.view(q.codes.dtype), scale=scale, scale_inv=scale_inv)


def _nothing(like: Tensor, rows: int) -> Tensor:
    return torch.full((), torch.nan, dtype=like.dtype, device=like.device).expand(
        rows, like.shape[1]
    )


class _Sent(torch.autograd.Function):
    """(stand-in for the rows, codes) on arrival; the stand-in's gradient moves back."""

    @staticmethod
    def forward(ctx, x: Tensor, codes: Tensor, order: Tensor, exchange: tuple):
        ctx.save_for_backward(order)
        ctx.exchange, ctx.held = exchange, len(x)
        arrived = parallel.all_to_all(codes.contiguous(), *exchange)[order]
        ctx.mark_non_differentiable(arrived)
        return _nothing(x, len(order)), arrived

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        (order,), (out_splits, in_splits, group) = ctx.saved_tensors, ctx.exchange
        back = torch.empty_like(grad, memory_format=torch.contiguous_format).index_copy_(
            0, order, grad
        )
        own = parallel.all_to_all(back, in_splits, out_splits, group)
        return torch.cat([own, own.new_zeros(ctx.held - len(own), own.shape[1])]), None, None, None


class _Returned(torch.autograd.Function):
    """Results back to the sending ranks; the gradient moves to the experts as codes."""

    @staticmethod
    def forward(
        ctx, y: Tensor, ends: Tensor, order: Tensor, state: Tensor | None, exchange: tuple
    ) -> Tensor:
        ctx.save_for_backward(ends, order, state)
        _, (out_splits, in_splits, group), held, _ = ctx.exchange = exchange
        back = torch.empty_like(y).index_copy_(0, order, y)
        own = parallel.all_to_all(back, in_splits, out_splits, group)
        return torch.cat([own, own.new_zeros(held - len(own), own.shape[1])])

    @staticmethod
    def backward(ctx, grad: Tensor):
        (ends, order, state), (linear, ranks, _, slot) = ctx.saved_tensors, ctx.exchange
        out_splits, in_splits, group = ranks
        groups = operands.groups_of(ends, len(grad))
        rows = groups.only(grad)
        linear.observe_rows("grad_output", rows, groups)
        cast = linear.recipe.recipe.grad_input.a
        q = _quantized(rows, "grad_output", cast, groups, group, linear, state)
        codes = parallel.all_to_all(
            q.codes.view(torch.uint8)[: sum(in_splits)].contiguous(), out_splits, in_splits, group
        )[order]
        slot.q = _own(q, codes, group)
        return _nothing(grad, len(order)), None, None, None, None
