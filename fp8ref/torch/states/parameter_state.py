"""What ``states.AdamW`` keeps of one parameter: the fields of its state, its master, and the part
of it that a rank has."""

import math
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.formats import BFLOAT16
from fp8ref.spec.states.layouts import Layout
from fp8ref.torch.quantize import cast, philox
from fp8ref.torch.states import moments
from fp8ref.torch.states.moments import MomentState, Part
from fp8ref.torch.tensors.local_part import check_alike, cut_groups, local_like, local_part


def keeps_apart(layout: Layout) -> bool:
    """Whether masters are in the optimizer's state, beside the parameters."""
    return layout.keeps_master and not is_own_master(layout)


def in_state(layout: Layout, p: Tensor) -> bool:
    """Whether the state of a parameter has its master: always that of codes (``copies``)."""
    return keeps_apart(layout) or isinstance(p, Float8TrainingTensor)


def is_own_master(layout: Layout) -> bool:
    """Whether a parameter that is not float32 is its own master."""
    return layout.master.fmt == BFLOAT16


def dtypes(layout: Layout) -> tuple[torch.dtype, ...]:
    """The dtypes of parameters."""
    if not layout.keeps_master:
        return (torch.float32,)
    return (torch.bfloat16,) if is_own_master(layout) else (torch.float32, torch.bfloat16)


def master(p: Tensor, w: Tensor, layout: Layout) -> MomentState:
    """The master of a parameter before the first step (O-14), of its weight w, from all ranks that
    have parts of it."""
    moment, (start, ranks), x = layout.master, place(p), cast.to_f32(flat(w))
    part = Part(p.numel(), start)
    amax = moments.amax_of(x, moment, part)
    reduce_amaxes([(ranks, [amax])])
    master_state = moments.master(x, amax, moment, part)
    codes = moments.zeros(p, moment).codes
    local_like(codes, p).view(-1).copy_(master_state.codes)
    return master_state._replace(codes=codes)


def kept(
    p: Tensor, state: dict[str, Tensor], flat: Tensor, layout: Layout
) -> tuple[MomentState, ...]:
    """m, v and, where one is kept, the master, which may be the flat parameter."""
    both = (moment_state(p, state, "m"), moment_state(p, state, "v"))
    if not layout.keeps_master:
        return both
    own = is_own_master(layout)
    return (*both, MomentState(flat) if own else moment_state(p, state, "master"))


def keys(seed: int, step: int, number: int, layout: Layout) -> tuple[philox.Key | None, ...]:
    """The seeds of what is kept of a tensor at a step, None where it is rounded to nearest (O-8,
    O-15)."""
    halves = (seed & 0xFFFFFFFF, seed >> 32)

    def of(which: int) -> philox.Key:
        words = philox.words(step, 2 * number + which % 2, halves)
        return words[2:] if which == 2 else words[:2]

    return tuple(
        of(which) if moment.rounding == "stochastic" else None
        for which, moment in enumerate(layout.kept)
    )


def moment_state(p: Tensor, state: dict[str, Tensor], key: str) -> MomentState:
    """This rank's part of m, v or the master in a parameter's state, flat. key: "m", "v" or
    "master".
    """
    codes, *rest = (state.get(f"{key}_{field}") for field in MomentState._fields)
    assert codes is not None
    scales = (None if x is None else local_part(x) for x in rest)
    return MomentState(local_like(codes, p).view(-1), *scales)


def flat(x: Tensor) -> Tensor:
    """This rank's elements in C order."""
    return local_part(x.detach()).reshape(-1)


def flat_gradient(p: Tensor) -> Tensor:
    """This rank's elements of a parameter's gradient in C order, placed as the parameter."""
    assert p.grad is not None
    return local_like(p.grad.detach(), p, redistribute=True).reshape(-1)


def place(p: Tensor) -> tuple[int, tuple[distributed.ProcessGroup, ...]]:
    """The flat index of this rank's first element of a parameter, and the groups of ranks that have
    the others."""
    if not isinstance(p, DTensor):
        return 0, ()
    _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    row = p.numel() // p.shape[0] if p.ndim else 1
    start = min(offset[0] * row if offset else 0, p.numel())
    return start, cut_groups(p)


def check(p: Tensor, layout: Layout) -> None:
    """ValueError for a parameter that a layout does not take."""
    # torch marks FSDP1's flat parameter and all that it replaces
    if getattr(p, "_fsdp_flattened", False):
        raise ValueError(
            "a scale needs whole tensors, which FullyShardedDataParallel flattens; got "
            f"{tuple(p.shape)} of one. Use fully_shard before the optimizer is built (O-11)."
        )
    if isinstance(p, DTensor) and any(x.is_partial() for x in p.placements):
        raise ValueError(
            f"a parameter is whole or cut on each rank; got {p.placements} of {tuple(p.shape)}. "
            "Redistribute it to Replicate() or Shard()."
        )
    if p.dtype not in (accepted := dtypes(layout)) or p.numel() == 0:
        raise ValueError(
            f"layout {layout.name!r} takes non-empty "
            f"{' or '.join(str(d).removeprefix('torch.') for d in accepted)} parameters; got "
            f"{p.dtype} {tuple(p.shape)}. Cast the parameter, or use another layout."
        )


