"""The online softmax of a tile of keys (A-4 to A-8): maxima, probabilities, sums, rescale factors.

Scores are [B, Hkv, rows, G, keys]: the query heads of a head of keys lie side by side.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8ref.spec.attention.variants import Arithmetic, SumOrder, Variant
from fp8ref.torch.attention.exponentials import exponential, multiply_add, times

LANES: dict[SumOrder, int] = {"tile": 1, "quad": 4, "packed": 1}
"""The partial sums that a row keeps from tile to tile."""


class Rows(NamedTuple):
    """What rows keep from tile to tile: maxima, float32 [...], -infinity at first, and the lanes of
    their sums, float32 [..., LANES]."""

    maximum: Tensor
    sums: Tensor


def start(shape: tuple[int, ...], order: SumOrder, device: torch.device) -> Rows:
    """The state before the first tile."""
    return Rows(
        torch.full(shape, -torch.inf, device=device, dtype=torch.float32),
        torch.zeros(*shape, LANES[order], device=device, dtype=torch.float32),
    )


def total(sums: Tensor, order: SumOrder) -> Tensor:
    """The sum of each row, of its lanes."""
    if order == "quad":
        return (sums[..., 0] + sums[..., 2]) + (sums[..., 1] + sums[..., 3])
    return sums[..., 0]


def step(
    s: Tensor,
    rows: Rows,
    seen: Tensor | None,
    variant: Variant,
    factors: list[Tensor | float],
    arithmetic: Arithmetic,
):
    """(probabilities, factors of what came before, the new state).

    seen      which keys each row sees, to broadcast against s; None: all.
    factors   what multiplies scaled scores, in order; of raw ones the factor in the exponent.
    Shapes:   s float32 [..., keys], keys a multiple of 8, of which those behind the tile's are not
              seen; probabilities of that shape; factors [...].
    Order:    A-4, A-5, A-7, an operation at a time.
    """
    tile = _raw if variant.scores == "raw" else _scaled
    p, c, new = tile(s, rows.maximum, seen, variant, factors, arithmetic)
    if seen is not None:
        p = torch.where(seen, p, 0.0)
    return p, c, Rows(new, add(p, c, rows.sums, variant.sum_order))


def _raw(
    s: Tensor,
    old: Tensor,
    seen: Tensor | None,
    variant: Variant,
    factors: list[Tensor | float],
    arithmetic: Arithmetic,
):
    (factor,) = factors
    row_factor = factor[..., 0] if isinstance(factor, Tensor) and factor.ndim else factor
    new = torch.maximum(old, _masked(s, seen).amax(-1))
    behind = times(old - finite(new), row_factor)
    c = exponential(behind, "2", arithmetic)
    if variant.threshold:
        stays = behind >= -variant.threshold
        new, c = torch.where(stays, old, new), torch.where(stays, 1.0, c)
    m, offset = finite(new), float(variant.offset)
    if variant.bias == "fused":
        bias = -multiply_add(m, row_factor, -offset)
    else:
        bias = offset - times(m, row_factor)
    return exponential(multiply_add(s, factor, bias[..., None]), "2", arithmetic), c, new


def _scaled(
    s: Tensor,
    old: Tensor,
    seen: Tensor | None,
    variant: Variant,
    factors: list[Tensor | float],
    arithmetic: Arithmetic,
):
    s = scaled(s, factors)
    largest = _masked(s, seen).amax(-1)
    above = (old == -torch.inf) | (largest - old > variant.threshold)
    new = torch.where(above, largest, old) if variant.threshold else torch.maximum(old, largest)
    behind = old - new  # NaN of two infinities, which the comparison leaves out
    c = torch.where(behind < -variant.threshold, exponential(behind, variant.base, arithmetic), 1.0)
    c = torch.where(new.isnan(), new, c)
    x = s - finite(new)[..., None]
    x = x + float(variant.offset) if variant.offset else x
    return exponential(x, variant.base, arithmetic), c, new


def scaled(s: Tensor, factors: list[Tensor | float]) -> Tensor:
    """Scores times each factor, in order."""
    for factor in factors:
        s = times(s, factor)
    return s


def finite(maximum: Tensor) -> Tensor:
    """The maximum, and 0 of a row that has seen no key."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def add(p: Tensor, c: Tensor, sums: Tensor, order: SumOrder) -> Tensor:
    """The sums times c, plus the probabilities of a tile, in order (A-7)."""
    if order == "tile":
        tile_sum = p[..., 0]
        for j in range(1, p.shape[-1]):
            tile_sum = tile_sum + p[..., j]
        return times(sums, c[..., None]) + tile_sum[..., None]
    groups = p.unflatten(-1, (-1, 8))
    if order == "quad":
        lanes = times(sums, c[..., None])
        for n in range(groups.shape[-2]):
            pairs = groups[..., n, :].unflatten(-1, (4, 2))
            lanes = (lanes + pairs[..., 0]) + pairs[..., 1]
        return lanes
    lanes = torch.cat([times(sums, c[..., None]) + groups[..., 0, :1], groups[..., 0, 1:]], dim=-1)
    for n in range(1, groups.shape[-2]):
        lanes = lanes + groups[..., n, :]
    a = lanes.unbind(-1)
    return (((a[0] + a[2]) + (a[4] + a[6])) + ((a[1] + a[3]) + (a[5] + a[7])))[..., None]


def _masked(s: Tensor, seen: Tensor | None) -> Tensor:
    return s if seen is None else torch.where(seen, s, -torch.inf)
