"""One update of AdamW with narrow states on flat tensors, in place (spec O-2 to O-10, O-14, O-15).

An eager step on a CPU is made of pieces that stay in its cache. A large tensor is cut into pieces
as ranks would cut it; small tensors follow each other in one piece, each from a new block on.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8ref.spec.states import layouts as states
from fp8ref.spec.states.layouts import Layout, Moment, Scalars
from fp8ref.torch.quantize import cast, philox, storage
from fp8ref.torch.quantize.float_values import eager_on_cpu
from fp8ref.torch.states import moments
from fp8ref.torch.states.moments import CELL, MomentState, Part

PIECE = 1 << 16
"""Elements of a piece for each thread: 14 arrays of them fit into a CPU's cache."""


GPU_OPTIONS: dict[str, Any] = {"realize_opcount_threshold": 1000, "realize_reads_threshold": 64}
"""Inductor's options on a GPU: new moments are computed wherever they are needed.

Written to memory, they are 4 bytes a parameter each.
"""


class Work(NamedTuple):
    """An update of flat tensors: the weight and codes are changed in place.

    kept  m, v and, where the layout keeps one, the master.
    """

    p: Tensor
    g: Tensor
    kept: tuple[MomentState, ...]
    at: Scalars
    layout: Layout
    part: Part
    keys: tuple[philox.Key | None, ...]