def check_cut(p: Tensor, layout: Layout) -> None:
    """ValueError unless a rank's part is a range of flat indices where the layout has blocks, or
    random numbers that are those of the flat index (O-8)."""
    if not isinstance(p, DTensor):
        return
    blocks = any(moment.block is not None for moment in (layout.m, layout.v))
    if not blocks and not layout.stochastic:
        return
    if not all(isinstance(x, Replicate) or _by_rows(p, i) for i, x in enumerate(p.placements)):
        reason = "rounds by the index of an element"
        if blocks:
            reason = "has blocks of consecutive elements"
        raise ValueError(
            f"layout {layout.name!r} {reason}, so a parameter is cut by rows; got {p.placements} "
            f"of {tuple(p.shape)}. Use a layout such as 'sqrt_e5m2' (O-11)."
        )


def _by_rows(p: DTensor, i: int) -> bool:
    """Whether mesh dim i gives each rank consecutive rows. FSDP2 writes _StridedShard if another
    mesh dim (experts) already shards the rows."""
    placement = p.placements[i]
    if not (isinstance(placement, Shard | _StridedShard) and placement.dim == 0):
        return False
    cut_before = math.prod(
        p.device_mesh.size(j)
        for j in range(i + 1, p.device_mesh.ndim)
        if not p.placements[j].is_replicate()
    )
    return isinstance(placement, Shard) or placement.split_factor == cut_before


def check_step(p: Tensor, state: dict[str, Any], layout: Layout) -> None:
    """ValueError for a parameter, its state or its gradient that a step does not take: a model may
    be cast or cut after its optimizer is built."""
    # a copy has the master's bits, in the dtype that the model computes in
    if not isinstance(p, Float8TrainingTensor):
        check(p, layout)
    check_cut(p, layout)
    if state and state["m_codes"].shape != p.shape:
        raise ValueError(
            f"a parameter has its state's shape, {tuple(state['m_codes'].shape)}; got "
            f"{tuple(p.shape)}. Build a new optimizer."
        )
    if p.grad is None:
        return
    if p.grad.layout != torch.strided:
        raise ValueError(
            f"a gradient is dense; got layout {p.grad.layout} for {tuple(p.shape)}. Build the "
            "embedding with sparse=False."
        )
    if p.grad.dtype not in cast.HIGH_PRECISION:
        raise ValueError(
            f"a gradient is float32, float16 or bfloat16; got {p.grad.dtype}. Cast it first."
        )
    check_alike(p.grad, p)


def reduce_amaxes(amaxes: list[tuple[tuple[distributed.ProcessGroup, ...], list[Tensor]]]) -> None:
    """Replace each tensor by its maximum over the ranks of its groups, in one all-reduce a
    group."""
    group_amaxes: dict[tuple[distributed.ProcessGroup, ...], list[Tensor]] = {}
    for groups, tensors in amaxes:
        group_amaxes.setdefault(groups, []).extend(tensors)
    for groups, tensors in group_amaxes.items():
        if not tensors:
            continue
        flat = torch.cat([x.reshape(-1) for x in tensors])
        # Backends may drop a NaN from a maximum (P-3). No amax is infinite (O-2), so infinity
        # stands for it.
        flat = torch.where(flat.isnan(), torch.inf, flat)
        for group in groups:
            distributed.all_reduce(flat, distributed.ReduceOp.MAX, group=group)
        flat = torch.where(flat == torch.inf, torch.nan, flat)
        for x, value in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(value.view(x.shape))


def check_saved(layout: Layout, p: Tensor, saved: dict[str, Any]) -> None:
    """ValueError unless a saved state of a parameter, if there is one, has its layout and shape,
    and is cut as it is."""
    if not saved:
        return
    like = torch.empty(p.shape, device="meta", dtype=torch.float32)
    expected = {"step": ((), torch.float32, False)}
    kept = {"m": layout.m, "v": layout.v}
    if in_state(layout, p):
        kept["master"] = layout.master
    for key, moment in kept.items():
        for field, x in moments.zeros(like, moment)._asdict().items():
            if x is not None:
                is_cut = field == "codes" and isinstance(p, DTensor)
                expected[f"{key}_{field}"] = tuple(x.shape), x.dtype, is_cut
    actual = {
        key: (tuple(x.shape), x.dtype, isinstance(x, DTensor))
        for key, x in saved.items()
        if isinstance(x, Tensor)
    }
    for key in [*expected, *saved]:
        if actual.get(key) != expected.get(key) or key not in expected:
            raise ValueError(
                f"a state of layout {layout.name!r} and shape {tuple(p.shape)} has {key} = "
                f"{_described(expected.get(key))}; got {_described(actual.get(key))}. States of "
                "another layout are not converted: use that optimizer and model."
            )


def _described(field: tuple | None) -> str:
    """A state's field, for people."""
    if field is None:
        return "nothing"
    shape, dtype, is_cut = field
    return f"{'a DTensor ' if is_cut else ''}{str(dtype).removeprefix('torch.')} {shape}"
