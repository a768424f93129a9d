"""What storing the moments of a step cost, measured on the device (spec O-12).

    with health.measuring(optimizer) as measurements:
        optimizer.step()
    numbers = health.merge_ranks(measurements)

A rank measures its own part of each parameter; ``merge_ranks`` adds the parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed

from fp8ref.spec.states.health import FIELDS, clip_limit
from fp8ref.spec.states.layouts import Moment, Scalars
from fp8ref.torch.quantize import cast
from fp8ref.torch.states import moments, states
from fp8ref.torch.states.moments import MomentState, Part
from fp8ref.torch.states.states import Stored
from fp8ref.torch.states.update import in_range
from fp8ref.torch.tensors.local_part import local_like

__all__ = ["Found", "measuring", "merge_ranks"]

Found = dict[Tensor, Tensor]
"""Parameter -> float64 [FIELDS] of this rank's part, divided by the number of ranks that have the
same part."""


@contextmanager
def measuring(optimizer: states.AdamW) -> Iterator[Found]:
    """Measure the step that the optimizer makes in this context, for every parameter that has a
    gradient.

    The moments before the step are copied, and nothing that the step computes changes.
    Order:    counts are exact; sums are float64.
    Specials: figures of a state that holds NaN are NaN where they are not counts.
    Raises:   ValueError: an optimizer of another class; a context in which no step, or several,
              were made.
    """
    if not isinstance(optimizer, states.AdamW):
        raise ValueError(f"health needs fp8ref.torch.states.AdamW; got {type(optimizer).__name__}.")
    measurements: Found = {}
    before = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                now = states.stored(optimizer, p)
                before[p] = now._replace(m=_copied(now.m), v=_copied(now.v))
    yield measurements
    for p, old in before.items():
        new = states.stored(optimizer, p)
        if new.step != old.step + 1:
            raise ValueError(f"health compares one step; the optimizer made {new.step - old.step}.")
        measurements[p] = _measure(optimizer, p, old, new)


def _copied(stored: MomentState) -> MomentState:
    return MomentState(*(None if x is None else x.clone() for x in stored))  # type: ignore[arg-type]


def merge_ranks(measurements: Found) -> Tensor:
    """float64 [parameters, FIELDS] of whole tensors, the same on every rank, by one all-gather.

    Raises:   ValueError: nothing was measured.
    """
    if not measurements:
        raise ValueError(
            "health needs parameters with a gradient; the step had none. Call backward before."
        )
    parts = torch.stack(list(measurements.values()))
    if distributed.is_initialized():
        every = [torch.empty_like(parts) for _ in range(distributed.get_world_size())]
        distributed.all_gather(every, parts)
        each = torch.stack(every)
        parts = torch.cat([each[..., :-1].sum(0), each[..., -1:].amax(0)], dim=-1)
    return parts


@torch.no_grad()
def _measure(optimizer: states.AdamW, p: Tensor, old: Stored, new: Stored) -> Tensor:
    grad = p.grad
    assert grad is not None
    g = in_range(cast.to_f32(local_like(grad, p, redistribute=True).reshape(-1)))
    if not g.numel():
        return g.new_zeros(len(FIELDS), dtype=torch.float64)
    layout, part, at = new.layout, new.part, states.scalars_of(optimizer, p, new.step)
    both = (layout.m, layout.v)
    (old_m, old_v), (stored_m, stored_v) = (
        [moments.read(x, moment, layout, part) for x, moment in zip(pair[:2], both, strict=True)]
        for pair in (old, new)
    )
    m, v = moments.averages(g, old_m, old_v, at, layout)
    exact, actual = _ratio(m, v, at).double(), _ratio(stored_m, stored_v, at).double()
    root, stored_root = v.double().sqrt(), stored_v.double().sqrt()
    lost = ((stored_v == 0) & (stored_m != 0)).count_nonzero()
    none = torch.zeros((), dtype=torch.int64, device=g.device)
    bounded = (exact.abs() > at.bound).count_nonzero() if layout.bounded else none
    idle = moments.averages(torch.zeros_like(g), stored_m, stored_v, at, layout)
    clipped, stalled = (
        [count(*of, part, none) for of in zip(pair, new[:2], both, strict=True)]
        for count, pair in ((_clipped, (m, v)), (_stalled, idle))
    )
    sums = [x.sum() for x in (root, stored_root - root, exact.square(), (actual - exact).square())]
    counts = (none + g.numel(), lost, bounded, *clipped, *stalled)
    shared = torch.stack([x.double() for x in (*counts, *sums)]) / new.copies
    return torch.cat([shared, actual.abs().amax().reshape(1)])


def _ratio(m: Tensor, v: Tensor, at: Scalars) -> Tensor:
    """The ratio of corrected moments, before a bound (O-6)."""
    return (m * at.inverse1) / (moments.sqrt(v) * at.inverse2 + at.eps)


def _clipped(x: Tensor, stored: MomentState, moment: Moment, part: Part, none: Tensor) -> Tensor:
    if stored.scale_inv is None or moment.expansion:
        return none
    return moments.above(
        moments.sqrt(x) if moment.root else x, clip_limit(moment), stored, moment, part
    ).count_nonzero()


def _stalled(x: Tensor, stored: MomentState, moment: Moment, part: Part, none: Tensor) -> Tensor:
    if moment.rounding == "stochastic":
        return none
    codes = moments.again(moments.sqrt(x) if moment.root else x, stored, moment, part)
    magnitude = stored.codes & 0x7F if moment.fmt.bits == 8 else stored.codes
    return ((magnitude != 0) & (codes == stored.codes)).count_nonzero()
