"""One moment of AdamW, or the master of a weight, in PyTorch: what is stored of it, and how it is
read (spec O-4, O-7 to O-10, O-15).

Tensors are flat, or [blocks, elements]. ``Part`` says which elements of a whole tensor they are:
all, those of a rank, or a piece that stays in a CPU's cache. On a CPU some of torch's own
operations are slow, or round in another way; each is replaced by an equal one here:

    sqrt              torch's is not rounded correctly; NumPy's is, and so is what inductor compiles
    number / tensor   is a product with a reciprocal; a tensor of the number is divided instead
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fp8ref.spec.states import layouts as states
from fp8ref.spec.states.layouts import Layout, Moment, Scalars
from fp8ref.torch.quantize import philox, scaling, storage
from fp8ref.torch.quantize.float_values import eager_on_cpu

CELL = 256
"""Elements of which small tensors that are updated together have whole multiples: all blocks divide
it."""


class MomentState(NamedTuple):
    """A stored moment. codes are uint8 of an FP8 format, or the format's own dtype; the rest is
    float32 of shape () or [blocks], None where the layout has none. Fields as in
    ``fp8ref.sim.states``."""

    codes: Tensor
    scale_inv: Tensor | None = None
    amax: Tensor | None = None
    exponent: Tensor | None = None
    center: Tensor | None = None


class Part(NamedTuple):
    """Which elements of a tensor are here: those from ``start`` on, of ``size`` in all.

    cells  of small tensors that follow each other, how many times ``CELL`` elements each has; then
           a moment without blocks has a group for each of them.
    """

    size: int
    start: int = 0
    cells: tuple[int, ...] = ()

    def groups(self, moment: Moment) -> tuple[int, ...]:
        """The shape of scales."""
        if moment.block is None:
            return (len(self.cells),) if self.cells else ()
        return (moment.groups(self.size),)


def zeros(p: Tensor, moment: Moment) -> MomentState:
    """The stored moment of a parameter before the first step (O-4)."""
    dtype = storage.dtype(moment.fmt)
    codes = torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)
    if moment.scaling is None:
        return MomentState(codes)
    groups = Part(p.numel()).groups(moment)

    def full(value: float) -> Tensor:
        return torch.full(groups, value, dtype=torch.float32, device=p.device)

    rest = [full(1.0) if moment.expansion else None for _ in range(2)]
    return MomentState(codes, full(1.0), None if moment.amax == "exact" else full(0.0), *rest)


def read(stored: MomentState, moment: Moment, layout: Layout, part: Part) -> Tensor:
    """The moment as a step reads it, in a new tensor (O-4)."""
    x = storage.values(stored.codes, moment.fmt)
    if stored.scale_inv is not None:
        x = _by_group(torch.mul, x, stored.scale_inv, moment, part)
    if stored.exponent is not None and stored.center is not None:
        magnitude = _by_group(_root_of_power, x.abs(), stored.exponent, moment, part)
        x = torch.copysign(_by_group(torch.mul, magnitude, stored.center, moment, part), x)
    if moment.root:
        x = x * x
    return not_below(layout.smallest_moment, x)


def amax_of(x: Tensor, moment: Moment, part: Part) -> Tensor:
    """The largest magnitude of each group, of those that are here."""
    return _group_max(x.abs(), moment, part)


def master(x: Tensor, amax: Tensor, moment: Moment, part: Part) -> MomentState:
    """The master of float32 weights before the first step (O-14). amax is that of the whole
    tensor."""
    if moment.scaling is None:
        return MomentState(_codes(x, x, moment, part, None))
    scale, scale_inv = _scales(amax, moment)
    assert scale is not None  # a power of two
    codes = _codes(_by_group(torch.mul, x, scale, moment, part), x, moment, part, None)
    if moment.amax == "exact":
        return MomentState(codes, scale_inv)
    # Of the whole tensor's largest code, which another rank may have
    largest = _codes(amax * scale, amax, moment, part, None)
    return MomentState(codes, scale_inv, storage.values(largest, moment.fmt) * scale_inv)


def change(ratio: Tensor | float, p: Tensor, at: Scalars) -> Tensor:
    """What a step takes from a weight (O-6), from a ratio of moments; of magnitudes, its bound
    (O-15)."""
    return not_below(states.STEP_MIN, (p * at.weight_decay).add_(ratio).mul_(at.learning_rate))


def extremes(x: Tensor, g: Tensor, moment: Moment, part: Part, which: int) -> list[Tensor]:
    """The maxima that scales are made of, of m, v or the master (0 to 2): of magnitudes; where the
    amax of a moment is predicted, of the gradient's; of an expansion, the negative of the smallest
    that is not zero."""
    if not reductions(moment, which):
        return []
    magnitude = x.abs()
    maxima = [_group_max(magnitude, moment, part)]
    if moment.amax == "predicted":
        maxima.append(_group_max(g.abs(), moment, part))
    if moment.expansion:
        smaller = torch.where(magnitude == 0, -torch.inf, -magnitude)
        maxima.append(_group_max(smaller, moment, part, empty=-torch.inf))
    return maxima


def reductions(moment: Moment, which: int) -> int:
    """How many ``extremes`` m, v or the master has (0 to 2)."""
    if moment.scaling is None or (which == 2 and moment.amax == "predicted"):
        return 0
    return 2 if moment.expansion or moment.amax == "predicted" else 1


def store(
    x: Tensor,
    maxima: list[Tensor],
    old: MomentState,
    which: int,
    at: Scalars,
    layout: Layout,
    part: Part,
    key: philox.Key | None,
) -> MomentState:
    """The stored moment of x, m or v, or its root under ``root`` (O-7 to O-10), or the master.

    maxima  of ``extremes``.
    which  0 for m, 1 for v and 2 for the master.
    key    of stochastic rounding; None rounds to nearest.
    """
    moment = layout.kept[which]
    if moment.scaling is None:
        return MomentState(_codes(x, x, moment, part, key))
    if which == 2 and moment.amax == "predicted":
        assert old.amax is not None
        maxima = [old.amax + change(at.bound, old.amax, at)]
    own = amax = maxima[0]
    if moment.amax == "previous":
        assert old.amax is not None
        amax = torch.where(old.amax == 0, own, old.amax)
    elif moment.amax == "predicted" and which < 2:
        assert old.amax is not None
        kept = old.amax * old.amax if moment.root else old.amax.clone()
        amax = averages(maxima[1], kept, kept.clone(), at, layout)[which]
        amax = sqrt(amax) if moment.root else amax
    if moment.expansion:
        return _store_expanded(x, amax, -maxima[1], moment, part, key)
    scale, scale_inv = _scales(amax, moment)
    by, factor = (torch.div, scale_inv) if scale is None else (torch.mul, scale)
    codes = _codes(_by_group(by, x, factor, moment, part), x, moment, part, key)
    if moment.amax != "predicted":
        return MomentState(codes, scale_inv, own if moment.amax == "previous" else None)
    # Rounding is monotone: the largest code has the largest product.
    magnitudes = storage.values(storage.rounded(codes), moment.fmt).abs()
    return MomentState(codes, scale_inv, _group_max(magnitudes, moment, part) * scale_inv)


def averages(g: Tensor, m: Tensor, v: Tensor, at: Scalars, layout: Layout) -> tuple[Tensor, Tensor]:
    """The new moments (O-5), in place of the old ones."""
    square = g * g
    if layout.average == "products":
        m.mul_(at.b1).add_(g * at.a1)
        v.mul_(at.b2).add_(square.mul_(at.a2))
    else:
        m.add_((g - m).mul_(at.a1))
        v.add_(square.sub_(v).mul_(at.a2))
    return not_below(layout.smallest_moment, m), not_below(layout.smallest_moment, v)


def not_below(smallest: float, x: Tensor) -> Tensor:
    """x with +0 in place of magnitudes below a float32 number; NaN stays."""
    # hardshrink takes its bound to zero too, so that the bound is the number before this power of
    # two
    return functional.hardshrink(x, smallest * (1 - 2.0**-24))


def sqrt(x: Tensor) -> Tensor:
    """The square root, rounded correctly."""
    if eager_on_cpu(x):
        return torch.from_numpy(np.asarray(np.sqrt(x.numpy())))
    if x.is_cuda or torch.compiler.is_compiling():
        return x.sqrt()
    return x.double().sqrt().float()


def _store_expanded(
    x: Tensor, amax: Tensor, smallest: Tensor, moment: Moment, part: Part, key: philox.Key | None
) -> MomentState:
    """O-10."""
    floor = torch.full_like(amax, moment.floor)
    top = torch.maximum(amax, floor)
    bottom = torch.minimum(torch.maximum(smallest, floor), top)
    center = sqrt(top) * sqrt(bottom)
    ratio = top / bottom
    exponent = torch.full_like(ratio, states.EXPONENTS[-1])
    for k in reversed(states.EXPONENTS[:-1]):
        exponent = torch.where(
            ratio <= states.float32(states.EXPANDED_RANGE ** (1 / k)), k, exponent
        )
    scale_inv = _power(top / center, exponent) / torch.full_like(center, moment.fmt.max)
    scaled = _expanded(x, center, exponent, scale_inv, moment, part)
    return MomentState(_codes(scaled, x, moment, part, key), scale_inv, None, exponent, center)


def _expanded(
    x: Tensor, center: Tensor, exponent: Tensor, scale_inv: Tensor, moment: Moment, part: Part
) -> Tensor:
    """x before rounding to codes under an expansion (O-10)."""
    magnitude = _by_group(
        _power, _by_group(torch.div, x.abs(), center, moment, part), exponent, moment, part
    )
    return _by_group(torch.div, torch.copysign(magnitude, x), scale_inv, moment, part)


def _power(x: Tensor, exponent: Tensor) -> Tensor:
    square = x * x
    low = torch.where(exponent == 1, x, sqrt(x))
    return torch.where(exponent == 4, square * square, torch.where(exponent == 2, square, low))


def _root_of_power(y: Tensor, exponent: Tensor) -> Tensor:
    root = sqrt(y)
    low = torch.where(exponent == 1, y, y * y)
    return torch.where(exponent == 4, sqrt(root), torch.where(exponent == 2, root, low))


def _scales(amax: Tensor, moment: Moment) -> tuple[Tensor | None, Tensor]:
    """(scale, scale_inv) (O-7); scale is None under ``divide``."""
    amax = torch.maximum(amax, torch.full_like(amax, moment.floor))
    ones, top = torch.ones_like(amax), torch.full_like(amax, moment.fmt.max)
    if moment.scaling == "divide":
        return None, amax / top
    scale = ones / (amax / top) if moment.scaling == "reciprocal" else top / amax
    if moment.scaling == "power_of_two":
        bits = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, bits)
    return scale, ones / scale


def _codes(scaled: Tensor, x: Tensor, moment: Moment, part: Part, key: philox.Key | None) -> Tensor:
    """The codes of the scaled x (O-8)."""
    return storage.codes(scaled, moment.fmt, x if moment.keep else None, key, part.start)


def again(x: Tensor, stored: MomentState, moment: Moment, part: Part) -> Tensor:
    """The codes of x, a moment or its root, rounded to nearest under the scales of a stored
    moment."""
    if stored.scale_inv is None:
        pass
    elif stored.exponent is not None and stored.center is not None:
        x = _expanded(x, stored.center, stored.exponent, stored.scale_inv, moment, part)
    else:
        x = _by_group(torch.div, x, stored.scale_inv, moment, part)
    return storage.codes(x, moment.fmt, None, None, part.start)


def above(x: Tensor, limit: float, stored: MomentState, moment: Moment, part: Part) -> Tensor:
    """Whether magnitudes are above RN32(limit * scale_inv) of their group."""
    assert stored.scale_inv is not None
    return _by_group(torch.gt, x.abs(), stored.scale_inv * limit, moment, part)


def _group_max(x: Tensor, moment: Moment, part: Part, empty: float = 0.0) -> Tensor:
    """() or [groups]: each group's maximum over the elements here; empty if there are none."""
    block = moment.block
    if block is None and part.cells:
        return torch.stack([cells.amax() for cells in x.view(-1, CELL).amax(1).split(part.cells)])
    if block is None:
        return x.amax() if x.numel() else x.new_full((), empty)
    if x.numel() == part.size and x.numel() % block == 0:
        return scaling.block_max(x.view(-1), (block,))
    before, after = part.start % block, -(part.start + x.numel()) % block
    whole = functional.pad(x.reshape(-1), (before, after), value=empty)
    here = scaling.block_max(whole, (block,))
    first = part.start // block
    behind = moment.groups(part.size) - first - here.numel()
    return functional.pad(here, (first, behind), value=empty)


def _by_group(
    operation: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    group_values: Tensor,
    moment: Moment,
    part: Part,
) -> Tensor:
    """operation(x, its group's value) of each element."""
    block = moment.block
    if block is None and not part.cells:
        return operation(x, group_values)
    if block is None:
        cells = torch.tensor(part.cells, device=x.device)
        return operation(x.view(-1, CELL), group_values.repeat_interleave(cells).unsqueeze(1)).view(
            x.shape
        )
    first, last = part.start // block, -(-(part.start + x.numel()) // block)
    each = group_values[first:last].unsqueeze(1)
    if part.start % block == 0 and x.numel() % block == 0:
        return operation(x.view(last - first, block), each).view(x.shape)
    skip = part.start - first * block
    return operation(x, each.expand(-1, block).reshape(-1)[skip : skip + x.numel()])
