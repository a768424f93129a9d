"""The operands of grouped GEMMs: rows in groups, quantized (spec X-3, X-5, X-7).

Nothing here reads a tensor's values on the host. An operand is ``scaling.Quantized`` of axis -1 or
-2, whose scales are those of its groups, in their order:

    rows [M, C]        () or [E] for tensorwise; along C [M, 1], or [M, C / block] of blocks; along
                       M [E, C], [1, C] of all groups, or [S, C] of blocks, a group's after those of
                       the group before
    weights [E, N, K]  (), [E, 1, 1], [E, N, 1] or [E, 1, K], or a line for each block

``group_part`` is one group's part, as a GEMM takes it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fp8ref.recipe import CastSpec
from fp8ref.selection.grouped import Amax
from fp8ref.spec import granularity as granularities
from fp8ref.spec.granularity import Blocks, by_name
from fp8ref.torch.quantize import cast, scales, scaling
from fp8ref.torch.quantize.scaling import Quantized


class Groups(NamedTuple):
    """The group of each row: ends int32 [E]; sizes int64 [E]; group int64 [M], E if none."""

    ends: Tensor
    sizes: Tensor
    group: Tensor

    def only(self, x: Tensor) -> Tensor:
        """x [M, ...] with zeros in rows of no group, whatever they hold (X-5)."""
        return torch.where((self.group < len(self.sizes))[:, None], x, 0)


def groups_of(offs: Tensor, rows: int) -> Groups:
    """The groups of that many rows, by their ends (X-1)."""
    ends = offs.long()
    sizes = torch.diff(ends, prepend=torch.zeros_like(ends[:1]))
    group = torch.searchsorted(ends, torch.arange(rows, device=offs.device), right=True)
    return Groups(offs, sizes, group)


def blocks_of(groups: Groups, size: int) -> tuple[Tensor, Tensor, int]:
    """Blocks that begin with their group (X-7): the number of each row's, that of each group's
    first, and how many there may be."""
    rows, experts = len(groups.group), len(groups.sizes)
    per_group = (groups.sizes + size - 1) // size
    first, begin = per_group.cumsum(0) - per_group, groups.ends.long() - groups.sizes
    count, e = rows // size + experts, groups.group.clamp(max=experts - 1)
    segment = first[e] + (torch.arange(rows, device=e.device) - begin[e]) // size
    return torch.where(groups.group < experts, segment, count), first, count


def padded_rows(groups: Groups, rows: int, alignment: int) -> tuple[Tensor, Tensor, int]:
    """Where each row goes if groups are padded to multiples of alignment: int64 [M], with rows of
    no group past the end; the padded ends, int32 [E]; and the number of rows that always suffices.
    """
    experts = len(groups.sizes)
    total = (rows // alignment + experts) * alignment
    padded = (groups.sizes + alignment - 1) // alignment * alignment
    ends = padded.cumsum(0)
    further = (ends - padded) - (groups.ends.long() - groups.sizes)  # by how much each group moves
    to = torch.arange(rows, device=ends.device) + further[groups.group.clamp(max=experts - 1)]
    return torch.where(groups.group < experts, to, total), ends.to(torch.int32), total


def laid_out(x: Tensor, to: Tensor, total: int, fill: int = 0) -> Tensor:
    """x's rows as ``padded_rows`` places them, with fill: [total, ...]; others at the end."""
    padded = torch.full((total + 1, *x.shape[1:]), fill, dtype=x.dtype, device=x.device)
    return padded.index_copy(0, to, x)[:total]


def quantize_rows(
    x: Tensor,
    spec: CastSpec,
    axis: int,
    groups: Groups,
    amax: Amax,
    scale: Tensor | None = None,
    shared: str | tuple[str, ...] | None = None,
) -> Quantized:
    """Quantize x [M, C], zeros in rows of no group, along axis -1 or -2.

    scale     of a delayed state; None: by x's amaxes.
    shared    name of the process group whose ranks have rows of the same groups, or of several that
              together connect them: a scale of all of a group's rows is of all of them.
    Raises:   ValueError: as ``scaling.quantize``.
    """
    kind = by_name(spec.granularity)
    if scale is not None:
        return scaling.quantize_with(x, scale, spec.fmt, granularity=spec.granularity, axis=axis)
    if amax == "all" or (axis == -1 and spec.granularity != "tensorwise"):
        return scaling.quantize(
            x, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis
        )
    segment, count = groups.group, len(groups.sizes)
    if kind.reduced is not None:
        segment, _, count = blocks_of(groups, kind.reduced)
    magnitudes = x.detach().abs()
    if spec.granularity == "tensorwise":
        magnitudes = magnitudes.amax(dim=1, keepdim=True)
    # One line more, of rows of no group.
    largest = magnitudes.new_zeros(count + 1, magnitudes.shape[1])
    largest = largest.scatter_reduce(0, segment[:, None].expand_as(magnitudes), magnitudes, "amax")
    largest = largest.float()
    if kind.reduced is None:
        for name in (shared,) if isinstance(shared, str) else shared or ():
            largest = scaling.merge_amax(largest, name)
    table = scales.scales_from_amax(largest, spec.fmt, spec.policy)
    codes = scaling.quantize_blocks(x, table.scale[segment], spec.fmt)
    scale, scale_inv = (
        v[:count, 0] if spec.granularity == "tensorwise" else v[:count] for v in table
    )
    return Quantized(codes, scale, scale_inv, spec.fmt, spec.granularity, axis)