class Update:
    """The update of weights and their states, eager or compiled: the bits are the same."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled

    def begin(self, work: Work) -> list[Tensor]:
        """What parts of a tensor have to reduce by maximum over ranks before they store."""
        each = [self._begin_piece(piece) for piece in self._pieces(work)]
        return [
            functools.reduce(torch.maximum, piece_maxima)
            for piece_maxima in zip(*each, strict=True)
        ]

    def update(self, work: Work, maxima: list[Tensor] | None = None) -> list[Tensor]:
        """Update a weight and its state in place; the amaxes that other ranks complete."""
        pieces = list(self._pieces(work))
        if maxima is None and len(pieces) > 1:
            whole = any(moment.scaling and moment.block is None for moment in work.layout.kept)
            if not whole and not work.layout.stochastic:
                for piece in pieces:
                    self.update(_alone(piece))
                return []
            maxima = self.begin(work)
        if maxima is None and work.p.is_cuda and amaxes_first(work.layout):
            # otherwise new moments wait in memory, in float32, for the amax of all of them
            maxima = self.begin(work)
        each = [self._finish_piece(piece, maxima) for piece in pieces]
        amaxes = []
        for old, moment, *news in zip(work.kept, work.layout.kept, *each, strict=True):
            for field, mine, *values in zip(MomentState._fields[1:], old[1:], *news, strict=True):
                if mine is not None:
                    mine.copy_(
                        functools.reduce(torch.maximum, values) if field == "amax" else values[0]
                    )
                    if field == "amax" and moment.amax == "predicted":
                        amaxes.append(mine)
        return amaxes

    def update_together(self, works: list[Work]) -> None:
        """Update small tensors that have the same numbers and layout, as many at a time as a piece
        holds."""
        batch: list[Work] = []
        elements = 0
        for work in works:
            if batch and elements + work.part.size > PIECE:
                self._update_batch(batch)
                batch, elements = [], 0
            batch.append(work)
            elements += -(-work.part.size // CELL) * CELL
        self._update_batch(batch)

    def _update_batch(self, works: list[Work]) -> None:
        if len(works) == 1:
            self.update(works[0])
            return
        cells = tuple(-(-work.part.size // CELL) for work in works)
        inside: list[Tensor] = []
        outside: list[Tensor] = []

        def joined(tensors: list[Tensor], slots: list[int], fill: float, dtype: torch.dtype):
            buffer = torch.full((sum(slots),), fill, dtype=dtype, device=tensors[0].device)
            for slot, x in zip(buffer.split(slots), tensors, strict=True):
                inside.append(slot[: x.numel()].view(x.shape))
            outside.extend(tensors)
            return buffer

        def join_moment(which: int, moment: Moment) -> MomentState:
            each = [work.kept[which] for work in works]
            slots = [1 if moment.block is None else n * (CELL // moment.block) for n in cells]
            codes = joined([x.codes for x in each], elements, 0, each[0].codes.dtype)
            rest: list[Tensor | None] = []
            for field in MomentState._fields[1:]:
                values = [getattr(x, field) for x in each]
                filled = (values, slots, field != "amax", torch.float32)
                rest.append(None if values[0] is None else joined(*filled))
            return MomentState(codes, *rest)

        layout, elements = works[0].layout, [n * CELL for n in cells]
        kept = tuple(join_moment(which, moment) for which, moment in enumerate(layout.kept))
        p = (
            kept[2].codes
            if is_master(works[0])
            else joined([work.p for work in works], elements, 0, works[0].p.dtype)
        )
        changed = len(inside)
        g = joined([work.g for work in works], elements, 0, torch.float32)
        torch._foreach_copy_(inside, outside)
        part, keys = Part(len(p), 0, cells), (None,) * len(kept)
        self.update(Work(p, g, kept, works[0].at, layout, part, keys))
        torch._foreach_copy_(outside[:changed], inside[:changed])

    def _begin_piece(self, piece: Work) -> list[Tensor]:
        if not self._compiles(piece):
            return begin_part(*piece[:-1])
        return _compiled(begin_part, piece.p.device.type)(*_on_device(piece)[:-1])

    def _finish_piece(self, piece: Work, maxima: list[Tensor] | None) -> list[list[Tensor | None]]:
        if not self._compiles(piece):
            return finish_part(*piece, maxima)
        return _compiled(finish_part, piece.p.device.type)(*_on_device(piece), maxima)

    def _compiles(self, work: Work) -> bool:
        # Of other sizes inductor (torch 2.13, on a CPU) leaves out the last elements, after a loop
        # over padded blocks.
        return (
            self.compiled
            and work.p.numel() % CELL == 0
            and work.part.start % CELL == 0
            and work.p.numel() > 0
        )

    def _pieces(self, work: Work) -> Iterator[Work]:
        """Pieces of consecutive elements; one unless operations run singly on a CPU."""
        here, size = work.p.numel(), PIECE * torch.get_num_threads()
        if self._compiles(work) or not work.p.is_cpu or here <= size or work.part.cells:
            yield work
            return
        for first in range(0, here, size):
            kept = tuple(x._replace(codes=x.codes[first : first + size]) for x in work.kept)
            p, g = (x[first : first + size] for x in (work.p, work.g))
            p = kept[2].codes if is_master(work) else p
            yield work._replace(
                p=p, g=g, kept=kept, part=work.part._replace(start=work.part.start + first)
            )


def is_master(work: Work) -> bool:
    """Whether the weight of an update is its master, and not written beside it."""
    return work.layout.keeps_master and work.p.dtype == work.kept[2].codes.dtype


@functools.cache
def _compiled(function: Callable, device: str) -> Callable:
    return torch.compile(
        function, fullgraph=True, dynamic=False, options=GPU_OPTIONS if device == "cuda" else None
    )


def begin_part(
    p: Tensor, g: Tensor, kept: tuple[MomentState, ...], at: Scalars, layout: Layout, part: Part
) -> list[Tensor]:
    """What parts of a tensor have to reduce by maximum before they store (``moments.extremes``)."""
    g, new_m, new_v = _new_moments(g, kept, at, layout, part)
    reduces_master = layout.keeps_master and moments.reductions(layout.master, 2)
    root = moments.sqrt(new_v) if layout.v.root or reduces_master else new_v
    maxima = moments.extremes(new_m, g, layout.m, part, 0)
    maxima += moments.extremes(root if layout.v.root else new_v, g, layout.v, part, 1)
    if reduces_master:
        p = moments.read(kept[2], layout.master, layout, part)
        p.sub_(_change(p, new_m, root, at, layout))
        maxima += moments.extremes(p, g, layout.master, part, 2)
    return maxima


def finish_part(p: Tensor, g: Tensor, kept, at: Scalars, layout: Layout, part: Part, keys, maxima):
    """Change the weight and the codes; return what else is stored of what is kept. maxima is
    ``begin_part``'s, of all parts, or None."""
    g, new_m, new_v = _new_moments(g, kept, at, layout, part)
    root = moments.sqrt(new_v)
    new = [new_m, root if layout.v.root else new_v]
    weight = moments.read(kept[2], layout.master, layout, part) if layout.keeps_master else p
    new.append(weight.sub_(_change(weight, new_m, root, at, layout)))
    rest = []
    for which, (x, old, moment) in enumerate(zip(new, kept, layout.kept, strict=False)):
        count = moments.reductions(moment, which)
        extremes = moments.extremes(x, g, moment, part, which) if maxima is None else maxima[:count]
        maxima = None if maxima is None else maxima[count:]
        codes, *others = moments.store(x, extremes, old, which, at, layout, part, keys[which])
        old.codes.copy_(codes)
        rest.append(others)
    if layout.keeps_master and p.dtype != kept[2].codes.dtype:
        written = MomentState(storage.rounded(codes), *rest[2])
        p.copy_(moments.read(written, layout.master, layout, part))
    return rest