def quantize_weights(
    w: Tensor, spec: CastSpec, axis: int, amax: Amax, scale: Tensor | None = None
) -> Quantized:
    """Quantize w [E, N, K] along axis -1 or -2: each expert's by itself, or all by one scale."""
    if scale is not None:
        return scaling.quantize_with(w, scale, spec.fmt, granularity=spec.granularity, axis=axis)
    if amax == "all":
        return scaling.quantize(
            w, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis
        )
    # refuses blocks that do not divide the reduced axis
    granularities.blocks(spec.granularity, tuple(w.shape[1:]), axis)
    if spec.granularity == "tensorwise":
        blocks: Blocks = (1, None, None)
    else:
        blocks = granularities.lengths(spec.granularity, w.ndim, axis)
    largest = scaling.block_amax(w, blocks).float()  # [E, N / bn, K / bk]
    table = scales.scales_from_amax(largest, spec.fmt, spec.policy)
    codes = scaling.quantize_blocks(w, table.scale, spec.fmt, blocks)
    return Quantized(codes, *table, spec.fmt, spec.granularity, axis)


def exact_values(q: Quantized, groups: Groups) -> Tensor:
    """Dequantized rows or weights in blocks of power-of-two scales: bfloat16 holds them (S-14)."""
    reduced = by_name(q.granularity).reduced
    assert reduced is not None
    if q.codes.ndim == 3 or q.axis == -1:
        scale = scaling.spread(q.scale_inv, tuple(q.codes.shape), q.blocks)
    else:
        segment, _, count = blocks_of(groups, reduced)
        scale = q.scale_inv[segment.clamp(max=count - 1)]
    return q.codes.to(torch.bfloat16) * scale.to(torch.bfloat16)


def dequantized(q: Quantized, groups: Groups) -> Tensor:
    """RN32(decode(codes) * scale_inv), float32 of the codes' shape, of rows or weights."""
    kind, scale = by_name(q.granularity), q.scale_inv
    if q.codes.ndim == 3 or (q.axis == -1 and kind.other is not None):
        scale = scaling.spread(scale, tuple(q.codes.shape), q.blocks)
    elif scale.ndim:
        line = groups.group if kind.reduced is None else blocks_of(groups, kind.reduced)[0]
        scale = scale[line.clamp(max=len(scale) - 1)]
        scale = scale[:, None] if scale.ndim == 1 else scale
    return cast.decode(q.codes, q.fmt) * scale


def group_part(q: Quantized, e: int, begin: int, end: int, first: int = 0) -> Quantized:
    """Group e's part of rows, those from begin to end, or its weight; axis 0 or 1 is reduced.

    first     of rows that are reduced in blocks, the number of the group's first block. The last is
              filled with zeros (X-7).
    """
    tensorwise = q.granularity == "tensorwise"
    if q.codes.ndim == 3:
        scale, scale_inv = (
            s if s.ndim == 0 else s[e].reshape(()) if tensorwise else s[e]
            for s in (q.scale, q.scale_inv)
        )
        return Quantized(q.codes[e], scale, scale_inv, q.fmt, q.granularity, q.axis + 2)
    codes, size = q.codes[begin:end], by_name(q.granularity).reduced
    if q.axis == -1:
        lines = slice(begin, end)
    elif size is None:
        lines = slice(e, e + 1) if q.scale_inv.ndim and len(q.scale_inv) > 1 else slice(0, 1)
    else:
        count = -(-len(codes) // size)
        codes = functional.pad(codes.view(torch.uint8), (0, 0, 0, count * size - len(codes))).view(
            codes.dtype
        )
        lines = slice(first, first + count)
    scale, scale_inv = (
        s if s.ndim == 0 else s[e] if tensorwise else s[lines] for s in (q.scale, q.scale_inv)
    )
    return Quantized(codes, scale, scale_inv, q.fmt, q.granularity, q.axis + 2)


def host_groups(ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(e, begin, end) of each group that has rows, by the groups' ends on the host."""
    for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if begin < end:
            yield e, begin, end


def parts_of(q: Quantized, ends: Sequence[int]) -> Iterator[tuple[int, int, int, Quantized]]:
    """(e, begin, end, ``group_part``) of each group that has rows."""
    size, first = by_name(q.granularity).reduced or 1, 0
    for e, begin, end in host_groups(ends):
        yield e, begin, end, group_part(q, e, begin, end, first)
        first += -(-(end - begin) // size)