def _change(p: Tensor, m: Tensor, root: Tensor, at: Scalars, layout: Layout) -> Tensor:
    """What a step subtracts from a weight (O-6); root is v's."""
    ratio = (m * at.inverse1).div_((root * at.inverse2).add_(at.eps))
    if layout.bounded:
        ratio = torch.clamp(ratio, -at.bound, at.bound)
    return moments.change(ratio, p, at)


def _new_moments(g: Tensor, kept: tuple[MomentState, ...], at: Scalars, layout: Layout, part: Part):
    """The gradient in range, and both new moments (O-2 to O-5)."""
    g = in_range(cast.to_f32(g))
    m, v = (
        moments.read(stored, moment, layout, part)
        for stored, moment in zip(kept[:2], (layout.m, layout.v), strict=True)
    )
    return g, *moments.averages(g, m, v, at, layout)


def in_range(g: Tensor) -> Tensor:
    """O-2."""
    kept = moments.not_below(states.GRADIENT_MIN, g)
    if eager_on_cpu(g) and g.numel():
        low, high = g.aminmax()
        # the comparison of all elements takes longer
        if low >= -states.GRADIENT_MAX and high <= states.GRADIENT_MAX:
            return kept
    return torch.where(g.abs() <= states.GRADIENT_MAX, kept, torch.nan)


def _alone(piece: Work) -> Work:
    """A piece of whole blocks as its own tensor."""
    size, start = piece.p.numel(), piece.part.start

    def own_groups(stored: MomentState, moment: Moment) -> MomentState:
        if moment.block is None:
            return stored
        groups = slice(start // moment.block, -(-(start + size) // moment.block))
        return MomentState(stored.codes, *(None if x is None else x[groups] for x in stored[1:]))

    layout = piece.layout
    return piece._replace(kept=tuple(map(own_groups, piece.kept, layout.kept)), part=Part(size))


def _on_device(piece: Work) -> Work:
    """A piece with its numbers as tensors, so that new ones need no recompilation."""
    keys = [
        None if key is None else tuple(torch.tensor(key, device=piece.p.device).unbind())
        for key in piece.keys
    ]
    at = Scalars(*numbers(piece.at, piece.p.device).unbind())
    return in_blocks(piece)._replace(at=at, keys=tuple(keys))  # type: ignore[arg-type]


def amaxes_first(layout: Layout) -> bool:
    """Whether a scale needs the amax of a whole tensor before anything is stored."""
    each = enumerate(layout.kept)
    return any(
        moments.reductions(moment, which) and moment.block is None and moment.amax != "previous"
        for which, moment in each
    )


def in_blocks(piece: Work) -> Work:
    """A piece of whole blocks as [blocks, elements]: inductor then makes one kernel of the amaxes
    and of what they scale."""
    blocks = {moment.block for moment in (piece.layout.m, piece.layout.v)}
    (block,) = blocks if len(blocks) == 1 else (None,)
    if (
        block is None
        or piece.layout.stochastic
        or piece.part.start % block
        or piece.p.numel() % block
    ):
        return piece
    kept = tuple(x._replace(codes=x.codes.view(-1, block)) for x in piece.kept)
    return piece._replace(p=piece.p.view(-1, block), g=piece.g.view(-1, block), kept=kept)


@functools.lru_cache(maxsize=8)
def numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    """float32 of these numbers on a device."""
    tensor = torch.tensor(values, dtype=torch.float32, device="cpu")
    if device.type == "cuda":  # from pinned memory the host does not wait
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
